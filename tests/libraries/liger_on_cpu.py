"""The preset LIGER with Liger's kernels, which Triton's interpreter runs on a CPU; run by `test_liger.py`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import tests.libraries.triton_on_cpu  # noqa: F401  # first: kernels are made when Liger is imported
from patcher import forward_of, like, presets, report
from patcher.presets.kernels import rules
from tests.support.tiny import DECODER_SIZES

TOKENS = torch.arange(3, 15).view(2, 6)
WITH_SCALE = like("transformers.models.gemma3n.modeling_gemma3n:Gemma3nRMSNorm")
SIZES = {**DECODER_SIZES, "head_dim": 16}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


#: model -> its config's arguments, and which of its modules are replaced
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Llama": ({"mlp_bias": True}, {"LlamaRMSNorm", "LlamaMLP"}),
    "Mistral": ({}, {"MistralRMSNorm", "MistralMLP"}),
    "Qwen3": ({}, {"Qwen3RMSNorm", "Qwen3MLP"}),
    "Olmo2": ({}, {"Olmo2RMSNorm", "Olmo2MLP"}),
    "Gemma": ({}, {"GemmaRMSNorm", "GemmaMLP"}),
    "Gemma2": ({}, {"Gemma2RMSNorm", "Gemma2MLP"}),
    "Phi3": ({"pad_token_id": 0}, {"Phi3RMSNorm", "Phi3MLP"}),
}


def models(name: str, folder: Path, **changes: Any) -> tuple[Any, Any]:
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name][0] | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms, too
    model.save_pretrained(folder)
    load = AutoModelForCausalLM.from_pretrained
    return load(folder, attn_implementation="eager"), load(folder, attn_implementation="eager", patcher=presets.LIGER)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_stock(name: str, tmp_path: Path) -> None:
    stock, patched = models(name, tmp_path / "checkpoint")
    assert {original for _, original, *_ in report(patched).replaced} == MODELS[name][1]
    for model in (stock, patched):
        model(TOKENS, labels=TOKENS).loss.backward()
    torch.testing.assert_close(patched(TOKENS).logits, stock(TOKENS).logits, atol=1e-4, rtol=1e-4)
    for (where, one), other in zip(patched.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-3, msg=where)
    for kind, model in (("stock", stock), ("patched", patched)):
        model.save_pretrained(tmp_path / kind)
    for path in (tmp_path / "stock").iterdir():
        assert (tmp_path / "patched" / path.name).read_bytes() == path.read_bytes()


#: Of weights and values. No values in bfloat16: the interpreter of triton 3.7 multiplies two of these by their bits.
DTYPES = [(torch.float32, torch.float16), (torch.bfloat16, torch.float32), (torch.float16,) * 2, (torch.float32,) * 2]
NORMS = {key: layer for key, layer in rules().items() if layer.__name__.startswith("LigerRMSNorm")}


@pytest.mark.parametrize(("key", "options"), [*((key, {}) for key in NORMS), (WITH_SCALE, {"with_scale": False})])
def test_each_norm_computes_in_the_dtypes_of_stock(key: Any, options: dict[str, Any]) -> None:
    original = key.resolve()
    for weights, values in DTYPES:
        norms = [cls(64, **options) for cls in (original, forward_of(NORMS[key]).on(original))]
        scale, states = torch.randn(64), torch.randn(2, 3, 64).to(values)
        found = []
        for norm in norms:
            for weight in norm.parameters():
                weight.data = scale.to(weights)
            own = states.clone().requires_grad_()
            output = norm(own)
            (output * torch.linspace(-1, 1, 64)).sum().backward()
            found.append([output, own.grad, *(weight.grad for weight in norm.parameters())])
        if values == weights == torch.float16:  # rounded elsewhere, a quarter would be others
            assert (found[0][0] == found[1][0]).float().mean() > 0.95
        exact = values == weights == torch.float32
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype
            size = other.abs().max().item()
            torch.testing.assert_close(one, other, atol=size * (1e-5 if exact else 2e-2), rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh", "swish"])
def test_any_activation_is_the_models_own(activation: str, tmp_path: Path) -> None:
    stock, patched = models("Llama", tmp_path / "checkpoint", hidden_act=activation)
    torch.testing.assert_close(patched(TOKENS).logits, stock(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_a_second_backward_pass_is_refused(tmp_path: Path) -> None:
    _, patched = models("Llama", tmp_path / "checkpoint")
    loss = patched(TOKENS, labels=TOKENS).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Liger's gated activations support one backward pass"):
        loss.backward()
    for _ in range(2):
        patched(TOKENS, labels=TOKENS).loss.backward()


def test_a_norm_can_be_gone_back_through_twice(tmp_path: Path) -> None:
    _, patched = models("Llama", tmp_path / "checkpoint")
    norm, states = patched.model.norm, torch.randn(2, 3, 64, requires_grad=True)
    output = norm(states).sin().sum()
    one, two = (torch.autograd.grad(output, (states, norm.weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, one, two))


def test_it_survives_copies_and_pickles(tmp_path: Path) -> None:
    _, patched = models("Llama", tmp_path / "checkpoint")
    for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert torch.equal(other(TOKENS).logits, patched(TOKENS).logits)
    assert isinstance(patched.model.layers[0].mlp.act_fn, nn.Module)
