"""A replacement whose weights lie joined in the checkpoint, taken apart by an operation that runs another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, ConversionOps


class Parts(ConversionOps):
    """Rows, as many for each part as the parameter of the model has; what `Split` of newer releases does."""

    def convert(
        self,
        input_dict: Any,
        source_patterns: Any,
        target_patterns: Any,
        *,
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> Any:
        ((joined,),) = ([value] if isinstance(value, torch.Tensor) else value for value in input_dict.values())
        names = [full_layer_name.replace(target_patterns[0], target) for target in target_patterns]
        sizes = [model.get_parameter(name).shape[0] for name in names]
        return dict(zip(target_patterns, joined.split(sizes), strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(dim=0)


class Negated(ConversionOps):
    """What another operation gives, negated."""

    def __init__(self, inner: ConversionOps) -> None:
        self.inner = inner

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        found = self.inner.convert(input_dict, source_patterns, target_patterns, **kwargs)
        return {name: -value for name, value in found.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return Negated(self.inner.reverse_op)


class SplitMLP(nn.Module):
    """Gate and up apart, with the signs of both turned."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(-self.up_proj(hidden_states) * nn.functional.silu(-self.gate_proj(hidden_states)))
