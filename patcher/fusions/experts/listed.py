"""Experts as a list: each one a module of `nn.Linear`s, in a module that is indexed like an `nn.ModuleList`."""

from __future__ import annotations

from collections.abc import Iterator
from operator import index
from typing import Any

import torch
from torch import nn

from patcher.compat.models import is_exporting


class ListedExperts(nn.Module):
    """Experts that are linear layers: the experts are the children that have numbers as names.

    `experts[3].down_proj` is a linear layer of the fourth; `len(experts)`, and iteration, go by the experts.
    """

    def __len__(self) -> int:
        return sum(name.isdigit() for name in self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self[number] for number in range(len(self))])

    def __getitem__(self, number: Any) -> Any:
        """The expert of a number: an int, or a tensor of one, as loops over the experts that are hit have it."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        position = index(number)
        number = position + len(self) if position < 0 else position
        name = str(number)
        if number < 0 or name not in self._modules:
            raise IndexError(f"expert {position} of {len(self)}")
        return self._modules[name]

    def every_expert_runs(self) -> bool:
        """Whether experts without tokens run too, on no rows.

        In training they do, so that their gradients are zero and not None: optimizers then treat them like the part of
        a stack that got no token, and processes that train together use the same parameters in the same order. Layers
        that are sharded one by one are gathered by all processes or by none, whatever the tokens of each.

        In an exported program they do, since it has no loop that depends on the data.
        """
        if is_exporting():
            return True
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            return True
        return any(hasattr(parameter, "placements") for parameter in self.parameters())
