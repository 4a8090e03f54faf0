"""Running both models on a few of their layers, where many are alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import nn

from patcher.compat.models import GradientCheckpointingLayer
from patcher.construction.plain_tensors import TORCH_ATTRIBUTES
from patcher.layouts.carried import CARRIED
from patcher.verification.comparing import Comparison, Pair, Stage
from patcher.verification.passes import OnStock, Pass, Reference, tried

Found = TypeVar("Found", Comparison, Stage)


def on_few_layers(pair: Pair, probes: Sequence[Pass], check: Callable[[OnStock], Found]) -> Found:
    """What a check finds on a few layers. What is wrong there is looked at on all of them, which decides.

    Args:
        probes: what stock has to run on a few as it does on all.
        check: is given what runs stock, and leaves out what stock refuses. It is made on all layers if stock runs
            any of that there.
    """
    refused: list[Pass] = []

    def on_stock(runs: Iterable[Pass]) -> Iterator[Reference]:
        for run in runs:
            found = list(tried([run], pair.stock))
            refused.extend([] if found else [run])
            yield from found

    found: Found | None = None
    with few_layers(pair, probes) as fewer:
        try:
            found = check(on_stock)
        except Exception:  # it may be that some are missing
            if not fewer:
                raise
    if found is not None and (not fewer or not (found.message or any(tried(refused, pair.stock)))):
        return found
    return check(partial(tried, stock=pair.stock))


@contextmanager
def few_layers(pair: Pair, probes: Sequence[Pass]) -> Iterator[bool]:
    """Within, both models have only some of the layers that are alike; whether that is so.

    Of each kind the first two, the one in the middle and the last: what depends on the number of a layer is mostly
    a bound on it, or whether it is even. All layers stay where stock can't run these passes with fewer.
    """
    stacks = dict(_stacks(pair))
    before = [(stack, list(stack._modules.items())) for stack in stacks]
    try:
        for stack, modules in before:
            # Under their own names: code that finds modules by paths works, and code that needs all numbers raises.
            stack._modules = OrderedDict(modules[number] for number in sorted(stacks[stack]))
        fewer = bool(stacks) and len(list(tried(probes, pair.stock))) == len(probes)
        if not fewer:
            _restore(before)
        yield fewer
    finally:
        _restore(before)


def _restore(before: Sequence[tuple[nn.Module, list[tuple[str, Any]]]]) -> None:
    for stack, modules in before:
        stack._modules = OrderedDict(modules)


def _stacks(pair: Pair) -> Iterator[tuple[nn.Module, set[int]]]:
    """The stacks of layers of both models, each with the numbers of those that represent all."""
    theirs = dict(pair.stock.named_modules())
    for path, ours in pair.ours.named_modules():
        stock = theirs.get(path)
        if not (isinstance(ours, nn.ModuleList) and isinstance(stock, nn.ModuleList)) or len(ours) != len(stock):
            continue
        around = [path[:place] for place, letter in enumerate(path) if letter == "."]
        if any(type(theirs.get(each)) is not type(pair.ours.get_submodule(each)) for each in ["", *around]):
            continue  # a replacement may go through the layers in another way
        if not all(isinstance(layer, GradientCheckpointingLayer) for layer in stock):
            continue  # not known to be run one after another
        pairs = zip(ours, stock, strict=True)
        numbers = _representatives([[*_description(one), *_description(other)] for one, other in pairs])
        if len(numbers) < len(ours):
            yield from [(ours, numbers), (stock, numbers)]


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
