"""Conversions with operations of a user: rows that take turns, and the same scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import ConversionOps
from transformers.core_model_loading import WeightConverter

from patcher import Patcher
from tests.support.replacements import JoinedMLP


class TakeTurns(ConversionOps):
    """Rows of gate and up that take turns."""

    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        gate, up = (input_dict[name] for name in source_patterns)
        gate, up = (value[0] if isinstance(value, list) else value for value in (gate, up))
        return {target_patterns[0]: torch.stack([gate, up], 1).flatten(0, 1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return GiveBack()


class GiveBack(ConversionOps):
    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        return dict(zip(target_patterns, (value[0::2].clone(), value[1::2].clone()), strict=True))


class Doubled(TakeTurns):
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        return {name: 2 * value for name, value in super().convert(*args, **kwargs).items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return Halved()


class Halved(GiveBack):
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value / 2 for name, value in super().convert(*args, **kwargs).items()}


class TurnsMLP(JoinedMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(nn.functional.silu(both[..., 0::2]) * both[..., 1::2])


class HalvingMLP(TurnsMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up_proj(x) / 2
        return self.down_proj(nn.functional.silu(both[..., 0::2]) * both[..., 1::2])


def converting(replacement: type[nn.Module], operation: ConversionOps) -> Patcher:
    sources = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    conversion = WeightConverter(sources, ["mlp.gate_up_proj.weight"], operations=[operation])
    return Patcher({"LlamaMLP": replacement}, extra_weight_conversions=conversion)


TURNS, SCALED = converting(TurnsMLP, TakeTurns()), converting(HalvingMLP, Doubled())
