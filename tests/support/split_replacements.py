"""Replacements that convert, compute and bring weights in other ways, for models that are split over processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Chunk, ConversionOps, MergeModulelist, Transpose, WeightConverter

from patcher import Patcher
from tests.support.beside import FUSED_QKV
from tests.support.replacements import JOINED, OwnMLP

silu = nn.functional.silu


class TransposedMLP(nn.Module):
    """Gate and up projection from the left."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        shape = config.hidden_size, config.intermediate_size
        self.gate, self.up = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(x @ self.gate) * (x @ self.up))


class HalvedMLP(nn.Module):
    """The gate in two halves."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        half = config.intermediate_size // 2
        self.first = nn.Linear(config.hidden_size, half, bias=False)
        self.second = nn.Linear(config.hidden_size, half, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, 2 * half, bias=False)
        self.down_proj = nn.Linear(2 * half, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.cat([self.first(x), self.second(x)], -1)
        return self.down_proj(silu(gate) * self.up_proj(x))


class ScaledMLP(OwnMLP):
    """A gate that is stored in units of its largest value."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scaled = self.gate_proj
        del self.gate_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.scaled(x)) * self.up_proj(x))


class ByPowersOfTwo(ConversionOps):
    """Divides by the power of two above the largest value, which it remembers."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        self.scale = 2.0 ** value.abs().amax().log2().ceil()
        return {target_patterns[0]: value / self.scale}

    @property
    def reverse_op(self) -> ConversionOps:
        return _Multiply(self.scale)


class InThirds(ConversionOps):
    """Computes something that each type rounds otherwise."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: value / 3 + value}

    @property
    def reverse_op(self) -> ConversionOps:
        return _Multiply(0.75)


class _Multiply(ConversionOps):
    def __init__(self, scale: torch.Tensor | float) -> None:
        self.scale = scale

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: value * self.scale}


class NewWeights(OwnMLP):
    """Weights and buffers that no checkpoint has."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((config.hidden_size,), 3.0))
        self.drawn = nn.Parameter(torch.rand(7, 3))
        self.register_buffer("thirds", torch.arange(5.0) / 3, persistent=False)
        self.register_buffer("saved", torch.arange(5.0) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale * self.drawn.sum() + self.thirds.sum() * self.saved.sum()


class NotSaved(NewWeights):
    """The same without a buffer that is saved: accelerate takes all of a state dict for parameters."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.saved
        self.register_buffer("saved", torch.arange(5.0) / 3, persistent=False)


class TurnedExperts(nn.Module):
    """Experts in stacks whose second dimension counts them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        number, outside, inside = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate = nn.Parameter(torch.empty(inside, number, outside))
        self.up = nn.Parameter(torch.empty(inside, number, outside))
        self.down = nn.Parameter(torch.empty(outside, number, inside))

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.gate.shape[1]):
            token, position = torch.where(top_k_index == expert)
            gate, up, down = (stack[:, expert].T for stack in (self.gate, self.up, self.down))
            made = (silu(x[token] @ gate) * (x[token] @ up)) @ down
            result.index_add_(0, token, (made * top_k_weights[token, position, None]).to(x.dtype))
        return result


#: For Qwen2-MoE.
TURNED_EXPERTS = Patcher(
    {"Qwen2MoeExperts": TurnedExperts},
    [r"mlp\.experts"],
    [
        WeightConverter(
            f"mlp.experts.*.{name}_proj.weight",
            f"mlp.experts.{name}",
            [MergeModulelist(dim=0), Transpose(0, 1)],
        )
        for name in ("gate", "up", "down")
    ],
)


def _mapped(cls: type[nn.Module], *conversions: WeightConverter) -> Patcher:
    return Patcher({"LlamaMLP": cls}, extra_weight_conversions=conversions)


#: Conversions that come to something else if each process converts what it has of each tensor.
CONVERTING: dict[str, Patcher] = {
    "joined": JOINED,
    "joined in unequal parts": FUSED_QKV,
    "transposed": _mapped(
        TransposedMLP,
        WeightConverter("mlp.gate_proj.weight", "mlp.gate", [Transpose(0, 1)]),
        WeightConverter("mlp.up_proj.weight", "mlp.up", [Transpose(0, 1)]),
    ),
    "halved": _mapped(
        HalvedMLP, WeightConverter("mlp.gate_proj.weight", ["mlp.first.weight", "mlp.second.weight"], [Chunk(dim=0)])
    ),
    "scaled": _mapped(ScaledMLP, WeightConverter("mlp.gate_proj.weight", "mlp.scaled.weight", [ByPowersOfTwo()])),
}

#: Conversions that a load in another type than that of the file rounds.
IN_BFLOAT16: dict[str, Patcher] = {
    "in thirds": _mapped(ScaledMLP, WeightConverter("mlp.gate_proj.weight", "mlp.scaled.weight", [InThirds()])),
    "joined, in half": JOINED,
}

#: What isn't in the checkpoint.
WITH_VALUES: dict[str, Patcher] = {
    "new": Patcher({"LlamaMLP": NewWeights}, new_weights=["scale", "drawn"], fusions="qkv"),
}
