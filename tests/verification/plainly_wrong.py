"""Replacements of real classes that are wrong wherever they are run, or nearly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Concatenate, WeightConverter
from transformers.core_model_loading import ConversionOps
from transformers.models.bert.modeling_bert import BertSelfOutput
from transformers.models.esm.modeling_esm import EsmContactPredictionHead
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRotaryEmbedding,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from patcher import Patcher
from tests.support.replacements import JoinedMLP


class KeysForQueries(LlamaAttention):
    """q and k swapped."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries, self.q_proj = self.q_proj, _Repeated(self.k_proj, self.num_key_value_groups)
        keys, self.k_proj = self.k_proj, _First(queries, self.num_key_value_groups)
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self.q_proj, self.k_proj = queries, keys


class _Repeated(nn.Module):
    def __init__(self, linear: nn.Module, times: int) -> None:
        super().__init__()
        self.linear, self.times = linear, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).repeat_interleave(self.times, -1)


class _First(_Repeated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[..., :: self.times]


class Scaled(LlamaAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scaling *= 1.01


class OneHeadMoved(LlamaAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.q_proj.register_forward_hook(self._move)

    def _move(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        heads = output.unflatten(-1, (-1, self.head_dim))
        return heads[..., [1, 0, *range(2, heads.shape[-2])], :].flatten(-2)


class NoBias(BertSelfOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(nn.functional.linear(hidden_states, self.dense.weight) + input_tensor)


class OneLayerOff(LlamaDecoderLayer):
    """The last layer isn't what the others are."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.off = layer_idx == 1

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(hidden_states, *args, **kwargs)
        return hidden_states if self.off else found


class ExpertsMoved(MixtralExperts):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        return super().forward(hidden_states, (top_k_index + 1) % self.num_experts, top_k_weights)


class StaleBuffer(LlamaRotaryEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.angles = nn.Buffer(self.inv_freq * 0.9, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = (position_ids[..., None].float() * self.angles).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class NoGradient(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach() + x * 0


class NeverCalled(EsmContactPredictionHead):
    """Wrong, where no output tells: ESM has a method of its own that calls it, which isn't `forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * 2


class RaisesOnSteps(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 1:
            raise ValueError("made for prompts only")
        return super().forward(x)


class ForgetsOnSteps(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (0.5 if x.shape[1] == 1 else 1)


class LooksAtPadding(LlamaAttention):
    """Without a mask sdpa is causal, and padding is a token as any other."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **{**kwargs, "attention_mask": None})


class WrongReverse(Concatenate):
    """Joins as it should, and takes apart in the other order."""

    @property
    def reverse_op(self) -> ConversionOps:
        return SwappedHalves()


class SwappedHalves(ConversionOps):
    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        first, second = tensor.chunk(2)
        return {target_patterns[0]: [second.contiguous()], target_patterns[1]: [first.contiguous()]}

    @property
    def reverse_op(self) -> ConversionOps:
        return WrongReverse(0)


WRONG_ORDER = Patcher(
    {"LlamaMLP": JoinedMLP},
    extra_weight_conversions=WeightConverter(
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], operations=[WrongReverse(dim=0)]
    ),
)
