"""Files that do what a Patcher does: what one file of one module can't hold, and what to do then."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, MixtralForCausalLM
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from patcher import Patcher
from patcher.codegen import PatchConfig, generate, write
from tests.codegen.unwritable import Unspeakable
from tests.project.advice import Place, Steps, advice, load, same
from tests.project.advice.generated_files import importable
from tests.support.comparing import logits
from tests.support.replaced_elsewhere import JoinedMLP
from tests.support.tiny import tiny_llama_config, tiny_mixtral_config

LLAMA = "transformers.models.llama.modeling_llama"
FUSED = Patcher(fusions="qkv")


@contextlib.contextmanager
def imported(at: Place, config: PatchConfig) -> Iterator[Any]:
    """The file of a config: its models look for it among the modules that are imported."""
    config.target_file = f"file_of_{at.tmp.name}_{len(list(at.tmp.glob('file_of_*')))}.py"
    with importable(at.tmp):
        name = write(config, at.tmp).stem
        module = importlib.import_module(name)
    try:
        yield module
    finally:
        del sys.modules[name]


def file_of(patcher: Patcher, model_class: Any = LlamaForCausalLM, config: Any = None) -> PatchConfig:
    return PatchConfig.from_patcher(patcher, model_class, config=tiny_llama_config() if config is None else config)


def arrives(at: Place, patcher: Patcher) -> bool:
    """Whether the file of a patcher computes what the stock model does."""
    with imported(at, file_of(patcher)) as module:
        return same(module.LlamaForCausalLM.from_pretrained(at.llama), at.llama)


def close(model: Any, stock: Any) -> None:
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-4, rtol=0)


@contextlib.contextmanager
def own_module(at: Place, text: str) -> Iterator[Any]:
    """A module that a user has written, and that stays imported for as long as it is used."""
    name = f"own_{at.tmp.name}_{len(list(at.tmp.glob('own_*')))}"
    (at.tmp / f"{name}.py").write_text(text)
    with importable(at.tmp):
        try:
            yield importlib.import_module(name)
        finally:
            del sys.modules[name]


# --- what replacements use -----------------------------------------------------------------------------------------

MINE = """
import functools

import torch
from transformers.models.llama.modeling_llama import LlamaMLP as Base

{above}


class Mine(Base):
    def forward(self, x):
        return {function}(super().forward(x))
"""
MADE = """
import functools

import torch
from transformers.models.llama.modeling_llama import LlamaMLP as Base


def make():
    keep = functools.partial(torch.mul, other=1.0)

    class Mine(Base):
        def forward(self, x):
            return keep(super().forward(x))

    return Mine


Mine = make()
"""


ENUM = """
import enum


class Mode(enum.Enum):
    ONE = 1


MODE = Mode.ONE


"""
#: `repeat_kv` is defined after LlamaMLP
EARLY = """
from transformers.models.llama.modeling_llama import LlamaMLP, repeat_kv


class Mine(LlamaMLP):
    def forward(self, x, beside{default}):
        {inside}
        return super().forward(x)
"""


def helper(name: str, and_then: str = "") -> str:
    return f"def {name}(x):\n    return x\n{and_then}"


#: what is advised, a module that a file can't be made of, and one that does what the message says
MODULES = {
    "a_name_of_the_original": (
        "{} uses {}, and {} another {}. Give the one in {} a name of its own.",
        MINE.format(above=helper("repeat_kv"), function="repeat_kv"),
        MINE.format(above=helper("repeated"), function="repeated"),
    ),
    "a_helper_by_another_name": (
        "{} calls it by another name than its own, {}. Use its own name.",
        MINE.format(above=helper("helper", "\n\nshort = helper"), function="short"),
        MINE.format(above=helper("helper"), function="helper"),
    ),
    "a_value_without_text": (
        "which can't be written as text. Put it into a module that the generated file can import, and import it at ",
        MADE,
        MINE.format(above="keep = functools.partial(torch.mul, other=1.0)", function="keep"),
    ),
    "a_constant_of_a_copied_class": (
        "{} uses {}, and {}, its class, of which a file would have another one. Put {} into a module that the "
        "generated file can import, and import it at the top level.",
        MINE.format(above=ENUM + helper("kept", "    assert isinstance(MODE, Mode)\n"), function="kept"),
        MINE.format(
            above="import ast\nNODE = ast.Pass()\n" + helper("kept", "    assert isinstance(NODE, ast.Pass)\n"),
            function="kept",
        ),
    ),
    "a_default_that_the_module_defines_later": (
        "{} reads {} when it is defined, and {} defines that after {}, in whose place it is. Use {} inside of a ",
        EARLY.format(default="=repeat_kv", inside=""),
        EARLY.format(default="=None", inside="assert repeat_kv"),
    ),
}


BUILDING = """
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP


class MLP(LlamaMLP):
    pass


