"""Names of fusions in a `config.json`: known ones and nothing else; and layouts that no name describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher, UnmatchedPatchError
from patcher.fusions import QKV, PatchEmbeddings
from tests.support import fresh, shared
from tests.support.replacements import JOINED, OwnNorm
from tests.support.tiny import save_tiny, tiny_inputs, tiny_llama_config, tiny_qwen2_vl_config


def written(folder: Path) -> Any:
    """What `config.json` says of fusions."""
    return json.loads((folder / "config.json").read_text()).get("fusion_config")


def say(folder: Path, fusion_config: Any) -> None:
    """Have `config.json` say something of fusions."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fusion_config": fusion_config}))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


# --- names -----------------------------------------------------------------------------------------------------------


EVIL = """
import sys
from pathlib import Path
Path({marker!r}).touch()
class Evil(Fusion):
    pass
"""
HOSTILE = """
import json, sys
from pathlib import Path
import patcher.fusions.qkv
from patcher import Patcher
from patcher.errors import PatcherError
from transformers import LlamaForCausalLM
folder, values = Path(sys.argv[1]), json.loads(sys.argv[2])
config = json.loads((folder / "config.json").read_text())
for number, value in enumerate(values):
    (folder / "config.json").write_text(json.dumps(config | {"fusion_config": value}))
    before = set(sys.modules)
    try:
        LlamaForCausalLM.from_pretrained(folder)
    except (PatcherError, ValueError) as error:
        print(type(error).__name__)
    else:
        print("loaded", value)
    if number:  # the first try imports what every load needs
        assert not any("evil" in name or "patcher" in name for name in set(sys.modules) - before)
assert "evil" not in sys.modules
"""
TRICKS = [
    {"patcher": [name]}
    for name in (
        "evil",
        "evil:Evil",
        "evil.Evil",
        "../evil.py",
        "patcher.fusions.qkv:QKV",
        "__import__('evil')",
        "qkv\n",
        "",
    )
] + [
    {"patcher": {"qkv": "evil:Evil"}},
    {"patcher": [{"qkv": {"family": "evil:Evil"}}]},
    {"patcher": "evil:Evil"},
    {"patcher": ["qkv", ["evil"]]},
    {"patcher": ["qkv"], "evil:Evil": True},
]


@pytest.mark.process
def test_nothing_in_a_config_can_make_code_load(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    marker = tmp_path / "it_ran"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))

    done = fresh.run(HOSTILE, tmp_path / "checkpoint", json.dumps(TRICKS), environment={"PYTHONPATH": str(tmp_path)})
    outcomes = done.stdout.splitlines()

    assert outcomes == ["InvalidPatcherError"] * (len(TRICKS) - 1) + ["ValueError"]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["qvk"], r"'qvk' isn't a fusion; did you mean 'qkv'\?"),
        (["os.system"], r"'os.system' isn't a fusion"),
        ("qkv", r"holds a list of names of fusions, found 'qkv'"),
        (None, r"holds a list of names of fusions, found None"),
        (True, r"holds a list of names of fusions, found True"),
        ([None], r"holds a list of names of fusions, found \[None\]"),
        ([{"qkv": True}], r"holds a list of names of fusions"),
        ({"qkv": "patcher.fusions.qkv:QKV"}, r"holds a list of names of fusions"),
    ],
)
def test_a_config_can_name_known_fusions_and_nothing_else(value: Any, message: str, tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    say(tmp_path, {"patcher": value})

    with pytest.raises(InvalidPatcherError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_fusion_that_the_model_has_no_module_for_is_an_error(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    say(tmp_path, {"patcher": ["sequential_experts"]})

    with pytest.raises(UnmatchedPatchError, match="'sequential_experts' found no module that it can fuse"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# --- what no name describes ------------------------------------------------------------------------------------------


class Mine(QKV):
    """A family of one's own: its name is inherited, and means another class."""


class OnlyUp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).relu())


class Scaled(OwnNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(()))


NAMELESS = {
    "a conversion": (JOINED, r"gate_up_proj"),
    "a conversion beside a fusion": (JOINED | Patcher(fusions="qkv"), r"gate_up_proj"),
    "a family of one's own": (Patcher(fusions=Mine()), r"Mine\(\), which no name describes"),
    "weights that are left out": (
        Patcher({"LlamaMLP": OnlyUp}, dropped_weights="gate_proj"),
        r"without model\.layers\.\{0\.\.1\}\.mlp\.gate_proj\.weight",
    ),
    "weights that are new": (
        Patcher({"LlamaRMSNorm": Scaled}, new_weights="scale", fusions="qkv"),
        r"new: model\.norm\.scale",
    ),
}


@pytest.mark.parametrize("source", ["a checkpoint", "a config"])
@pytest.mark.parametrize(("patcher", "message"), NAMELESS.values(), ids=NAMELESS.keys())
def test_a_layout_that_no_name_describes_is_not_written(
    patcher: Patcher, message: str, source: str, stock: Path, tmp_path: Path
) -> None:
    if source == "a checkpoint":
        model = LlamaForCausalLM.from_pretrained(stock, patcher=patcher)
    else:
        model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)

    with pytest.raises(
        PatchedWeightsError, match=rf"nothing can load by name: no fusion describes it\.(\n.*)*{message}"
    ):
        model.save_pretrained(tmp_path / "layout", save_original_format=False)
    assert not (tmp_path / "layout").exists()


def test_options_of_a_family_are_no_name(tmp_path: Path) -> None:
    save_tiny(tiny_qwen2_vl_config(), tmp_path / "checkpoint")
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "checkpoint", patcher=Patcher(fusions=PatchEmbeddings(modules="model.visual.**"))
    )
    with pytest.raises(
        PatchedWeightsError, match=r"PatchEmbeddings\(modules=\('model\.visual\.\*\*',\)\), which no name describes"
    ):
        model.save_pretrained(tmp_path / "layout", save_original_format=False)


def test_a_family_as_an_object_without_options_is_its_name(stock: Path, tmp_path: Path) -> None:
    assert repr(Patcher(fusions=[QKV(), "qkv", Mine()])) == "Patcher(fusions=['qkv', Mine()])"
    model = LlamaForCausalLM.from_pretrained(stock, patcher=Patcher(fusions=QKV()))
    model.save_pretrained(tmp_path, save_original_format=False)

    assert written(tmp_path) == {"patcher": ["qkv"]}


def test_a_class_mapping_with_the_same_weights_is_no_layout(stock: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(stock, patcher=Patcher({"LlamaRMSNorm": OwnNorm}, fusions="qkv"))
    model.save_pretrained(tmp_path, save_original_format=False)

    again, inputs = LlamaForCausalLM.from_pretrained(tmp_path), tiny_inputs(tiny_llama_config())
    assert written(tmp_path) == {"patcher": ["qkv"]}
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], model(**inputs)[0])
