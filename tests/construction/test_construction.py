"""A replacement that can't be built (row 1): which, where, with what, the cause, and nothing left behind."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM, modeling_utils
from transformers.core_model_loading import WeightRenaming
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel
from transformers.utils.deprecation import deprecate_kwarg

from patcher import InvalidPatcherError, PatchConstructionError, Patcher, plan
from patcher.monkey_patching import clear_patch_mapping, register_patch_mapping
from tests.support import shared
from tests.support.replacements import OWN, OfOlderReleases, OwnLayer, OwnMLP, OwnNorm, classes, in_block
from tests.support.snapshot import changes, snapshot
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_llava_config


class Raising(nn.Module):
    error: BaseException = ValueError("no such width")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        raise self.error


class RaisingModel(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        raise ValueError("no such width")


class Narrow(nn.Module):
    """Takes other arguments than the class that it replaces."""

    def __init__(self, width: int, *, depth: int) -> None:
        super().__init__()


class Slotted(nn.Module):
    __slots__ = ("more",)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture
def nothing_is_left(llama: Path) -> Iterator[Callable[[], None]]:
    """Compare everything with what it was when the test began: at its end, and whenever the test calls."""
    LlamaForCausalLM.from_pretrained(llama)  # what the first load imports and remembers is stock's affair
    before = snapshot()

    def check() -> None:
        assert changes(before) == []

    yield check
    check()


# --- what the error says -------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "raises": (
        {"LlamaMLP": Raising},
        r"Raising could not be built in place of LlamaMLP, in __init__ of LlamaDecoderLayer "
        r"\(modeling_llama\.py:\d+\): ValueError: no such width\n"
        r"It was called as Raising\(<LlamaConfig>\)\. A replacement is constructed with the arguments of "
        r"LlamaMLP\.__init__\.$",
    ),
    "other arguments": (
        {"LlamaRMSNorm": Narrow},
        r"Narrow could not be built in place of LlamaRMSNorm, in __init__ of LlamaDecoderLayer .*: TypeError: "
        r".*unexpected keyword argument 'eps'\nIt was called as Narrow\(64, eps=1e-06\)\. .*"
        r"take them all, or accept \*\*kwargs",
    ),
    "keyword arguments": (
        {"LlamaAttention": Narrow},
        r"in place of LlamaAttention.*TypeError.*\nIt was called as Narrow\(config=<LlamaConfig>, layer_idx=0\)",
    ),
    "layout": ({"LlamaMLP": Slotted}, r"Slotted could not be built in place of LlamaMLP.*object layout differs"),
    "sub-model": (
        {"LlamaModel": Narrow},
        r"Narrow could not be built in place of LlamaModel, in __init__ of LlamaForCausalLM",
    ),
    "root": (
        {"LlamaForCausalLM": RaisingModel},
        r"RaisingModel could not be built in place of LlamaForCausalLM.*no such width",
    ),
}


@pytest.mark.crossed
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("way", ["load", "from_config", "applied"])
def test_the_error_says_which_and_where_and_with_what(
    what: str, way: str, llama: Path, nothing_is_left: Callable[[], None]
) -> None:
    mapping, text = WRONG[what]
    patcher = Patcher(mapping)
    loads: dict[str, Callable[[], Any]] = {
        "load": lambda: LlamaForCausalLM.from_pretrained(llama, patcher=patcher),
        "from_config": lambda: AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher),
        "applied": lambda: in_block(patcher),
    }
    with pytest.raises(PatchConstructionError, match=f"(?s){text}") as caught:
        loads[way]()
    assert isinstance(caught.value.__cause__, (ValueError, TypeError))
    nothing_is_left()
    assert classes(LlamaForCausalLM.from_pretrained(llama)) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}


class NoBeginning(OwnMLP):
    def __init__(self, config: Any) -> None:
        self.config = config


class Yielding(OwnMLP):
    def __init__(self, config: Any) -> Any:
        super().__init__(config)
        yield self.gate_proj


class Returning(OwnMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        return self.gate_proj.in_features


class PlainRoot(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = LlamaModel(config)


def following(advice: str) -> dict[str, type[nn.Module]]:
    """The mapping with what an error says written into the class."""
    if "derive it from" in advice:
        return {"LlamaForCausalLM": type("Root", (LlamaForCausalLM,), {})}
    assert "super().__init__()" in advice or "must return None" in advice
    return {"LlamaMLP": OwnMLP}


NO_MODULES: dict[str, tuple[dict[str, Any], str]] = {
    "no super().__init__()": (
        {"LlamaMLP": NoBeginning},
        r"NoBeginning\.__init__ doesn't call super\(\)\.__init__\(\).* call it first",
    ),
    "a generator": (
        {"LlamaMLP": Yielding},
        r"Yielding\.__init__ returns an object of generator: it must return None, so it .* yield",
    ),
    "a value": ({"LlamaMLP": Returning}, r"Returning\.__init__ returns an object of int: it must return None\.$"),
    "a plain root": (
        {"LlamaForCausalLM": PlainRoot},
        r"PlainRoot is to be the model itself in place of LlamaForCausalLM.* derive it",
    ),
}


@pytest.mark.crossed
@pytest.mark.parametrize("what", NO_MODULES)
@pytest.mark.parametrize("way", ["load", "from_config", "applied", "plan"])
def test_what_is_no_module_of_torch_is_named(
    what: str, way: str, llama: Path, nothing_is_left: Callable[[], None]
) -> None:
    mapping, text = NO_MODULES[what]

    def build(patcher: Patcher) -> None:
        if way == "load":
            LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
        elif way == "from_config":
            AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
        elif way == "applied":
            in_block(patcher)
        else:
            for error in plan(llama, patcher).problems:
                raise PatchConstructionError(error)

    with pytest.raises(PatchConstructionError, match=text) as caught:
        build(Patcher(mapping))
    nothing_is_left()
    build(Patcher(following(str(caught.value))))


class OfBoth(LlamaMLP):
    def forward(self, states: torch.Tensor, x: torch.Tensor | None = None) -> Any:
        return super().forward(states if x is None else x)


def test_a_parameter_that_transformers_has_renamed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that goes into the `**kwargs` of an attention is lost: 5.24 renamed `past_key_values` to `cache`."""
    renaming = deprecate_kwarg("states", "99.0.0", new_name="x")
    monkeypatch.setattr(LlamaMLP, "forward", renaming(LlamaMLP.forward))
    said = (
        r"OfOlderReleases.forward has a parameter 'states', which is called 'x' in LlamaMLP.forward of transformers "
        rf"{re.escape(transformers.__version__)}, so that argument would be ignored\. Call it 'x'"
    )
    for load in (
        lambda: LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": OfOlderReleases}, strict=False)),
        lambda: LlamaForCausalLM.from_pretrained(
            llama, patcher=Patcher(module_mapping={"model.layers.0.mlp": OfOlderReleases})
        ),
        lambda: Patcher({"LlamaMLP": OfOlderReleases}).apply(LlamaForCausalLM.from_pretrained(llama)),
    ):
        with pytest.raises(PatchConstructionError, match=said):
            load()
    planned = plan(llama, Patcher({"LlamaMLP": OfOlderReleases}))
    assert re.search(said, planned.problems[0])
    for right in (OfBoth, OwnMLP):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": right}))


