"""Stacked weights of experts as lists of `nn.Linear`."""

from __future__ import annotations

import torch
from torch import nn

from patcher.compat.models import is_initialized, mark_initialized


def listed(weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool) -> nn.ModuleList:
    """One layer for each matrix of a stack.

    Args:
        weight: (experts, out, in), or (experts, in, out) where it is transposed.
        bias: (experts, out).
        transposed: whether the input stands on the left of the matrices.
    """
    experts = nn.ModuleList()
    size = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    for number in range(weight.shape[0]):
        linear: nn.Linear = _Unset(*size, bias=bias is not None, device="meta", dtype=weight.dtype)
        linear.__class__ = nn.Linear
        matrix = weight.detach()[number]
        linear.weight = _parameter(matrix.t() if transposed else matrix, weight)
        if bias is not None:
            linear.bias = _parameter(bias.detach()[number], bias)
        experts.append(linear)
    mark_initialized(experts)  # where the module around it initialises what has this name
    return experts


class _Unset(nn.Linear):
    """A linear layer that is about to be given its values: 30,000 experts take seconds to initialise in vain."""

    def reset_parameters(self) -> None:
        pass


def _parameter(values: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    new = nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)
    if is_initialized(like):
        mark_initialized(new)
    return new
