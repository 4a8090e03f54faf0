"""A patcher together with a quantizer: what the patcher makes linear is quantized, and computes what stock would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM, TorchAoConfig

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher
from tests.support.beside import FUSED_QKV, LINEAR_EXPERTS, LinearExperts
from tests.support.comparing import logits
from tests.support.replacements import OWN
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_qwen2_moe_config


def bitsandbytes() -> Any:
    return BitsAndBytesConfig(load_in_8bit=True)


def torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


both = pytest.mark.parametrize("quantizer", [bitsandbytes, torchao])
Quantizer = Callable[[], Any]


def is_quantized(module: nn.Module) -> bool:
    weight: Any = module.weight
    return weight.dtype == torch.int8 if type(module).__name__ == "Linear8bitLt" else hasattr(weight, "qdata")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Every expert is asked: a router that decides between nearly equal experts would hide how near the outputs are.
    return save_tiny(tiny_qwen2_moe_config(num_experts_per_tok=4), tmp_path_factory.mktemp("moe"))


@both
def test_experts_as_linear_layers_are_all_quantized(quantizer: Quantizer, moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, quantization_config=quantizer())
    experts = [module for module in model.modules() if isinstance(module, LinearExperts)]
    linear = [module for part in experts for module in part.modules() if isinstance(module, nn.Linear)]
    assert (len(experts), len(linear)) == (2, 2 * 4 * 3)
    assert all(is_quantized(module) for module in linear)
    # Stock quantizes the other linear layers and no expert, which is why one replaces them.
    stock = AutoModelForCausalLM.from_pretrained(moe, quantization_config=quantizer())
    assert stock.model.layers[0].mlp.experts.down_proj.dtype != torch.int8
    expected = {name: is_quantized(module) for name, module in stock.named_modules() if isinstance(module, nn.Linear)}
    assert len(expected) == 2 * 8 + 1
    assert expected == {
        name: is_quantized(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".experts." not in name
    }


@both
def test_quantized_experts_compute_nearly_what_the_stock_quantized_model_does(quantizer: Quantizer, moe: Path) -> None:
    stock = logits(AutoModelForCausalLM.from_pretrained(moe, quantization_config=quantizer()))
    ours = logits(AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, quantization_config=quantizer()))
    plain = logits(AutoModelForCausalLM.from_pretrained(moe))
    assert not torch.equal(ours, stock)  # the experts are quantized as well
    error = (stock - plain).norm() / plain.norm()
    assert (ours - plain).norm() / plain.norm() < max(3 * error, 0.02)
    assert torch.nn.functional.cosine_similarity(ours, stock, dim=-1).min() > 0.99


@both
def test_computed_buffers_survive_quantization(quantizer: Quantizer, moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, quantization_config=quantizer())
    for layer in model.model.layers:
        torch.testing.assert_close(layer.mlp.experts.thirds.float(), torch.full((3,), 1 / 3), atol=1e-3, rtol=0)
        assert torch.equal(layer.mlp.experts.offset, torch.arange(5))


@both
@pytest.mark.parametrize("patched", [OWN, FUSED_QKV], ids=["MLP", "fused qkv"])
def test_replaced_linear_layers_quantize_as_the_stock_ones_do(
    quantizer: Quantizer, patched: Patcher, llama: Path
) -> None:
    # Rows are quantized one by one, so joining them changes nothing.
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patched, quantization_config=quantizer())
    stock = LlamaForCausalLM.from_pretrained(llama, quantization_config=quantizer())
    linear = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == (14 if patched is OWN else 10)
    assert all(is_quantized(module) for module in linear)
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(model), logits(LlamaForCausalLM.from_pretrained(llama)), atol=1e-5)


def test_a_name_that_a_quantizer_shall_skip_is_skipped_in_a_replacement(llama: Path) -> None:
    skip = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["down_proj"])
    model = LlamaForCausalLM.from_pretrained(llama, patcher=OWN, quantization_config=skip)
    kinds = {name: type(getattr(model.model.layers[0].mlp, name)).__name__ for name in ("up_proj", "down_proj")}
    assert kinds == {"up_proj": "Linear8bitLt", "down_proj": "Linear"}


@both
def test_what_was_joined_and_then_quantized_is_not_saved_wrong(
    quantizer: Quantizer, llama: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=FUSED_QKV, quantization_config=quantizer())
    with pytest.raises(PatchedWeightsError, match=r"layers\.0\.self_attn\.qkv_proj\.weight.*is quantized"):
        model.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.rglob("*.safetensors"))


@both
def test_a_quantized_model_without_conversions_is_saved_and_loaded_again(
    quantizer: Quantizer, llama: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=OWN, quantization_config=quantizer())
    model.save_pretrained(tmp_path)
    for options in ({"patcher": OWN}, {}):
        again = LlamaForCausalLM.from_pretrained(tmp_path, **options)
        assert is_quantized(again.model.layers[0].mlp.up_proj)
        torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=1e-5)


def test_apply_refuses_a_quantized_model_before_it_reads_anything(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, quantization_config=bitsandbytes())
    with pytest.raises(InvalidPatcherError, match=r"quantized model.*Load it again with patcher="):
        OWN.apply(model)