class Layer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mlp = {built}(config)
"""


@advice("If that one is meant, use it by its own name; if not, load with the patcher itself.")
def a_class_that_is_replaced_as_well(at: Place) -> Steps:
    for built in ("LlamaMLP", "MLP"):
        with own_module(at, BUILDING.format(built=built)) as module:
            patcher = Patcher({"LlamaDecoderLayer": module.Layer, "LlamaMLP": module.MLP})
            if built == "LlamaMLP":
                yield lambda patcher=patcher: file_of(patcher)  # type: ignore[misc]
            else:
                assert arrives(at, patcher)
            assert same(load(at.llama, patcher), at.llama)


def module_case(name: str, text: str, wrong: str, right: str) -> None:
    @advice(text, name=name)
    def steps(at: Place) -> Steps:
        with own_module(at, wrong) as module:
            yield lambda: file_of(Patcher({"LlamaMLP": module.Mine}))
        with own_module(at, right) as module:
            assert arrives(at, Patcher({"LlamaMLP": module.Mine}))


for _name, _case in MODULES.items():
    module_case(_name, *_case)


@advice("Give each key a class of its own, derived from this one.")
def a_class_in_two_places_that_another_asks_for(at: Place) -> Steps:
    class Norm(LlamaRMSNorm):  # type: ignore[misc]
        pass

    class OfMLP(Norm):
        pass

    class MLP(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            assert not isinstance(self, Norm)
            return super().forward(x)

    yield lambda: file_of(Patcher({"LlamaRMSNorm|LlamaRotaryEmbedding": Norm, "LlamaMLP": MLP}))
    assert arrives(at, Patcher({"LlamaRMSNorm": Norm, "LlamaMLP": MLP}))


@advice("Give the patcher a replacement of {}, in class_mapping, or leave the fusion out.")
def a_patch_of_what_is_fused(at: Place) -> Steps:
    class Own(LlamaAttention):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    text = "def forward(self, hidden_states, **kwargs):\n    return hidden_states, None\n"
    fused = file_of(FUSED)
    fused.override_method("LlamaAttention.forward", text)
    yield lambda: generate(fused)
    assert arrives(at, Patcher({"LlamaAttention": Own}))
    described = PatchConfig(LLAMA, "own.py")
    described.override_method("LlamaAttention.forward", text)
    assert "return hidden_states, None" in generate(described)


@advice("Add the patches to that config instead.")
def a_config_of_a_patcher_that_is_included(at: Place) -> Steps:
    code = ("LlamaMLP.extra_repr", "def extra_repr(self):\n    return 'mine'\n")
    other = PatchConfig(LLAMA, "own.py")
    other.override_method(*code, new=True)
    yield lambda: other.include(file_of(FUSED))
    described = file_of(FUSED)
    described.override_method(*code, new=True)
    with imported(at, described) as module:
        model = module.LlamaForCausalLM.from_pretrained(at.llama)
        assert same(model, at.llama)
        assert model.model.layers[0].mlp.extra_repr() == "mine"


# --- conversions ---------------------------------------------------------------------------------------------------


@advice("Load with the patcher itself, or give the conversion operations that keep their arguments.")
def a_conversion_without_text(at: Place) -> Steps:
    def joined(operation: ConversionOps) -> Patcher:
        sources = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        conversion = WeightConverter(sources, "mlp.gate_up_proj.weight", operations=[operation])
        return Patcher({"LlamaMLP": JoinedMLP}, (), conversion)

    yield lambda: file_of(joined(Unspeakable(0)))
    assert same(load(at.llama, joined(Unspeakable(0))), at.llama)
    assert arrives(at, joined(Concatenate(0)))


@advice("Write names without groups, such as mlp.gate_proj.weight, or load with the patcher itself.")
def a_conversion_with_a_group(at: Place) -> Steps:
    def joined(start: str, fused: str) -> Patcher:
        sources = [f"{start}mlp.{name}_proj.weight" for name in ("gate", "up")]
        conversion = WeightConverter(sources, f"{fused}mlp.gate_up_proj.weight", operations=[Concatenate(0)])
        return Patcher({"LlamaMLP": JoinedMLP}, (), conversion)

    grouped = joined(r"(layers\.\d+\.)", r"\1")
    yield lambda: file_of(grouped)
    assert same(load(at.llama, grouped), at.llama)
    assert arrives(at, joined("", ""))


OWN_MODEL = """
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class OwnMLP(LlamaMLP):
    pass


class Own(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OwnMLP(config)
"""


@advice("which is not defined in {}. Call from_patcher() with a model of that module.")
def a_fused_class_of_another_module(at: Place) -> Steps:
    with own_module(at, OWN_MODEL) as module:
        yield lambda: file_of(FUSED, module.Own)
    assert arrives(at, FUSED)


@advice("A generated file holds the classes of one module: for a class of another one call from_patcher() with a ")
def a_key_of_another_module(at: Place) -> Steps:
    patcher = Patcher({"MixtralRMSNorm": nn.RMSNorm})
    yield lambda: file_of(patcher)
    with imported(at, file_of(patcher, MixtralForCausalLM, tiny_mixtral_config())) as module:
        assert module.MixtralRMSNorm is nn.RMSNorm


@advice("by its name, and {} has no such {}. Give a class of a modeling file.")
def a_model_class_that_no_module_has(at: Place) -> Steps:
    class Local(LlamaForCausalLM):
        pass

    yield lambda: file_of(FUSED, Local)
    assert arrives(at, FUSED)


@advice("Use that config: generate(), write(), or include() in another one.")
def a_patcher_that_a_config_made(at: Place) -> Steps:
    config = PatchConfig(LLAMA, "out.py")
    config.override_method("LlamaMLP.extra_repr", "def extra_repr(self):\n    return 'mine'\n", new=True)
    yield lambda: file_of(config.to_patcher())
    assert "return 'mine'" in generate(config)
    assert "return 'mine'" in write(config, at.tmp / "out").read_text()
    other = file_of(FUSED)
    other.include(config)
    with imported(at, other) as module:
        model = module.LlamaForCausalLM.from_pretrained(at.llama)
        assert "mine" in repr(model.model.layers[0].mlp)
        assert same(model, at.llama)
