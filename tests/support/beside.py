"""Replacements in other layouts than the stock classes, for tests of what is used beside a patcher in a load.

Experts as plain `nn.Linear`s, and joined projections of queries, keys and values: Llama's of unequal sizes, BERT's and
ALBERT's with biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import WeightConverter
from transformers.core_model_loading import Concatenate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.albert.modeling_albert import AlbertAttention
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from patcher import Patcher
from tests.support.caches import CACHE


class Expert(nn.Module):
    """One expert: three linear layers, under the names that checkpoints use."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LinearExperts(nn.ModuleList):
    """`Qwen2MoeExperts` with a module for each expert, so that whoever looks for `nn.Linear` finds them.

    Its two buffers are computed in `__init__` and in no checkpoint: one is saved with the model, one isn't.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(Expert(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts))
        self.register_buffer("thirds", torch.full((3,), 1 / 3), persistent=False)
        self.register_buffer("offset", torch.arange(5))

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for index, expert in enumerate(self):
            token, position = torch.where(top_k_index == index)
            weight = top_k_weights[token, position, None] * self.thirds.sum()  # 1, if the buffer is what it was
            result.index_add_(0, token, (expert(x[token]) * weight).to(result.dtype))
        return result


class FusedAttention(LlamaAttention):
    """`LlamaAttention` with one projection for queries, keys and values."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj, self.v_proj
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.sizes = [queries, keys, keys]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.attention_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        joined = self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in joined)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if (cache := kwargs.pop(CACHE, None)) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class _JoinedProjections:
    """BERT's `query`, `key` and `value`, each a slice of one projection: the stock forward goes on calling them."""

    def _join(self) -> None:
        del self.query, self.key, self.value
        self.query_key_value = nn.Linear(self.config.hidden_size, 3 * self.all_head_size)

    def _part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        rows = slice(index * self.all_head_size, (index + 1) * self.all_head_size)
        return nn.functional.linear(x, self.query_key_value.weight[rows], self.query_key_value.bias[rows])

    def query(self, x: torch.Tensor) -> torch.Tensor:
        return self._part(0, x)

    def key(self, x: torch.Tensor) -> torch.Tensor:
        return self._part(1, x)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self._part(2, x)


class JoinedBertAttention(_JoinedProjections, BertSelfAttention):
    def __init__(self, config: Any, is_causal: bool = False, layer_idx: int | None = None) -> None:
        super().__init__(config, is_causal, layer_idx)
        self._join()


class JoinedAlbertAttention(_JoinedProjections, AlbertAttention):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._join()


LINEAR_EXPERTS = Patcher({"Qwen2MoeExperts": LinearExperts}, filtered_weight_conversion_patterns=r"mlp\.experts")
JOIN_QKV = WeightConverter(
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.qkv_proj", operations=[Concatenate(0)]
)
FUSED_QKV = Patcher({"LlamaAttention": FusedAttention}, extra_weight_conversions=JOIN_QKV)


def joined(class_name: str, replacement: type[nn.Module]) -> Patcher:
    """A patcher that joins BERT's or ALBERT's projections, weights and biases."""
    return Patcher(
        {class_name: replacement},
        extra_weight_conversions=[
            WeightConverter(
                [rf"\.{name}\.{kind}$" for name in ("query", "key", "value")],
                f".query_key_value.{kind}",
                operations=[Concatenate(0)],
            )
            for kind in ("weight", "bias")
        ],
    )


def count(model: nn.Module, *names: str) -> int:
    """How many modules have a class of one of these names."""
    return sum(type(module).__name__ in names for module in model.modules())
