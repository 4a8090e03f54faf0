"""Plan, report, verification and diff in a real browser, light and dark: they can be read, and say what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from patcher import Patcher, benchmark, diff, plan, report, verify
from tests.support import shared
from tests.support.browser import Seen, look_at, needs_chromium
from tests.support.replacements import JOINED, Both
from tests.support.tiny import tiny_llama_config

pytestmark = needs_chromium

# The bodies of pages that hosts make: JupyterLab, VS Code.
HOSTS = {
    "light": '<body data-jp-theme-light="true" style="background: white">',
    "dark": '<body data-jp-theme-light="false" style="background: #111">',
    "vscode-dark": '<body class="vscode-dark" style="background: #1f1f1f">',
}
OUTSIDE = "<div id='outside'><table><tr><td>1</td></tr></table><p><code>x</code></p><details>y</details></div>"
# For each text its contrast to what is behind it, by the formula of WCAG 2; then what else can be measured.
MEASURE = """
const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const behind = e => {
    for (; e; e = e.parentElement) {
        const found = rgb(getComputedStyle(e).backgroundColor);
        if (found[3] !== 0) return found;
    }
    return [255, 255, 255];
};
const views = [...document.querySelectorAll('.patcher-view')], texts = [];
for (const view of views) {
    const walker = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.data.trim(), parent = walker.currentNode.parentElement;
        if (!text || parent.matches('style')) continue;
        const [a, b] = [luminance(rgb(getComputedStyle(parent).color)), luminance(behind(parent))];
        const seen = parent.checkVisibility() && parent.offsetWidth > 0;
        texts.push({text, seen, contrast: (Math.max(a, b) + .05) / (Math.min(a, b) + .05)});
    }
}
const boxes = views.map(e => e.getBoundingClientRect()).map(r => [r.left, r.top, r.right, r.bottom]);
const bars = [...document.querySelectorAll('td > b')].filter(e => e.innerText.includes('█')).map(e => ({
    label: e.closest('tr').innerText, width: e.offsetWidth, colour: getComputedStyle(e).color}));
const wide = document.documentElement.scrollWidth;
const styles = e => Object.fromEntries([...getComputedStyle(e)].map(key => [key, getComputedStyle(e)[key]]));
const outside = [...document.querySelectorAll('#outside *')], beside = outside.map(styles);
views.forEach(e => e.remove());
const alone = outside.map(styles);
document.body.append(...views);
return {texts, boxes, bars, wide, beside, alone};
"""


class Hooked(LlamaMLP):
    """No fusion takes it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_proj.register_forward_hook(_nothing)


def _nothing(*_: Any) -> None:
    return None


class Scaled(LlamaAttention):
    """Wrong by one percent."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scaling *= 1.01


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = shared.checkpoint(tiny_llama_config(num_hidden_layers=6))
    mixed = Patcher(module_mapping={"model.layers.1.mlp": Hooked}, fusions=["qkv", "gate_up"])
    shown: dict[str, Any] = {
        "report": report(LlamaForCausalLM.from_pretrained(folder, patcher=mixed)),
        "plan": plan(folder, Patcher({"LlamaMLP": Both})),
        "wrong": verify(folder, Patcher(module_mapping={"model.layers.2.self_attn": Scaled})),
        "right": verify(folder, JOINED),
        "diff": diff(folder, Patcher(fusions=["qkv", "gate_up"])),
        "benchmark": benchmark(folder, Patcher(fusions=["qkv"]), seconds=2, progress=False),
    }
    return {name: value._repr_html_() for name, value in shown.items()}


def looked_at(views: Mapping[str, str], host: str, folder: Path, width: int = 1000) -> Seen:
    return look_at(f"{HOSTS[host]}{OUTSIDE}{''.join(views.values())}", MEASURE, folder / f"{host}.png", width)


@pytest.mark.parametrize("host", HOSTS)
def test_they_can_be_read(host: str, views: dict[str, str], tmp_path: Path) -> None:
    measured, image, folder = looked_at(views, host, tmp_path)

    assert [(each["text"], each["contrast"]) for each in measured["texts"] if each["contrast"] < 4.5] == []
    assert len(measured["texts"]) > 300
    assert measured["wide"] <= 1000
    assert measured["beside"] == measured["alone"]  # no style is for what is around
    for name, box in zip(views, measured["boxes"], strict=True):
        picture = image.crop([round(edge) for edge in box])
        picture.save(folder / f"{name}-{host}.png")
        colours = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}
        assert len(colours) > 50  # letters are there
        light = sum(max(colours, key=lambda colour: colours[colour])) / 3  # of most of it: what is behind them
        assert light > 240 if host == "light" else 15 < light < 40


def seen(measured: Any) -> list[str]:
    return [each["text"] for each in measured["texts"] if each["seen"]]


def test_what_changed_is_open_and_all_else_is_folded(views: dict[str, str], tmp_path: Path) -> None:
    texts = seen(looked_at({name: views[name] for name in ("report", "plan")}, "light", tmp_path).measured)

    for text in ("layers", "{0,2..5}", "1", "FusedLlamaAttention", "FusedLlamaMLP", "Hooked", "not fused:"):
        assert text in texts
    assert "input_layernorm" in texts  # beside what changed
    assert "gate_up_proj" not in texts  # in it
    assert "q_proj" not in texts  # of the plan, in an attention that stays
    for text in ("Both", "missing:", "left over:", "Checkpoint"):
        assert text in texts
    assert "checkpoint keys" not in texts


def colour(text: str) -> str:
    red, green, _ = (int(part) for part in text[4:-1].split(","))
    return "red" if red > 2 * green else "green" if green > 1.5 * red else "neither"


@pytest.mark.parametrize("host", ["light", "dark"])
def test_bars_show_where_the_error_begins(host: str, views: dict[str, str], tmp_path: Path) -> None:
    measured, image, _ = looked_at({"wrong": views["wrong"], "right": views["right"]}, host, tmp_path)
    end = next(place for place, bar in enumerate(measured["bars"]) if bar["label"].startswith("lm_head")) + 1
    wrong, right = measured["bars"][:end], measured["bars"][end:]

    assert {"PASSED", "FAILED", "passed"} <= set(seen(measured))
    first = next(place for place, bar in enumerate(wrong) if colour(bar["colour"]) == "red")
    assert wrong[first]["label"].split()[0] == "model.layers.2"
    assert all(bar["width"] < wrong[first]["width"] for bar in wrong[:first])
    assert [bar["label"].split()[0] for bar in wrong if "begins" in bar["label"]] == ["model.layers.2.self_attn"]
    assert {colour(bar["colour"]) for bar in wrong[:first] + right} <= {"green"}
    pixels = image.getcolors(image.width * image.height)
    assert {colour(f"rgb{each}") for count, each in pixels if count > 500} >= {"red"}
    assert {colour(f"rgb{each}") for count, each in pixels if count > 50} >= {"red", "green"}


def test_on_a_narrow_page_nothing_sticks_out(views: dict[str, str], tmp_path: Path) -> None:
    assert looked_at(views, "light", tmp_path, width=600).measured["wide"] <= 600
