"""How far each layer of one model is from that of another, and in which module an error begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from patcher.patterns import inside, is_number, parents
from patcher.verification.passes import Difference, difference, floating_tensors, hooked

Run = Callable[[nn.Module], object]
_Call = tuple[list[torch.Tensor], list[torch.Tensor]]  # inputs, outputs


class LayerErrors(NamedTuple):
    """How far the output of each layer is from that of the stock model, on one input.

    Attributes:
        inputs: the name of the input.
        allowed: the largest error that passes, relative to the magnitude of the output, or to 1 if that is smaller.
        errors: (path, error) of each layer and of the modules beside layers, in the order of the calls; for the layer
            in which the error begins, those of its children too.
        begins: the module in which the error begins, None if nothing differs.
    """

    inputs: str
    allowed: float
    errors: tuple[tuple[str, float], ...]
    begins: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {**self._asdict(), "errors": dict(self.errors)}


def layer_errors(ours: nn.Module, stock: nn.Module, run: Run, inputs: str, allowed: float) -> LayerErrors:
    """Run both models, and compare the inputs and outputs of each module.

    An error begins in the first module with equal inputs and different outputs, of nested ones in the innermost. Where
    small differences add up until they are too large, it is the module that has added the most so far.

    >>> class Off(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x) * 1.01
    >>> stock = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    >>> ours = nn.Sequential(stock[0], nn.Sequential(Off(2, 2), nn.Tanh()))
    >>> _ = ours.load_state_dict(stock.state_dict())
    >>> result = layer_errors(ours, stock, lambda model: model(torch.ones(1, 2)), "ones", 1e-5)
    >>> result.begins, [path for path, _ in result.errors]
    ('1.0', ['0', '1', '1.0', '1.1'])

    Args:
        inputs: the name of the input.
    """
    worst: dict[str, float] = {}
    most = begins = None
    growth = 0.0
    for path, before, after in _gaps(ours, stock, run):
        if after.share - before.share > growth:
            growth, most = after.share - before.share, path
        if begins is None and before.within(allowed) and not after.within(allowed):
            begins = most
        if not math.isinf(after.absolute) or after.scale:  # else it returns another structure, which may be intended
            error = math.inf if math.isnan(after.share) else after.share
            worst[path] = max(error, worst.get(path, 0.0))
    begins = most if begins is None else begins
    rows: list[str] = []
    for path in _layers(list(worst)):
        rows.append(path)
        if begins is not None and begins.startswith(inside(path)) and path:
            rows += [child for child in worst if child.rpartition(".")[0] == path]
    return LayerErrors(inputs, allowed, tuple((path, worst[path]) for path in rows), begins)


def _gaps(ours: nn.Module, stock: nn.Module, run: Run) -> Iterator[tuple[str, Difference, Difference]]:
    """Yield the differences of inputs and outputs of each call of a common module, in the order of the returns."""
    mine: dict[str, list[_Call]] = {}
    for path, call in reversed(_calls(ours, run)):
        mine.setdefault(path, []).append(call)
    for path, (inputs, outputs) in _calls(stock, run):
        matching = mine[path].pop() if mine.get(path) else None
        if matching is not None and outputs:
            yield path, difference(matching[0], inputs), difference(matching[1], outputs)


def _calls(model: nn.Module, run: Run) -> list[tuple[str, _Call]]:
    calls: list[tuple[str, _Call]] = []

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Copies: a later module may write into the very same memory.
        inputs, outputs = (
            [tensor.detach().clone() for tensor in floating_tensors(some)] for some in ((args, kwargs), output)
        )
        calls.append((path, (inputs, outputs)))

    with hooked((module, partial(record, path)) for path, module in model.named_modules()), torch.no_grad():
        run(model)
    return calls


def _layers(paths: Sequence[str]) -> list[str]:
    """Return the outermost numbered modules, and the outermost of the others that contain none of these."""
    depths = {path: sum(map(is_number, path.split("."))) for path in paths}
    numbered = {path for path in paths if is_number(path.rpartition(".")[2]) and depths[path] == 1}
    around = {parent for path in numbered for parent in parents(path)} | {""}
    others = [path for path in paths if path not in around and not depths[path]]
    outermost = {path for path in others if not any(path.startswith(inside(other)) for other in others)}
    return [path for path in paths if path in numbered or path in outermost]
