"""Operations of conversions that compute, where those of transformers only move values."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps


class Twice(ConversionOps):
    """Computes: the model holds twice the values of the checkpoint."""

    factor = 2.0

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: self._of(value)}

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor

    @property
    def reverse_op(self) -> ConversionOps:
        other = type(self)()
        other.factor = 1 / self.factor
        return other


class TwiceInPlace(Twice):
    """The same, of what it is given."""

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        return value.mul_(self.factor)


class ThereOnly(Twice):
    """Doubles the values once more in place of the way back."""

    @property
    def reverse_op(self) -> ConversionOps:
        return ThereOnly()


class InDouble(Twice):
    """Leaves its results in double precision."""

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        return value.double() * self.factor
