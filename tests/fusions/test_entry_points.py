"""Families that another package registers: really installed, used by their names, read from a layout on disk."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from patcher import InvalidPatcherError, PatchConflictError, Patcher
from patcher.fusions import QKV, GateUp
from tests.support.packages import install, lay_out, run_with
from tests.support.tiny import save_tiny, tiny_llama_config

ACME = '''
"""A family of the package acme-fusions."""

import torch
from torch import nn
from patcher.fusions import Fusion, Layout


class Turned(nn.Module):
    """A linear layer without bias whose weight lies the other way round."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.columns = nn.Parameter(torch.empty(in_features, out_features))

    @classmethod
    def from_module(cls, linear):
        return cls(linear.in_features, linear.out_features)

    def forward(self, x):
        return x @ self.columns


class Transposed(Layout):
    def fuse(self, tensors):
        return [tensors[0].t().contiguous()]

    def separate(self, tensors):
        return [tensors[0].t().contiguous()]


class TurnedDown(Fusion):
    name = "turned_down"
    target_modules_patterns = (r"\\.down_proj$",)

    def is_fusable(self, module):
        return type(module) is nn.Linear and module.bias is None

    def layouts(self, module):
        return [Transposed("weight", "columns")]

    def make_fused_class(self, original_cls):
        return Turned
