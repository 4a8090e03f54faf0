"""Tiny models with experts, one for each way in which their weights are stacked."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import (
    GptOssConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from patcher import Patcher, report
from tests.support.tiny import DECODER_SIZES, build_tiny

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def tiny_gpt_oss_config(**changes: Any) -> GptOssConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": rope}
    return GptOssConfig(**DECODER_SIZES | settings | changes)


def tiny_qwen3_moe_config(**changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**DECODER_SIZES | EXPERTS | {"num_experts": 4} | changes)


def tiny_llama4_config() -> Llama4TextConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "head_dim": 16}
    return Llama4TextConfig(**DECODER_SIZES | experts | {"interleave_moe_layer_step": 1})


def tiny_nemotron_h_config() -> NemotronHConfig:
    """Experts without a gate."""
    experts = {"layers_block_type": ["moe", "attention"], "n_routed_experts": 4, "head_dim": 16}
    experts |= {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
    return NemotronHConfig(**DECODER_SIZES | experts)


def tiny_jetmoe_config() -> JetMoeConfig:
    """Stacks called `weight`, to which the caller hands each expert's rows."""
    return JetMoeConfig(**DECODER_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16})


def tiny_longcat_config() -> LongcatFlashConfig:
    """Four experts, and two that do nothing; those have a gate and an up projection all the same."""
    sizes = {"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "n_routed_experts": 4}
    sizes |= {"zero_expert_num": 2, "moe_topk": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
    sizes |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "num_hidden_layers": 2}
    return LongcatFlashConfig(**DECODER_SIZES | sizes)


def experts_of(model: nn.Module) -> list[Any]:
    """The experts of a patched model."""
    return [model.get_submodule(path) for path, _, _ in report(model).fused]  # type: ignore[arg-type]


def eager_and_listed(
    config: PretrainedConfig, patcher: Patcher, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A stock model that runs eager experts, and the one whose experts a patcher lists."""
    torch.manual_seed(0)
    stock = build_tiny(config).to(dtype)
    stock.config._experts_implementation = "eager"
    return stock, patcher.apply(copy.deepcopy(stock))  # not with shared weights
