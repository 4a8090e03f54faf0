"""The same seed gives the weights of stock, bit for bit: by fusions always, by a class if it draws as stock does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, CLIPVisionConfig
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter, WeightRenaming
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Block
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from patcher import Patcher, original_state_dict
from tests.support.beside import FUSED_QKV, LINEAR_EXPERTS
from tests.support.offloaded import places
from tests.support.replacements import OWN
from tests.support.tiny import (
    build_tiny,
    save_tiny,
    tiny_bert_config,
    tiny_gpt2_config,
    tiny_jamba_config,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen2_vl_config,
)

CLIP = CLIPVisionConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
)
CASES = [
    pytest.param(tiny_llama_config(), Patcher(fusions=["qkv", "gate_up"]), id="Llama"),
    pytest.param(
        # sizes that aren't multiples of 16, up to which torch draws otherwise
        tiny_llama_config(
            hidden_size=36,
            intermediate_size=50,
            num_attention_heads=6,
            num_key_value_heads=3,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        Patcher(fusions=["qkv", "gate_up"]),
        id="Llama, tied, odd sizes",
    ),
    pytest.param(tiny_mixtral_config(), Patcher(fusions=["qkv", "sequential_experts"]), id="Mixtral"),
    pytest.param(tiny_qwen2_moe_config(), Patcher(fusions=["gate_up", "sequential_experts"]), id="Qwen2-MoE"),
    pytest.param(tiny_jamba_config(), Patcher(fusions=["qkv", "gate_up"]), id="Jamba"),
    pytest.param(tiny_qwen2_vl_config(), Patcher(fusions=["qkv", "gate_up", "patch_embeddings"]), id="Qwen2-VL"),
    pytest.param(tiny_bert_config(), Patcher(fusions="qkv"), id="BERT"),
    pytest.param(CLIP, Patcher(fusions=["qkv", "patch_embeddings"]), id="CLIP"),
    pytest.param(tiny_llama_config(), OWN, id="a class of the same layers"),
]


def same_bits(model: nn.Module, stock: nn.Module) -> bool:
    found, expected = original_state_dict(model), stock.state_dict()
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def drawn(make: Any) -> tuple[Any, torch.Tensor]:
    """What is made of one seed, and what is drawn after it."""
    torch.manual_seed(3)
    return make(), torch.rand(4)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "patcher"), CASES)
def test_from_config(config: Any, patcher: Patcher, dtype: torch.dtype) -> None:
    model_class: Any = AutoModel if config is CLIP else type(build_tiny(config))
    make = getattr(model_class, "from_config", None) or model_class._from_config
    stock, after = drawn(lambda: make(config, dtype=dtype))
    model, later = drawn(lambda: make(config, dtype=dtype, patcher=patcher))
    assert same_bits(model, stock)
    assert torch.equal(later, after)


@pytest.mark.parametrize(("config", "patcher"), CASES)
def test_by_hand(config: Any, patcher: Patcher) -> None:
    model_class: Any = type(AutoModel.from_config(config) if config is CLIP else build_tiny(config))
    stock, after = drawn(lambda: model_class(config))
    with patcher.applied():
        model, later = drawn(lambda: model_class(config))
    assert same_bits(model, stock)
    assert torch.equal(later, after)


@pytest.mark.parametrize(
    ("config", "patcher"), [(tiny_llama_config(), FUSED_QKV), (tiny_qwen2_moe_config(), LINEAR_EXPERTS)]
)
def test_a_class_that_draws_otherwise_is_given_them_by_apply(config: Any, patcher: Patcher) -> None:
    """What a replacement draws is its own; the weights of stock are those of a stock model, patched in memory."""
    stock, _ = drawn(lambda: AutoModelForCausalLM.from_config(config))
    model, _ = drawn(lambda: AutoModelForCausalLM.from_config(config, patcher=patcher))
    found = original_state_dict(model)
    assert not all(torch.equal(found[name], value) for name, value in stock.state_dict().items())

    applied, _ = drawn(lambda: patcher.apply(AutoModelForCausalLM.from_config(config)))
    found = original_state_dict(applied)
    assert all(torch.equal(found[name], value) for name, value in stock.state_dict().items())


class Inner(nn.Module):
    """What GPT-2 has as a `Conv1D`, around a linear layer."""

    conversion_mapping = (
        WeightConverter("weight", "linear.weight", [Transpose(0, 1)]),
        WeightRenaming("bias", "linear.bias"),
    )

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.linear = nn.Linear(nx, nf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Renamed(MixtralExperts):
    conversion_mapping = (
        WeightConverter(["*.w1.weight", "*.w3.weight"], "first", [MergeModulelist(0), Concatenate(1)]),
        WeightConverter("*.w2.weight", "second", [MergeModulelist(0)]),
    )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first, self.second = self.gate_up_proj, self.down_proj
        del self.gate_up_proj, self.down_proj


class Outer(GPT2Block):
    """A layer in which other classes are replaced, too."""


class Unbiased(GPT2MLP):
    """It has the bias of its second layer, which is stock's."""

    conversion_mapping = WeightRenaming(r"c_proj\.bias", "bias")

    def __init__(self, intermediate_size: int, config: Any) -> None:
        super().__init__(intermediate_size, config)
        self.bias = self.c_proj.bias
        del self.c_proj.bias


@pytest.mark.parametrize(
    ("config", "mapping"),
    [
        (tiny_gpt2_config(), {"Conv1D": Inner}),
        (tiny_gpt2_config(), {"Conv1D": Inner, "GPT2Block": Outer}),
        (tiny_gpt2_config(), {"GPT2MLP": Unbiased}),
        (tiny_mixtral_config(), {"MixtralExperts": Renamed}),
    ],
    ids=["around the replacement", "in another", "of a part of the replacement", "of the replacement's base class"],
)
def test_nothing_is_initialised_by_names_of_the_original(config: Any, mapping: Any, tmp_path: Path) -> None:
    """`_init_weights` of stock initialises `c_proj.weight`, and `gate_up_proj`, which these don't have."""
    folder, patcher = save_tiny(config, tmp_path / "checkpoint"), Patcher(mapping)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert same_bits(AutoModelForCausalLM.from_pretrained(folder, patcher=patcher), stock)
    assert same_bits(patcher.apply(stock), stock)
    disk = {"device_map": places(stock, lambda name: ".1" in name, whole=True), "offload_folder": tmp_path / "disk"}
    assert same_bits(AutoModelForCausalLM.from_pretrained(folder, patcher=patcher, **disk), stock)
