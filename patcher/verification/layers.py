"""Which layers of two models are alike, so that a few of them represent all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from patcher.compat.models import GradientCheckpointingLayer
from patcher.construction.plain_tensors import TORCH_ATTRIBUTES
from patcher.layouts.carried import CARRIED


def stacks_of(stock: nn.Module, ours: nn.Module) -> Iterator[tuple[nn.Module, set[int]]]:
    """The stacks of layers of both models, each with the numbers of those that represent all.

    Of each kind the first two, the one in the middle and the last: what depends on the number of a layer is mostly
    a bound on it, or whether it is even.
    """
    theirs = dict(stock.named_modules())
    for path, stack in ours.named_modules():
        other = theirs.get(path)
        if not (isinstance(stack, nn.ModuleList) and isinstance(other, nn.ModuleList)) or len(stack) != len(other):
            continue
        around = [path[:place] for place, letter in enumerate(path) if letter == "."]
        if any(type(theirs.get(each)) is not type(ours.get_submodule(each)) for each in ["", *around]):
            continue  # a replacement may go through the layers in another way
        if not all(isinstance(layer, GradientCheckpointingLayer) for layer in other):
            continue  # not known to be run one after another
        pairs = zip(stack, other, strict=True)
        numbers = _representatives([[*_description(mine), *_description(layer)] for mine, layer in pairs])
        if len(numbers) < len(stack):
            yield from [(stack, numbers), (other, numbers)]


def _representatives(described: Sequence[list[Any]]) -> set[int]:
    """Of each kind of layers the numbers of a few."""
    kinds: list[list[int]] = []
    for number, description in enumerate(described):
        for kind in kinds:
            if _alike(description, described[kind[0]], (number, kind[0])):
                kind.append(number)
                break
        else:
            kinds.append([number])
    return {kind[place] for kind in kinds for place in (0, min(1, len(kind) - 1), len(kind) // 2, -1)}


def _description(layer: nn.Module) -> list[Any]:
    """All that a layer computes with, but for the values of its weights."""
    own = TORCH_ATTRIBUTES - {"training"}
    found: list[Any] = []
    for path, module in layer.named_modules():
        found += [path, type(module)]
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            found += [] if tensor is None else [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)]
        for name, value in sorted(vars(module).items()):
            if name == CARRIED or "state_dict" in name or name in ("_parameters", "_buffers", "_modules"):
                continue  # how weights are read, not what is computed
            if name in own:  # hooks
                value = list(value.values()) if isinstance(value, dict) else value
            found += [name, *([value.func, value.args, value.keywords] if type(value) is partial else [value])]
    return found


def _alike(one: list[Any], other: list[Any], numbers: tuple[int, int]) -> bool:
    """Whether two descriptions are equal but for the numbers of the layers. What can't be compared isn't equal."""
    try:
        return len(one) == len(other) and all(
            mine is theirs
            or (type(mine) is type(theirs) is int and (mine, theirs) == numbers)
            or (type(mine) is type(theirs) and bool(mine == theirs))
            for mine, theirs in zip(one, other, strict=True)
        )
    except Exception:  # tensors of several elements, for one
        return False
