"""Projections that are rows of one layer, asked at run time whether they are given one tensor.

The layer is called for the first input. A projection that is given that very tensor gets its rows of the product, and
one that is given another is computed by itself: so neither branches nor cross attention change what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache

if TYPE_CHECKING:
    from patcher.fusions.joined import Joined


class SharedInput:
    """One call of a forward: it lives as long as the frame, so nothing of it stays on the module."""

    def __init__(self, module: nn.Module, joined: Joined) -> None:
        self._module, self._joined = module, joined
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._given: list[str] = []  # those of them that have been taken

    def __call__(self, name: str, features: torch.Tensor) -> torch.Tensor:
        """What the projection `name` computes of features (..., in): (..., out)."""
        module, joined = self._module, self._joined
        if features is not self._input:
            if self._input is not None and name not in self._given:
                alone: torch.Tensor = getattr(module, name)(features)
                return alone
            # The first input, or the next one after all that: each projection is given one after the other.
            self._input, self._given = features, []
            self._parts = getattr(module, joined.name)(features).split(getattr(module, joined.sizes), dim=-1)
        self._given.append(name)
        part = self._parts[joined.projections.index(name)]
        bias: torch.Tensor | None = getattr(module, f"{name}_bias", None)
        # The type is that of the product: under autocast it isn't that of the bias.
        return part if bias is None else part + bias.to(part.dtype)


def are_values(given: Iterable[Any]) -> bool:
    """Whether all are tensors, numbers, caches or containers of these: see `patcher.fusions.purity`."""
    for each in given:
        if isinstance(each, dict):
            if not are_values(each.values()):
                return False
        elif isinstance(each, list | tuple):
            if not are_values(each):
                return False
        elif each is not None and not isinstance(each, torch.Tensor | int | float | str | Cache):
            return False
    return True