def test_the_cause_is_the_very_error(llama: Path) -> None:
    with pytest.raises(PatchConstructionError, match="no such width") as caught:
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Raising}))
    assert caught.value.__cause__ is Raising.error
    frames = []
    traceback = Raising.error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_qualname)
        traceback = traceback.tb_next
    assert frames[-1] == "Raising.__init__"


def test_of_two_replacements_the_inner_one_is_named(llama: Path) -> None:
    with pytest.raises(PatchConstructionError, match=r"^Raising could not be built in place of LlamaMLP") as caught:
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaDecoderLayer": OwnLayer, "LlamaMLP": Raising}))
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_text_tower_of_a_composite_model_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llava_config(), tmp_path)
    with pytest.raises(PatchConstructionError, match=r"in place of LlamaMLP, in __init__ of LlamaDecoderLayer"):
        AutoModelForImageTextToText.from_pretrained(folder, patcher=Patcher({"LlamaMLP": Raising}))


# --- nothing is left -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), MemoryError("full")]
)
def test_whatever_a_replacement_raises_nothing_is_left(
    error: BaseException, llama: Path, nothing_is_left: Callable[[], None]
) -> None:
    class Interrupted(Raising):
        pass

    Interrupted.error = error
    expected = PatchConstructionError if isinstance(error, Exception) else type(error)
    for load in (
        lambda: LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Interrupted})),
        lambda: LlamaForCausalLM._from_config(tiny_llama_config(), patcher=Patcher({"LlamaMLP": Interrupted})),
    ):
        with pytest.raises(expected):
            load()
        nothing_is_left()
    assert classes(LlamaForCausalLM.from_pretrained(llama)) == {"LlamaMLP": 2, "LlamaRMSNorm": 5}


@pytest.mark.parametrize("names", [{"LlamaMLP": OwnMLP}, {"LayerNorm": nn.LayerNorm}, {"Llama.*": Raising}])
def test_after_a_block_nothing_is_left_however_it_ends(
    names: dict[str, Any], nothing_is_left: Callable[[], None]
) -> None:
    def ends_badly() -> None:
        with Patcher(names).applied():
            raise ZeroDivisionError("in the block")

    with pytest.raises(ZeroDivisionError, match="in the block"):
        ends_badly()
    nothing_is_left()