'''
#: Uses the family by its name: fuses, saves in both layouts, and reads its layout by the folder alone.
USER = """
import importlib.metadata, json, sys
import transformers.modeling_utils  # which looks at distributions itself
stock, asked_for = importlib.metadata.entry_points, []
importlib.metadata.entry_points = lambda **options: asked_for.append(options) or stock(**options)
import patcher, patcher.fusions.families, patcher.presets
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from patcher import Patcher, plan, report

root = Path(sys.argv[1])
assert not asked_for and "acme_fusions" not in sys.modules
asked = Patcher(fusions=["qkv", "turned_down"])
assert "acme_fusions" in sys.modules and "broken_fusions" not in sys.modules
assert asked_for == [{"group": "patcher.fusions"}]
import acme_fusions
assert asked == Patcher(fusions=["qkv", acme_fusions.TurnedDown()])
assert Patcher.from_dict(asked.to_dict()) == asked
assert Patcher.from_fusion_config({"turned_down": True}) == Patcher(fusions="turned_down")
assert plan(root / "checkpoint", asked).ok
model = AutoModelForCausalLM.from_pretrained(root / "checkpoint", patcher=asked)
assert type(model.model.layers[0].mlp.down_proj).__name__ == "Turned"
model.save_pretrained(root / "original")
model.save_pretrained(root / "layout", save_original_format=False)
again = AutoModelForCausalLM.from_pretrained(root / "layout")
assert [path for path, *_ in report(again).fused] == [path for path, *_ in report(model).fused]
assert type(again.model.layers[1].mlp.down_proj) is acme_fusions.Turned
tokens = torch.arange(3, 9)[None]
stock = AutoModelForCausalLM.from_pretrained(root / "checkpoint")
torch.testing.assert_close(again(tokens).logits, stock(tokens).logits, atol=1e-5, rtol=0)
again.save_pretrained(root / "from layout")
assert len(asked_for) == 1
print(json.dumps(json.loads((root / "layout/config.json").read_text())["fusion_config"]))
"""
#: Reads the layout where the package isn't installed.
WITHOUT = """
import sys
from transformers import AutoModelForCausalLM
import patcher
from patcher import plan, Patcher
for read in (AutoModelForCausalLM.from_pretrained, lambda folder: plan(folder, Patcher())):
    try:
        read(sys.argv[1])
    except patcher.PatcherError as error:
        print(type(error).__name__, error)
"""


NO_FUSION = "from patcher.fusions import Fusion\nnumber = 3\nclass Renamed(Fusion):\n    name = 'renamed'\n"
#: A package that registers a family, and one whose module can't be imported: its modules, and what it registers.
PACKAGES = {
    "acme-fusions": ({"acme_fusions": ACME}, {"turned_down": "acme_fusions:TurnedDown"}),
    "broken-fusions": (
        {"broken_fusions": "import not_there\n", "no_fusion": NO_FUSION},
        {"broken": "broken_fusions:Broken", "no_family": "no_fusion:number", "other": "no_fusion:Renamed"},
    ),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The packages in this process, in a folder of the test's own."""
    folder = tmp_path / "site"
    for name, registered in PACKAGES.items():
        lay_out(name, *registered, folder)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name in ("acme_fusions", "broken_fusions", "no_fusion", "second"):
            del sys.modules[name]


@pytest.mark.process
def test_it_is_used_by_its_name_and_its_layout_is_read_where_it_is_installed(tmp_path: Path) -> None:
    root = tmp_path
    for name, registered in PACKAGES.items():
        install(name, *registered, root, root / "site")
    folder = save_tiny(tiny_llama_config(), root / "checkpoint")
    said = run_with(root / "site", USER, str(root)).splitlines()[-1]

    assert json.loads(said) == {"patcher": ["qkv", "acme-fusions/turned_down"]}
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(root / "stock")
    stock = (root / "stock/model.safetensors").read_bytes()
    assert (root / "original/model.safetensors").read_bytes() == stock
    assert (root / "from layout/model.safetensors").read_bytes() == stock
    layout = load_file(root / "layout/model.patcher.safetensors")
    assert torch.equal(
        layout["model.layers.0.mlp.down_proj.columns"].t(),
        load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"],
    )
    messages = run_with(None, WITHOUT, str(root / "layout")).splitlines()
    assert len(messages) == 2
    for message in messages:
        assert message.startswith(
            "InvalidPatcherError fusions: 'turned_down' is a family of fusions of the package 'acme-fusions', "
            "which is not installed here"
        )
        assert message.endswith("Install it: pip install acme-fusions")


def test_the_names_that_are_known_are_told(here: Path) -> None:
    with pytest.raises(InvalidPatcherError, match=r"'turned_dwon' isn't a fusion; did you mean 'turned_down'\?"):
        Patcher(fusions="turned_dwon")
    with pytest.raises(InvalidPatcherError, match=r"known names: .*'split', 'broken', 'no_family'"):
        Patcher(fusions="something else entirely".replace(" ", ""))
    assert repr(Patcher(fusions="turned_down")) == "Patcher(fusions=['turned_down'])"


def test_a_package_that_is_installed_meanwhile_is_found(tmp_path: Path) -> None:
    folder = str(tmp_path)
    sys.path.insert(0, folder)
    try:
        with pytest.raises(InvalidPatcherError, match="'turned_down' isn't a fusion"):
            Patcher(fusions="turned_down")
        lay_out("acme-fusions", *PACKAGES["acme-fusions"], tmp_path)
        assert Patcher(fusions="turned_down").fusions == ("turned_down",)
    finally:
        sys.path.remove(folder)
        sys.modules.pop("acme_fusions", None)


#: what is asked for -> what is said; nothing is said of it before
WRONG = {
    "broken": r"'broken' is registered by broken-fusions \(broken_fusions:Broken\), and importing that failed with "
    r"ModuleNotFoundError: No module named 'not_there'\. Update the package or what it lacks",
    "no_family": r"broken-fusions \(no_fusion:number\), which isn't a subclass of .*Fusion called 'no_family' but 3\.",
    "other": r"broken-fusions \(no_fusion:Renamed\), which isn't a subclass of .*Fusion called 'other' but .*Renamed",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_registration_is_an_error_where_its_name_is_asked_for(name: str, here: Path) -> None:
    assert Patcher(fusions=["qkv", "turned_down"]).fusions == ("qkv", "turned_down")
    assert "broken_fusions" not in sys.modules

    with pytest.raises(InvalidPatcherError, match=WRONG[name]):
        Patcher(fusions=name)


def register_again(site: Path, name: str) -> None:
    source = f"from patcher.fusions import Fusion\nclass Family(Fusion):\n    name = {name!r}\n"
    lay_out("second", {"second": source}, {name: "second:Family"}, site)


def test_a_name_that_two_packages_register_is_refused(here: Path) -> None:
    register_again(here, "turned_down")

    message = r"'turned_down' is registered by several packages, (acme-fusions|second) .* and (acme-fusions|second)"
    with pytest.raises(PatchConflictError, match=message):
        Patcher(fusions="turned_down")
    family = importlib.import_module("second").Family()
    assert Patcher(fusions=[family]).fusions == (family,)


def test_a_name_of_ours_that_a_package_registers_is_refused(here: Path) -> None:
    register_again(here, "qkv")

    message = r"'qkv' is registered by several packages, patcher \(.*:QKV\) and second \(second:Family\)\. Uninstall"
    with pytest.raises(PatchConflictError, match=message):
        Patcher(fusions=["qkv", "gate_up"])
    assert Patcher(fusions=[QKV(), GateUp()]).fusions == (QKV(), "gate_up")
    resolution = Patcher(fusions=[QKV()]).resolve(LlamaForCausalLM, tiny_llama_config())
    assert [type(fusion) for fusion in Patcher(fusions=[QKV()]).fusions] == [QKV]
    assert len(resolution.fused) == 2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("second/turned_down", r"is a family of the package 'second' there, and here it is one of 'acme-fusions'"),
        ("second/missing", r"'missing' is a family of fusions of the package 'second', which is not installed here"),
        ("acme-fusions/qkv", r"'acme-fusions/qkv' isn't a fusion"),
        ("../turned_down", r"'../turned_down' isn't a fusion"),
        ("a b/turned_down", r"'a b/turned_down' isn't a fusion"),
    ],
)
def test_a_config_that_names_another_package_is_refused(said: str, message: str, here: Path, tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text()) | {"fusion_config": {"patcher": [said]}}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(InvalidPatcherError, match=message):
        LlamaForCausalLM.from_pretrained(folder)
    assert "second" not in sys.modules
