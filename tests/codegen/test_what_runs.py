"""Replacements are written as they run: what their text doesn't say is refused."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    apply_rotary_pos_emb as stock_rotary,
)

from patcher import CodegenError, Patcher, diff
from patcher.codegen import PatchConfig, generate
from tests.support.replacements import OwnMLP
from tests.support.tiny import DECODER_SIZES, tiny_inputs, tiny_llama_config
from tests.support.written_modules import written_module


@functools.wraps(stock_rotary)
def around_stock(*args: Any, **kwargs: Any) -> Any:
    query, key = stock_rotary(*args, **kwargs)
    return query * 2, key


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        query, key = function(*args, **kwargs)
        return query * 3, key

    return wrapper


def unrotated(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return q + 0, k + 0


@scaled
def decorated(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return q + 0, k + 0


by_call = scaled(unrotated)


def text_of(patcher: Patcher) -> str:
    return generate(
        PatchConfig.from_patcher(patcher, LlamaForCausalLM, config=tiny_llama_config(), target_file="modeling_own.py")
    )


def outputs(patcher: Patcher, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of a model of the file, of a patched one, and of stock, with the same weights."""
    (folder / "modeling_own.py").write_text(text_of(patcher))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "modeling_own", raising=False)
    config = tiny_llama_config()
    models = [
        importlib.import_module("modeling_own").LlamaForCausalLM(config),
        LlamaForCausalLM._from_config(config, patcher=patcher),
        LlamaForCausalLM(config),
    ]
    for model in models:
        model.load_state_dict(models[2].state_dict())
    return [model.eval()(**tiny_inputs(config)).logits for model in models]


