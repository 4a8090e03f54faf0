"""Which results of conversions are tensors that went in, as they were: what is stacked and then cut again.

>>> experts = [torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")]
>>> trace = Trace()
>>> with trace:
...     stack = torch.stack([trace.input(each) for each in experts])
...     cut = stack.unbind()
>>> [trace.unchanged(each) for each in cut]
[0, 1]

A conversion runs on the meta device, where it can't see values, and each operation of torch is noted that only moves
them. What comes of any other isn't followed; one that writes into a tensor ends the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patcher.compat.models import written_tensors


@dataclass(frozen=True)
class _Region:
    """A block of a tensor.

    Attributes:
        starts: where it begins, for each dimension of the tensor.
        sizes: how far it goes.
        dims: which dimension of the result each of them is, None for one that the result doesn't have.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]

    def moved(self, dim: int, by: int) -> _Region:
        return replace(self, starts=(*self.starts[:dim], self.starts[dim] + by, *self.starts[dim + 1 :]))

    def with_dimension(self, dim: int, index: int) -> _Region:
        fields = ((self.starts, index), (self.sizes, 1), (self.dims, None))
        return _Region(*((*values[:dim], value, *values[dim:]) for values, value in fields))  # type: ignore[arg-type]

    def without_dimension(self, dim: int) -> _Region:
        return self.in_order([each for each in range(len(self.starts)) if each != dim])

    def in_order(self, order: Sequence[int]) -> _Region:
        return _Region(*(tuple(values[each] for each in order) for values in (self.starts, self.sizes, self.dims)))  # type: ignore[arg-type]


#: Where a region of a tensor lies: in which tensor that it was made of, and there in which region; None if in several.
_Origin = Callable[[_Region], "tuple[torch.Tensor, _Region] | None"]


class Trace(TorchDispatchMode):
    """What is done to the inputs while it is in force."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs: dict[int, int] = {}
        self._origins: dict[int, _Origin] = {}
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the identity of one of them
        self._is_over = False

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the meta device to begin with; they are numbered in this order."""
        self._inputs[id(tensor)] = len(self._inputs)
        self._alive.append(tensor)
        return tensor

    def unchanged(self, tensor: torch.Tensor) -> int | None:
        """The number of the input that a tensor is, all of it and nothing else; None where that isn't known."""
        if self._is_over or not tensor.numel():  # of no values nobody knows where they come from
            return None
        shape = tuple(tensor.shape)
        region = _Region((0,) * len(shape), shape, tuple(range(len(shape))))
        dtype = tensor.dtype
        while id(tensor) not in self._inputs:
            origin = self._origins.get(id(tensor))
            found = None if origin is None else origin(region)
            if found is None:
                return None
            tensor, region = found
        is_whole = region.starts == (0,) * len(tensor.shape) and region.sizes == tuple(tensor.shape)
        in_place = region.dims == tuple(range(len(shape)))
        return self._inputs[id(tensor)] if is_whole and in_place and tensor.dtype == dtype else None

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        self._is_over = self._is_over or bool(written_tensors(operation, args, kwargs))
        moves = _MOVES.get(operation)
        if moves is not None:
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            for made, origin in zip(results, moves(results, *args, **kwargs), strict=True):
                self._alive.append(made)
                if origin is not None and id(made) not in self._inputs:
                    self._origins[id(made)] = origin
        return result


def _same(results: Sequence[torch.Tensor], self: torch.Tensor, **_: Any) -> list[_Origin]:
    return [lambda region: (self, region)]


def _cat(results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], dim: int = 0) -> list[_Origin | None]:
    (made,) = results
    if any(part.dim() != made.dim() for part in tensors):  # as torch allows of tensors of no values
        return [None]
    dim %= made.dim()

    def origin(region: _Region) -> tuple[torch.Tensor, _Region] | None:
        begin = 0
        for part in tensors:
            end = begin + part.shape[dim]
            if begin <= region.starts[dim] and region.starts[dim] + region.sizes[dim] <= end:
                return part, region.moved(dim, -begin)
            begin = end
        return None

    return [origin]


def _stack(results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], dim: int = 0) -> list[_Origin]:
    dim %= results[0].dim()

    def origin(region: _Region) -> tuple[torch.Tensor, _Region] | None:
        return (tensors[region.starts[dim]], region.without_dimension(dim)) if region.sizes[dim] == 1 else None

    return [origin]


def _cut(results: Sequence[torch.Tensor], self: torch.Tensor, sizes: Any, dim: int = 0) -> list[_Origin]:
    """Pieces one behind the other."""
    dim %= self.dim()
    *starts, _ = accumulate((piece.shape[dim] for piece in results), initial=0)
    return [lambda region, start=start: (self, region.moved(dim, start)) for start in starts]  # type: ignore[misc]


def _unbind(results: Sequence[torch.Tensor], self: torch.Tensor, dim: int = 0) -> list[_Origin]:
    dim %= self.dim()
    return [
        lambda region, index=index: (self, region.with_dimension(dim, index))  # type: ignore[misc]
        for index in range(len(results))
    ]


def _select(results: Sequence[torch.Tensor], self: torch.Tensor, dim: int, index: int) -> list[_Origin]:
    dim %= self.dim()
    return [lambda region: (self, region.with_dimension(dim, index % self.shape[dim]))]


def _slice(
    results: Sequence[torch.Tensor],
    self: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> list[_Origin | None]:
    dim %= self.dim()
    first, _, _ = slice(start, end).indices(self.shape[dim])
    return [lambda region: (self, region.moved(dim, first))] if step == 1 else [None]


def _unsqueeze(results: Sequence[torch.Tensor], self: torch.Tensor, dim: int) -> list[_Origin]:
    dim %= self.dim() + 1
    return [lambda region: (self, region.without_dimension(dim))]


def _permute(results: Sequence[torch.Tensor], self: torch.Tensor, dims: Sequence[int]) -> list[_Origin]:
    order = [each % self.dim() for each in dims]
    return [lambda region: (self, region.in_order([order.index(each) for each in range(self.dim())]))]


def _transpose(results: Sequence[torch.Tensor], self: torch.Tensor, dim0: int, dim1: int) -> list[_Origin]:
    order = list(range(self.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(results, self, order)


def _t(results: Sequence[torch.Tensor], self: torch.Tensor) -> list[_Origin]:
    return _permute(results, self, range(self.dim())[::-1])


#: Operation -> where the values of each of its results come from.
_MOVES: dict[Any, Callable[..., Sequence[_Origin | None]]] = {
    torch.ops.aten.alias.default: _same,
    torch.ops.aten.detach.default: _same,
    torch.ops.aten.clone.default: _same,
    torch.ops.aten.cat.default: _cat,
    torch.ops.aten.stack.default: _stack,
    torch.ops.aten.split.Tensor: _cut,
    torch.ops.aten.split_with_sizes.default: _cut,
    torch.ops.aten.unbind.int: _unbind,
    torch.ops.aten.select.int: _select,
    torch.ops.aten.slice.Tensor: _slice,
    torch.ops.aten.unsqueeze.default: _unsqueeze,
    torch.ops.aten.permute.default: _permute,
    torch.ops.aten.transpose.int: _transpose,
    torch.ops.aten.t.default: _t,
}
