"""`forward_of(Layer)` builds the original class with the forward of a layer, and nothing else of it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from abc import ABCMeta
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from patcher import Patcher, forward_of, like
from patcher.errors import InvalidPatcherError, PatchConstructionError
from tests.support.tiny import tiny_llama_config


class FastNorm(nn.Module):
    """As layers of kernels are written: the weight and the epsilon are those of the module that it is put on."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class Inference(FastNorm):
    has_backward = False


class NotCompiled(FastNorm):
    can_torch_compile = False


class ReadsMore(nn.Module):
    def forward(self, hidden_states):
        return hidden_states * self.gain + self.shift


class Asks(nn.Module):
    def forward(self, hidden_states):
        return hidden_states * getattr(self, "gain", 1)


class OtherParameters(nn.Module):
    def forward(self, hidden_states, residual):
        return hidden_states + residual


def built(layer: type[nn.Module], key: str = "LlamaRMSNorm") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=Patcher({key: forward_of(layer)})).eval()


def stock() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config()).eval()


TOKENS = torch.arange(12)[None] + 3


def test_the_original_class_runs_with_the_forward() -> None:
    model = built(FastNorm)
    norm = model.model.norm
    assert isinstance(norm, LlamaRMSNorm)
    assert type(norm).__name__ == "LlamaRMSNorm"
    assert type(norm).forward is FastNorm.forward
    assert not isinstance(norm, FastNorm)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, stock()(TOKENS).logits)
    assert LlamaRMSNorm.forward is not FastNorm.forward


def test_by_path_and_by_like() -> None:
    patcher = Patcher({like("LlamaRMSNorm"): forward_of(FastNorm)})
    model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
    assert type(model.model.norm).forward is FastNorm.forward
    patcher = Patcher(module_mapping={"model.norm": forward_of(FastNorm)})
    model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
    assert type(model.model.norm).forward is FastNorm.forward
    assert type(model.model.layers[0].input_layernorm) is LlamaRMSNorm


def test_a_checkpoint_is_loaded_and_saved_as_it_was(tmp_path: Any) -> None:
    stock().save_pretrained(tmp_path / "stock")
    patcher = Patcher({"LlamaRMSNorm": forward_of(FastNorm)})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", patcher=patcher)
    model.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()


def test_copies_and_pickles_keep_the_forward() -> None:
    model = built(FastNorm)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert type(other.model.norm).forward is FastNorm.forward
        with torch.no_grad():
            assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


def test_the_class_is_freed_with_what_it_was_made_of() -> None:
    class Original(nn.Module):
        def forward(self, hidden_states):
            return hidden_states

    made = weakref.ref(forward_of(FastNorm).on(Original))
    original = weakref.ref(Original)
    del Original
    gc.collect()
    gc.collect()  # once what was made of it is gone
    assert made() is None
    assert original() is None


def test_it_is_a_value() -> None:
    value = forward_of(FastNorm)
    assert value == forward_of(FastNorm) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value))
    assert value != forward_of(Asks)
    assert repr(value) == "forward_of(FastNorm)"
    patcher = Patcher({"LlamaRMSNorm": value})
    assert patcher == pickle.loads(pickle.dumps(patcher))
    assert hash(patcher) == hash(Patcher({"LlamaRMSNorm": forward_of(FastNorm)}))
    assert repr(patcher) == "Patcher(class_mapping={'LlamaRMSNorm': forward_of(FastNorm)})"
    assert Patcher.from_dict(patcher.to_dict(), allowed=[FastNorm]) == patcher
    with pytest.raises(InvalidPatcherError, match="is not on the list of what may be imported"):
        Patcher.from_dict(patcher.to_dict())


class WithInit(FastNorm):
    def __init__(self):
        super().__init__()


class WithMethod(FastNorm):
    def helper(self):
        return 1


class WithSuper(FastNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (WithInit, "WithInit has __init__ besides its forward, and the original gets nothing but that"),
        (WithMethod, "WithMethod has helper besides its forward"),
        (WithSuper, r"WithSuper has no forward that is a function without super\(\)"),
        (nn.Module, "Module has no forward"),
        (FastNorm(), r"takes a class of modules, found FastNorm\(\)"),
        (print, "takes a class of modules"),
    ],
)
def test_what_is_no_such_layer_is_refused_at_once(layer: Any, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        forward_of(layer)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (ReadsMore, r"ReadsMore\.forward reads self\.gain, self\.shift, and LlamaRMSNorm has no such attribute"),
        (
            OtherParameters,
            r"OtherParameters\.forward\(self, hidden_states, residual\) has other parameters than LlamaRMSNorm",
        ),
    ],
)
def test_what_does_not_fit_the_original_is_an_error_when_it_is_built(layer: Any, message: str) -> None:
    with pytest.raises(PatchConstructionError, match=message):
        built(layer)
    assert type(stock().model.norm) is LlamaRMSNorm


def test_a_class_with_a_metaclass_keeps_it() -> None:
    class Original(nn.Module, metaclass=ABCMeta):
        def forward(self, hidden_states):
            return hidden_states

    made = forward_of(Asks).on(Original)
    assert type(made) is ABCMeta
    assert torch.equal(made()(torch.ones(2)), torch.ones(2))


def test_what_a_forward_has_a_default_for_may_be_missing() -> None:
    built(Asks)(TOKENS)


def test_a_layer_without_a_backward_refuses_training() -> None:
    model = built(Inference)
    with torch.no_grad():
        expected = model(TOKENS).logits
    logits = model(TOKENS).logits  # gradients are on, as they are where nobody says otherwise
    assert torch.equal(logits, expected)
    with pytest.raises(RuntimeError, match=r"Inference, in place of LlamaRMSNorm\.forward, has no backward pass"):
        logits.sum().backward()
    with pytest.raises(RuntimeError, match="has no backward pass"):
        torch.compile(model.model.norm, backend="eager")(torch.randn(2, 64)).sum().backward()
    model.train()
    with pytest.raises(RuntimeError, match="has no backward pass"):
        model(TOKENS)


def test_a_layer_that_can_not_be_compiled_refuses_to_be() -> None:
    model = built(NotCompiled)
    model(TOKENS)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(Exception, match="can't be compiled"):
        compiled(TOKENS)


def test_a_layer_is_compiled_in_one_graph() -> None:
    norm, hidden = built(FastNorm).model.norm, torch.randn(2, 5, 64)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), norm(hidden))


def test_a_layer_is_trained() -> None:
    model, plain = built(FastNorm).train(), stock().train()
    for each in (model, plain):
        each(TOKENS, labels=TOKENS).loss.backward()
    torch.testing.assert_close(model.model.norm.weight.grad, plain.model.norm.weight.grad)