@pytest.mark.parametrize("function", [around_stock, decorated])
def test_a_wrapper_is_written_with_what_it_wraps(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, patched, stock = outputs(Patcher(function_mapping={"apply_rotary_pos_emb": function}), tmp_path, monkeypatch)
    assert torch.equal(own, patched)
    assert not torch.allclose(patched, stock)


def test_what_a_call_wrapped_is_refused() -> None:
    with pytest.raises(CodegenError, match="function"):
        text_of(Patcher(function_mapping={"apply_rotary_pos_emb": by_call}))


SCALE = 2.0


class Assigned(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Constant(LlamaMLP):
    factor = 1.0

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.factor


class Default(LlamaMLP):
    def forward(self, x: Any, scale: float = SCALE) -> Any:
        return super().forward(x) * scale


class KeywordDefault(LlamaMLP):
    def forward(self, x: Any, *, scale: float = 1 * SCALE) -> Any:
        return super().forward(x) * scale


class OfGlobal(LlamaMLP):
    factor: float = SCALE

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.factor


class AddedConstant(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * getattr(self, "factor", 1.0)


def made(SCALE: float) -> Any:  # noqa: N803  # it hides the global
    class Local(LlamaMLP):
        factor = SCALE

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.factor

    return Local


def options(x: Any) -> Any:
    return x * options.factor  # type: ignore[attr-defined]


class OfOptions(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return options(super().forward(x))


@functools.singledispatch
def gained(x: Any) -> Any:
    return x


@gained.register
def _(x: torch.Tensor) -> Any:
    return x * 2


class Dispatched(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return gained(super().forward(x))


class OfAnotherFile(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Added(LlamaMLP):
    def extra_repr(self) -> str:
        return "own"


def doubled(self: Any, x: Any) -> Any:
    return LlamaMLP.forward(self, x) * 2


Assigned.forward = doubled  # type: ignore[method-assign]
Constant.factor = 5.0
SCALE = 3.0
AddedConstant.factor = 2.0  # type: ignore[attr-defined]
Added.forward = doubled  # type: ignore[method-assign]
options.factor = 2.0  # type: ignore[attr-defined]
OfAnotherFile.forward = OwnMLP.forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (Assigned, "its forward"),
        (Constant, "its factor"),
        (Default, "SCALE, a default of it,"),
        (Added, "its forward"),
        (KeywordDefault, r"1 \* SCALE, a default of it,"),
        (OfGlobal, "its factor"),
        (AddedConstant, "its factor"),
        (made(2.0), "its factor"),
        (OfOptions, "its factor"),
        (Dispatched, "its registry"),
        (OfAnotherFile, "its forward"),
    ],
)
def test_what_was_changed_later_is_refused(cls: Any, what: str) -> None:
    with pytest.raises(CodegenError, match=rf"the source of '\w+', and {what} was changed after its definition in"):
        text_of(Patcher({"LlamaMLP": cls}))


EDITED = """
from transformers.models.llama.modeling_llama import LlamaMLP


class Scaled(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 2


def rotary(q, k, *args, **kwargs):
    return q * 2, k
"""


def test_a_file_that_was_edited_since_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = written_module(EDITED, path := tmp_path / "edited_since.py")
    monkeypatch.setitem(sys.modules, "edited_since", module)
    patchers = Patcher({"LlamaMLP": module.Scaled}), Patcher(function_mapping={"apply_rotary_pos_emb": module.rotary})
    for patcher in patchers:
        assert " * 2" in text_of(patcher)
    path.write_text(EDITED.replace("* 2", "* 3"))

    for patcher in patchers:
        with pytest.raises(CodegenError, match=r"edited_since\.py no longer defines it where Python read it"):
            text_of(patcher)
        assert "* 3" not in str(diff(tiny_llama_config(), patcher))


class Around(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = LlamaMLP(config)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class ByName(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return LlamaMLP.forward(self, x)


@pytest.mark.parametrize("cls", [Around, ByName])
def test_a_class_that_uses_the_one_in_whose_place_it_is_is_refused(cls: Any) -> None:
    """Its name is that of the replacement in the file."""
    with pytest.raises(CodegenError, match=rf"{cls.__name__}, uses LlamaMLP, which the patcher replaces"):
        text_of(Patcher({"LlamaMLP": cls}))


class OwnLayer(LlamaDecoderLayer):
    """`__init_subclass__` of its base wraps its forward."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * 2, *args, **kwargs)


class ByModule(modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * 2, *args, **kwargs)


class Doubled(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


class DoubledGemma3(Gemma3MLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def test_a_base_by_its_name_comes_with_the_other_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = Patcher({"LlamaDecoderLayer": OwnLayer, "LlamaMLP": Doubled})
    own, patched, stock = outputs(patcher, tmp_path, monkeypatch)
    assert torch.equal(own, patched)
    assert not torch.allclose(patched, stock)


def test_a_base_of_a_module_comes_without_and_is_refused() -> None:
    with pytest.raises(CodegenError, match=r"derives from modeling_llama\.LlamaDecoderLayer, .* Derive it"):
        text_of(Patcher({"LlamaDecoderLayer": ByModule, "LlamaMLP": Doubled}))
    text_of(Patcher({"LlamaDecoderLayer": ByModule}))  # the only one


HEADS = [
    *(("Llama", f"LlamaFor{task}") for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering")),
    ("Gemma3", "Gemma3ForConditionalGeneration"),
]


@pytest.mark.parametrize("mapping", ["class", "function"])
@pytest.mark.parametrize(("family", "head"), HEADS)
def test_a_part_that_an_auto_class_builds_is_of_the_file(
    family: str, head: str, mapping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class, config = getattr(transformers, head), tiny_llama_config(pad_token_id=0)
    if family == "Gemma3":
        text = {**DECODER_SIZES, "head_dim": 16}
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    patcher = Patcher(function_mapping={"apply_rotary_pos_emb": unrotated})
    if mapping == "class":
        patcher = Patcher({f"{family}MLP": {"Llama": Doubled, "Gemma3": DoubledGemma3}[family]})
    described = PatchConfig.from_patcher(patcher, model_class, config=config, target_file="modeling_own.py")
    (tmp_path / "modeling_own.py").write_text(generate(described))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "modeling_own", raising=False)
    stock = model_class(config)
    models = [getattr(importlib.import_module("modeling_own"), head)(config), stock]
    models.insert(1, model_class._from_config(config, patcher=patcher))
    for model in models:
        model.load_state_dict(stock.state_dict())
    own, patched, expected = (model.eval()(input_ids=torch.arange(1, 9)[None])[0] for model in models)
    assert torch.equal(own, patched)
    assert not torch.allclose(patched, expected)


#: a module whose classes need more than their own lines
WRITTEN = """\
from __future__ import annotations

import enum

from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, repeat_kv
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as stock_rotary

try:
    import there_is_none as kernels
except ImportError:
    kernels = None

calls = 0


class Int(int):
    def __mul__(self, other):
        return 2 * other


TWO = Int(1)


class Mode(enum.Enum):
    SINGLE = 1
    DOUBLE = 2


def twice(function):
    def doubled(self, x):
        return function(self, x) * Mode.DOUBLE.value

    return doubled


class Decorated(LlamaMLP):
    @twice
    def forward(self, x):
        return super().forward(x)


class Derived(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 2


class DerivedTwice(Derived):
    pass


def turned(x, turn=repeat_kv):
    return turn(x[None], 1)[0]


class Layer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mlp = DerivedTwice(config)

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(turned(hidden_states), *args, **kwargs)


class Annotated(LlamaMLP):
    inner: Annotated | None = None

    def forward(self, x: Tensor, attention: LlamaAttention | None = None) -> Tensor:
        return super().forward(x) * 2

    def copied(self, to: "str" | None = None) -> Annotated:
        return self


class Optional(LlamaMLP):
    def forward(self, x):
        return kernels.mlp(x) if kernels is not None else super().forward(x) * 2


class Counting(LlamaMLP):
    def forward(self, x):
        global calls
        calls += 1
        return super().forward(x) * 2


class Subclassed(LlamaMLP):
    def forward(self, x):
        return TWO * super().forward(x)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1, depth=1):
    if depth:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, depth - 1)
    query, key = stock_rotary(q, k, cos, sin, unsqueeze_dim)
    return query * 2, key
"""


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("LlamaMLP", "Annotated"),
        ("LlamaMLP", "Decorated"),
        ("LlamaDecoderLayer", "Layer"),
        ("LlamaMLP", "Optional"),
        ("LlamaMLP", "Counting"),
        ("LlamaMLP", "Subclassed"),
        ("apply_rotary_pos_emb", "apply_rotary_pos_emb"),
    ],
)
def test_what_code_needs_of_its_module_comes_with_it(
    target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_own_code.py").write_text(WRITTEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_own_code", raising=False)
    replacement = getattr(importlib.import_module("of_own_code"), name)
    patcher = Patcher({target: replacement}) if target[0] == "L" else Patcher(function_mapping={target: replacement})
    own, patched, stock = outputs(patcher, tmp_path, monkeypatch)
    assert torch.equal(own, patched)
    assert not torch.allclose(patched, stock)