def test_in_a_block_an_error_can_be_caught_and_the_block_goes_on(nothing_is_left: Callable[[], None]) -> None:
    with Patcher({"LlamaMLP": OwnMLP, "LlamaRMSNorm": Narrow}, strict=False).applied():
        with pytest.raises(PatchConstructionError, match="Narrow"):
            LlamaForCausalLM(tiny_llama_config())
        assert type(LlamaMLP(tiny_llama_config())) is OwnMLP
        with pytest.raises(PatchConstructionError, match="Narrow"):
            LlamaForCausalLM(tiny_llama_config())
        with Patcher({"LlamaRMSNorm": OwnNorm}).applied():
            assert classes(LlamaForCausalLM(tiny_llama_config())) == {"OwnMLP": 2, "OwnNorm": 5}


def test_a_load_under_the_registry_leaves_nothing(llama: Path, nothing_is_left: Callable[[], None]) -> None:
    register_patch_mapping({"LlamaMLP": Raising})
    try:
        with pytest.raises(Exception, match="no such width"):
            LlamaForCausalLM.from_pretrained(llama)
    finally:
        clear_patch_mapping()
    nothing_is_left()


def test_without_a_patcher_nothing_is_covered_or_looked_for(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 11, structurally: a load that nobody patches puts up no gate and looks at no class."""
    from patcher.construction import class_rules, gates

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a scope was opened")

    monkeypatch.setattr(gates.Cover, "__init__", fail)
    monkeypatch.setattr(class_rules, "subclasses", fail)
    LlamaForCausalLM.from_pretrained(llama)
    LlamaForCausalLM._from_config(tiny_llama_config())
    LlamaForCausalLM(tiny_llama_config())


@pytest.mark.filterwarnings("ignore:These parts of the patcher")
def test_a_patched_load_imports_nothing(llama: Path) -> None:
    """Row 11, structurally: today's registry imports all of transformers when it looks for names."""
    LlamaForCausalLM.from_pretrained(llama)
    before = {name for name in sys.modules if name.startswith("transformers")}
    LlamaForCausalLM.from_pretrained(llama, patcher=OWN)
    with Patcher({"LayerNorm": nn.Identity, "^Mixtral": nn.Identity, ".*MLP": OwnMLP}, strict=False).applied():
        LlamaForCausalLM(tiny_llama_config())
    assert {name for name in sys.modules if name.startswith("transformers")} == before


# --- what is not supported -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device_mesh": object()}, "device_mesh"),
        ({"distributed_config": DistributedConfig(pp_size=2)}, "a distributed_config with pp_size"),
        ({"distributed_config": {"pp_size": 2}}, "a distributed_config with pp_size"),
    ],
)
@pytest.mark.parametrize("conversions", ["filtered_weight_conversion_patterns", "extra_weight_conversions"])
def test_conversions_with_what_they_may_not_survive_raise_before_anything_is_read(
    options: dict[str, Any], named: str, conversions: str
) -> None:
    value: Any = "experts" if conversions.startswith("filtered") else WeightRenaming("a", "b")
    patcher = Patcher({"LlamaMLP": OwnMLP}, **{conversions: value})
    text = f"A patcher with weight conversions was requested together with {named}, which is not supported"
    with pytest.raises(InvalidPatcherError, match=text):
        LlamaForCausalLM.from_pretrained("there/is-no-such-model", patcher=patcher, **options)
    with pytest.raises(InvalidPatcherError, match=text), patcher.applied():
        LlamaForCausalLM.from_pretrained("there/is-no-such-model", **options)


if hasattr(modeling_utils, "get_distributed_checkpoint_dir"):  # they came with 5.18

    def test_conversions_with_a_distributed_checkpoint_raise_before_anything_is_read(tmp_path: Path) -> None:
        (tmp_path / "shard-00000-model-00001-of-00001.safetensors").write_bytes(b"nothing that could be read")
        patcher = Patcher({"LlamaMLP": OwnMLP}, "experts")
        with pytest.raises(InvalidPatcherError, match=r"together with the distributed checkpoint in .*not supported"):
            LlamaForCausalLM.from_pretrained(tmp_path, patcher=patcher)
        (tmp_path / "part").mkdir()
        (tmp_path / "shard-00000-model-00001-of-00001.safetensors").rename(
            tmp_path / "part/shard-00000-model-00001-of-00001.safetensors"
        )
        with pytest.raises(InvalidPatcherError, match=r"together with the distributed checkpoint in .*not supported"):
            LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=tmp_path, subfolder="part", patcher=patcher)
