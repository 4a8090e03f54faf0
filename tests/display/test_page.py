"""Pages: nothing of them runs, loads or leaks, whatever the names are that strangers give; and texts can be read."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import patcher.display
from patcher import Patcher, Report
from patcher.display.parts import Weights
from patcher.display.shown import Displayable
from patcher.display.tree import module_tree
from patcher.inspection.diff import ClassDiff, Diff
from patcher.inspection.plan import Plan
from patcher.verification.benchmark import Benchmark, Measured
from patcher.verification.comparing import Stage
from patcher.verification.gains import Gain
from patcher.verification.layers import LayerErrors
from patcher.verification.rounds import ALL
from patcher.verification.verify import Verification

STYLE = (Path(patcher.display.__file__).parent / "style.css").read_text(encoding="utf-8")
HOSTILE = "</style></code><script>alert(1)</script><img src=x onerror=alert(1)>\" onmouseover='x' \x1b[2K\u202e&lt;"
ALLOWED = set("b br code details div i li p pre section span strong style summary".split())
ALLOWED |= set("table tbody td th thead tr ul".split())
DIFF = f"--- a\n+++ b\n@@ {HOSTILE} @@\n {HOSTILE}\n-{HOSTILE}1\n+{HOSTILE}2"


def hostile_tree() -> Any:
    return module_tree(
        HOSTILE,
        [(f"{HOSTILE}.{number}".replace("..", "."), HOSTILE) for number in range(2)],
        changed=[(HOSTILE, HOSTILE, HOSTILE)],
        refused=[("other", HOSTILE)],
        functions={"": ((HOSTILE, HOSTILE),)},
        weights=[
            Weights("converted", (HOSTILE,), (HOSTILE,), f"a -> b [{HOSTILE}]"),
            Weights("missing", (), (HOSTILE,)),
        ],
    )


VALUES: dict[str, Displayable] = {
    "report": Report(HOSTILE, patchers=((HOSTILE, HOSTILE),) * 2, warnings=(HOSTILE,), tree=hostile_tree()),
    "plan": Plan(
        HOSTILE,
        checkpoint=HOSTILE,
        conversions_added=((HOSTILE, (HOSTILE,)),),
        weights=(((HOSTILE,), (HOSTILE,), HOSTILE),),
        functions=((HOSTILE, HOSTILE, (HOSTILE,)),),
        problems=(HOSTILE,),
        tree=hostile_tree(),
    ),
    "verification": Verification(
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        stages=(
            Stage(
                HOSTILE,
                False,
                ((HOSTILE, 1.0),),
                message=HOSTILE,
                layers=LayerErrors(HOSTILE, 1e-5, ((HOSTILE, 1.0), (f"{HOSTILE}.x", float("inf"))), f"{HOSTILE}.x"),
            ),
        ),
    ),
    "diff": Diff(
        HOSTILE,
        (
            ClassDiff(
                (HOSTILE,), HOSTILE, HOSTILE, f"--- a\n+++ b\n@@ {HOSTILE} @@\n {HOSTILE}\n-{HOSTILE}1\n+{HOSTILE}2"
            ),
        ),
    ),
    "benchmark": Benchmark(
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        {HOSTILE: HOSTILE},
        HOSTILE,
        {HOSTILE: 1.0},
        (Measured(Patcher(name=HOSTILE), {ALL: Gain(0.5, 1.0, 0.0, 9, True), HOSTILE: Gain(2.0, 1.0, 0.0, 9, True)}),),
        ((Patcher(name=HOSTILE), HOSTILE),),
    ),
}


class Page(HTMLParser):
    """What is in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.styles = ""
        self.texts = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "br":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "style":
            self.styles += data
        else:
            self.texts += data


def test_a_patcher_is_shown_item_by_item_and_its_pins_are_folded() -> None:
    class Mine(nn.Module):
        pass

    shown = Patcher(
        {re.escape(HOSTILE): Mine}, fusions=["qkv"], name="mine", fingerprints={"LlamaMLP": "0" * 16}
    )._repr_html_()
    assert "<script" not in shown
    assert "<b>Patcher: </b>mine" in shown
    assert all(text in shown for text in ("class_mapping", "Mine", "fusions", "qkv", "<summary>", "0" * 16))
    assert "class_mapping" not in Patcher(fusions="qkv")._repr_html_()


@pytest.mark.parametrize("name", VALUES)
def test_names_of_strangers_are_only_texts(name: str) -> None:
    text = VALUES[name]._repr_html_()
    page = Page(text)

    assert page.tags <= ALLOWED
    assert page.attributes <= {"class", "title", "style", "open"}
    assert page.styles == STYLE
    assert "<script>alert(1)</script>" in page.texts
    assert not {"\x1b", "\u202e"} & set(text)


@pytest.mark.parametrize("name", VALUES)
def test_a_terminal_gets_no_control_characters_of_strangers(name: str) -> None:
    text = str(VALUES[name])
    assert "alert(1)" in text
    assert not {"\x1b", "\u202e"} & set(text)


def test_nothing_is_loaded_and_no_style_leaks() -> None:
    style = re.sub(r"/\*.*?\*/", "", STYLE, flags=re.S)
    assert not re.search(r"url\(|@import|https?:|expression", style)
    depth, selector, outermost = 0, "", []
    for letter in style:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "{" and depth == 1:
            outermost += selector.split(",")
        selector = "" if letter in "{};" else selector + letter
    assert depth == 0
    assert len(outermost) > 5
    assert all(".patcher-view" in each for each in outermost)


COLOURS = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", STYLE))
#: What texts are written in, and what may be behind them.
ON = {
    "text": ("back", "raised", "good-back", "bad-back", "warning-back"),
    "quiet": ("back", "raised", "bad-back"),
    "good": ("back", "good-back"),
    "bad": ("back", "bad-back"),
    "warning": ("back", "warning-back"),
    "changed": ("changed-back",),
}


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("text", ON)
def test_texts_stand_out_from_what_is_behind_them(theme: int, text: str) -> None:
    for behind in ON[text]:
        one, other = sorted(luminance(COLOURS[name].split(", ")[theme]) for name in (text, behind))
        assert (other + 0.05) / (one + 0.05) >= 4.5, behind
