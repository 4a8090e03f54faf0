"""Experts that have been dealt to processes, each of which has some: all of them together, as they are saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patcher.conversions.fused_weights import fused_modules
from patcher.conversions.layouts import named_parameter
from patcher.fusions.experts.listed import ListedExperts
from patcher.patterns import inside


def with_all_experts(
    model: nn.Module, state_dict: Mapping[str, torch.Tensor], *, on_meta: bool = False
) -> dict[str, torch.Tensor]:
    """A state dict with the experts that other processes have. Each of these has to call this, with its own.

    Args:
        on_meta: give those of others on the meta device, and ask nobody.
    """
    result = dict(state_dict)
    for name, process, like in list(_dealt(model)):
        if on_meta:
            result.setdefault(name, torch.empty_like(like, device="meta"))
        else:
            own = process == dist.get_rank()
            value = result[name].detach() if own else torch.empty_like(like)
            result[name] = value.contiguous()
            dist.broadcast(result[name], process)
    return result


@contextmanager
def counting_all_experts(model: Any) -> Iterator[None]:
    """Have a model count the parameters of experts that other processes have, as it does those of other tensors."""
    others = sum(like.numel() for _, process, like in _dealt(model) if process != dist.get_rank())

    def num_parameters(*args: Any, **kwargs: Any) -> int:
        return int(type(model).num_parameters(model, *args, **kwargs)) + others

    if others:
        model.num_parameters = num_parameters
    try:
        yield
    finally:
        if others:
            del model.num_parameters


def _dealt(model: nn.Module) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The parameters of the experts that are dealt: name, the process that has it, and one of this process like it."""
    for path, module, carried in fused_modules(model):
        if not isinstance(module, ListedExperts) or not module.are_dealt:
            continue
        own = len(module)
        for name in (name for layout in carried.layouts for name in layout.fused):
            number, _, rest = name.partition(".")
            process, place = divmod(int(number), own)
            like = named_parameter(module, f"{module.first_expert + place}.{rest}")
            assert like is not None
            yield f"{inside(path)}{name}", process, like
