"""A replacement whose weights lie joined in the checkpoint, taken apart by an operation that runs another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, ConversionOps, Split


class Negated(ConversionOps):
    """What another operation gives, negated: that one reads the sizes of its parts from the model."""

    def __init__(self, inner: ConversionOps) -> None:
        self.inner = inner

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        found = self.inner.convert(input_dict, source_patterns, target_patterns, **kwargs)
        return {name: -value for name, value in found.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        inner = Concatenate(dim=0) if isinstance(self.inner, Split) else Split(dim=0)
        return Negated(inner)


class SplitMLP(nn.Module):
    """Gate and up apart, with the signs of both turned."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(-self.up_proj(hidden_states) * nn.functional.silu(-self.gate_proj(hidden_states)))
