"""How far each layer of one model is from that of another, and in which module an error begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from patcher.patterns import inside, is_number
from patcher.verification.passes import Difference, difference, floating_tensors, hooked

Run = Callable[[nn.Module], object]
_Call = tuple[list[torch.Tensor], list[torch.Tensor]]  # what went in, what came out


class LayerErrors(NamedTuple):
    """How far the output of each layer is from stock's, on one input.

    Attributes:
        inputs: the name of the input.
        allowed: the error that is allowed, relative to the magnitude of stock's output, or to 1 where that is less.
        errors: (path, error) of each layer, and of what is before, between and after them, in the order of the calls;
            of the layer where the error begins what is in it too.
        begins: the module where it begins, None where nothing differs.
    """

    inputs: str
    allowed: float
    errors: tuple[tuple[str, float], ...]
    begins: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {**self._asdict(), "errors": dict(self.errors)}


def layer_errors(
    ours: nn.Module, stock: nn.Module, run: Run, inputs: str, allowed: float, *, right: bool = False
) -> LayerErrors:
    """Run both models, and compare what goes into each module and what comes out.

    An error begins in the first module whose inputs are equal and whose outputs differ, of nested ones the innermost.
    Where small differences add up until they are more than is allowed, it is the one that has added most so far.

    >>> class Off(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x) * 1.01
    >>> stock = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    >>> ours = nn.Sequential(stock[0], nn.Sequential(Off(2, 2), nn.Tanh()))
    >>> _ = ours.load_state_dict(stock.state_dict())
    >>> found = layer_errors(ours, stock, lambda model: model(torch.ones(1, 2)), "ones", 1e-5)
    >>> found.begins, [path for path, _ in found.errors]
    ('1.0', ['0', '1', '1.0', '1.1'])

    Args:
        inputs: what to call them.
        right: the outputs are the same, so nothing begins.
    """
    worst: dict[str, float] = {}
    due = begins = None
    most = 0.0
    for path, before, after in _gaps(ours, stock, run):
        if (grown := after.share - before.share) > most:
            most, due = grown, path
        if begins is None and before.within(allowed) and not after.within(allowed):
            begins = due
        if not math.isinf(after.absolute) or after.scale:  # else it returns another structure, which may be intended
            error = math.inf if math.isnan(after.share) else after.share
            worst[path] = max(error, worst.get(path, 0.0))
    begins = None if right else due if begins is None else begins
    rows: list[str] = []
    for path in _layers(list(worst)):
        rows.append(path)
        if begins is not None and begins.startswith(inside(path)) and path:
            rows += [each for each in worst if each.rpartition(".")[0] == path]
    return LayerErrors(inputs, allowed, tuple((path, worst[path]) for path in rows), begins)


def _gaps(ours: nn.Module, stock: nn.Module, run: Run) -> Iterator[tuple[str, Difference, Difference]]:
    """Of each call of a module that both have the inputs and the outputs, in the order in which stock returns."""
    mine: dict[str, list[_Call]] = {}
    for path, call in reversed(_calls(ours, run)):
        mine.setdefault(path, []).append(call)
    for path, (inputs, outputs) in _calls(stock, run):
        found = mine[path].pop() if mine.get(path) else None
        if found is not None and outputs:
            yield path, difference(found[0], inputs), difference(found[1], outputs)


def _calls(model: nn.Module, run: Run) -> list[tuple[str, _Call]]:
    calls: list[tuple[str, _Call]] = []

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Copies: a later module may write into the very same memory.
        given, found = (
            [each.detach().clone() for each in floating_tensors(some)] for some in ((args, kwargs), output)
        )
        calls.append((path, (given, found)))

    with hooked((module, partial(note, path)) for path, module in model.named_modules()), torch.no_grad():
        run(model)
    return calls


def _layers(paths: Sequence[str]) -> list[str]:
    """The outermost numbered modules, and of the others the outermost that have none of these in them."""
    numbers = {path: sum(map(is_number, path.split("."))) for path in paths}
    numbered = {path for path in paths if is_number(path.rpartition(".")[2]) and numbers[path] == 1}
    around = {path[:place] for path in numbered for place, letter in enumerate(path) if letter == "."} | {""}
    others = [path for path in paths if path not in around and not numbers[path]]
    outermost = {path for path in others if not any(path.startswith(inside(other)) for other in others)}
    return [path for path in paths if path in numbered or path in outermost]
