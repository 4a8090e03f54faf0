"""Two models side by side: how far their outputs differ, in which module it begins, and how exactly each computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Difference(NamedTuple):
    """How far a list of tensors is from another, as the largest over all elements."""

    absolute: float
    relative: float
    scale: float  # the largest magnitude in the reference

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
    Difference(absolute=0.5, relative=0.25, scale=2.0)

    A value that isn't finite is equal to the same value at the same place only: it is what stock has there.
    """
    ours, reference = list(ours), list(reference)
    if [one.shape for one in ours] != [other.shape for other in reference]:
        return Difference(math.inf, math.inf, 0.0)
    absolute = scale = 0.0
    for one, other in zip(ours, reference, strict=True):
        if not one.numel():
            continue
        one, other = one.detach().to("cpu", torch.float64), other.detach().to("cpu", torch.float64)
        same = (one == other) | (one.isnan() & other.isnan())
        gap = torch.where(same, 0.0, (one - other).abs())
        finite = other[other.isfinite()]
        absolute = max(absolute, math.inf if gap.isnan().any() else float(gap.max()))
        scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
    return Difference(absolute, absolute / scale if scale else math.inf if absolute else 0.0, scale)


Call = tuple[list[torch.Tensor], list[torch.Tensor]]  # what went in, what came out


def first_difference(
    ours: nn.Module, stock: nn.Module, run: Callable[[nn.Module], object], tolerance: float
) -> str | None:
    """The path of the first module, of those that both models have, whose inputs are equal and whose outputs differ.

    In the order in which the calls of stock return, so that of nested modules the innermost is named. Where small
    differences add up until they are more than the tolerance, it is the module that has added most so far.
    """
    mine: dict[str, list[Call]] = {}
    for path, call in reversed(_calls(ours, run)):
        mine.setdefault(path, []).append(call)
    most, due = 0.0, None
    for path, (inputs, outputs) in _calls(stock, run):
        found = mine[path].pop() if mine.get(path) else None
        if found is None or not outputs:
            continue
        before, after = difference(found[0], inputs), difference(found[1], outputs)
        if (grown := after.share - before.share) > most:
            most, due = grown, path
        if before.within(tolerance) and not after.within(tolerance):
            return due
    return due


def _calls(model: nn.Module, run: Callable[[nn.Module], object]) -> list[tuple[str, Call]]:
    calls: list[tuple[str, Call]] = []

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((path, (_copies((args, kwargs)), _copies(output))))

    with _hooked((module, partial(note, path)) for path, module in model.named_modules()), torch.no_grad():
        run(model)
    return calls


@contextmanager
def noting_calls(model: nn.Module, reached: set[str]) -> Iterator[None]:
    """Add the paths of the modules that are called, and of those that they are in, under each of their names."""

    def note(path: str, *_: object) -> None:
        reached.update(accumulate(path.split("."), "{}.{}".format), [""])

    with _hooked((module, partial(note, path)) for path, module in model.named_modules(remove_duplicate=False)):
        yield


@contextmanager
def _hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in nested dicts, lists and tuples, such as the output of a model."""
    if _is_floating(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from floating_tensors(item)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _copies(value: Any) -> list[torch.Tensor]:
    """A later module may write into the very same memory."""
    return [tensor.detach().clone() for tensor in floating_tensors(value)]


#: Operations whose result suffers when they are done in half precision, which is why modeling code upcasts for them.
_DELICATE = {"mean", "var", "sum", "rsqrt", "pow", "exp", "softmax", "log_softmax", "sin", "cos", "cumsum"}

#: How much less exact than stock's a module may be. Rounding an intermediate value besides the result makes errors
#: about 1.4 times as large (the square root of 2); a module that keeps its upcasts is as exact as stock's.
PRECISION = 1.2


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that run in half precision."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.half: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.half.add(func.overloadpacket.__name__.strip("_"))
        return result


def precisions(
    ours: nn.Module, stock: nn.Module, paths: Iterable[str], run: Callable[[nn.Module], object]
) -> Iterator[tuple[str, list[str], float]]:
    """How exactly modules compute that stand in for stock's, those of `paths` that can be run by themselves.

    For each its path, the delicate operations that it does in half precision and stock doesn't, and its error to that
    of stock: an upcast was lost where there are such operations and the error is more than `PRECISION`.
    Each module gets the largest inputs that its stock counterpart gets; the error of both is measured against the
    stock module in float64, as the Euclidean distance.
    """
    wanted = {stock.get_submodule(path): path for path in paths}
    inputs: dict[str, tuple[int, Any, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        size = sum(tensor.numel() for tensor in floating_tensors(output))
        if size > inputs.get(wanted[module], (0,))[0]:
            inputs[wanted[module]] = size, copy.copy(args), dict(kwargs)

    with _hooked((module, note) for module in wanted), torch.no_grad():
        run(stock)
    for path, (_, args, kwargs) in inputs.items():
        reference, other, mine = stock.get_submodule(path), _Operations(), _Operations()
        try:
            with torch.no_grad():
                exact = _result(copy.deepcopy(reference).double(), _double(args), _double(kwargs))
                with other:
                    theirs = _result(reference, args, kwargs)
                with mine:
                    found = _result(ours.get_submodule(path), args, kwargs)
        except Exception:  # it keeps state between calls, or can't be run by itself: outputs are compared anyway
            continue
        error, base = float(torch.dist(found, exact)), float(torch.dist(theirs, exact))
        ratio = error / base if base else math.inf if error else 1.0
        yield path, sorted((mine.half - other.half) & _DELICATE), ratio


def _double(value: Any) -> Any:
    return recursively_apply(torch.Tensor.double, value, test_type=_is_floating)


def _result(module: nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
    return next(floating_tensors(module(*copy.deepcopy(args), **copy.deepcopy(kwargs)))).double()
