"""How far tensors are from others, and which modules are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache


class Difference(NamedTuple):
    """How far tensors are from others: the one that is furthest, as the largest over its elements."""

    absolute: float
    relative: float
    scale: float  # the largest magnitude in the reference
    where: str = ""  # which tensor it is, or what is another thing altogether

    @property
    def share(self) -> float:
        """Of the reference's magnitude, or of 1 where that is smaller."""
        return self.absolute / max(1.0, self.scale)

    def within(self, tolerance: float) -> bool:
        """Whether it is no more than `tolerance` of the reference's magnitude, or of 1 where that is smaller."""
        return self.share <= tolerance  # false for nan


def difference(ours: Iterable[torch.Tensor], reference: Iterable[torch.Tensor]) -> Difference:
    """The difference of two lists of tensors; infinite where their number or a shape isn't the same.

    >>> difference([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 2.0])])
    Difference(absolute=0.5, relative=0.25, scale=2.0, where='')

    A value that isn't finite is equal to the same value at the same place only: it is what stock has there.
    """
    ours, reference = list(ours), list(reference)
    if [one.shape for one in ours] != [other.shape for other in reference]:
        return Difference(math.inf, math.inf, 0.0)
    pairs = (_difference(one, other) for one, other in zip(ours, reference, strict=True))
    return max(pairs, key=_severity, default=Difference(0.0, 0.0, 0.0))


def differences(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> Difference:
    """The same for tensors by name; infinite also where a type isn't the same.

    >>> differences({}, {"logits": torch.zeros(2)}).where
    'logits is missing'
    """
    worst = Difference(0.0, 0.0, 0.0)
    for name in {**reference, **ours}:  # in the order of stock
        mine, theirs = ours.get(name), reference.get(name)
        if mine is None or theirs is None:
            return Difference(math.inf, math.inf, 0.0, f"{name} is {'missing' if mine is None else 'not in stock'}")
        kinds = [f"{each.dtype} of the shape {tuple(each.shape)}" for each in (mine, theirs)]
        if kinds[0] != kinds[1]:
            return Difference(math.inf, math.inf, 0.0, f"{name} is {kinds[0]} where stock has {kinds[1]}")
        worst = max(worst, _difference(mine, theirs)._replace(where=name), key=_severity)
    return worst


def _severity(gap: Difference) -> float:
    return math.inf if math.isnan(gap.share) else gap.share


def _difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    if not one.numel():
        return Difference(0.0, 0.0, 0.0)
    one, other = (each.detach() if each.dtype is torch.float32 else each.detach().double() for each in (one, other))
    one = one.to(other.device, other.dtype)
    absolute, scale = (max(abs(float(bound)) for bound in torch.aminmax(each)) for each in (one - other, other))
    if not math.isfinite(absolute + scale):
        same = (one == other) | (one.isnan() & other.isnan())
        gap = torch.where(same, 0.0, (one - other).abs())
        finite = other[other.isfinite()]
        absolute = math.inf if gap.isnan().any() else float(gap.max())
        scale = float(finite.abs().max()) if finite.numel() else 0.0
    return Difference(absolute, absolute / scale if scale else math.inf if absolute else 0.0, scale)


@contextmanager
def noting_calls(model: nn.Module, reached: set[str] | None) -> Iterator[None]:
    """Add the paths of the modules that are called, and of those that they are in, under each of their names."""
    modules = () if reached is None else model.named_modules(remove_duplicate=False)

    def note(path: str, *_: object) -> None:
        if reached is not None and path not in reached:
            reached.update(accumulate(path.split("."), "{}.{}".format), [""])

    with hooked((module, partial(note, path)) for path, module in modules):
        yield


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False) -> Iterator[None]:
    """Within, each hook is called after its module, with the module, its arguments and its output, or before it."""
    if before:
        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    else:
        handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in nested dicts, lists and tuples, such as the output of a model."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The same by name, `hidden_states.0` for one; of a cache how many tokens it holds."""
    if is_floating(value):
        yield name or "the output", value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Cache):
        with suppress(Exception):  # not every cache counts tokens
            yield f"the tokens in {name}", torch.tensor(float(value.get_seq_length()))


def is_floating(value: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
