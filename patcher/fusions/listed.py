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
    for number, matrix in enumerate(weight.detach().unbind()):
        linear = nn.Linear.__new__(nn.Linear)  # its `__init__` gives values: seconds in vain for 30,000 experts
        nn.Module.__init__(linear)
        linear.weight = _parameter(matrix.t() if transposed else matrix, weight)
        linear.out_features, linear.in_features = linear.weight.shape
        linear.register_parameter("bias", None if bias is None else _parameter(bias.detach()[number], bias))
        experts.append(linear)
    mark_initialized(experts)  # where the module around it initialises what has this name
    return experts


def _parameter(values: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    new = nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)
    if is_initialized(like):
        mark_initialized(new)
    return new
