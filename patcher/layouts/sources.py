"""Lazy sources: what a checkpoint holds in place of a weight that is made of several tensors of it.

transformers reads a checkpoint tensor by tensor, through objects that know a shape and give rows on demand. These are
such objects, so what is joined is read as one weight: cast, quantized, sharded and put on its device by transformers
as any other, and in memory once.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from patcher.layouts.layouts import Cut, Layout, Rows, by_itself


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of one that is still on the disk."""
    return tuple(value.get_shape() if hasattr(value, "get_shape") else value.shape)


def on_meta(source: Any) -> torch.Tensor:
    """A tensor of the meta device for one of a checkpoint, which may have only a shape as yet."""
    if isinstance(source, torch.Tensor) and source.is_meta:
        return source
    return torch.empty(shape_of(source), device="meta")


class JoinedRows:
    """The rows of several tensors as one, one part behind the other.

    Args:
        parts: tensors, or what a checkpoint has for them.
        blocks: how many equal blocks they lie in, each with its share of every part.
    """

    def __init__(self, parts: Sequence[Any], blocks: int = 1) -> None:
        sizes = [shape_of(part)[0] for part in parts]
        self._rows, self._tail = sum(sizes), shape_of(parts[0])[1:]
        self._pieces = [
            RowSlice(part, block * (size // blocks), size // blocks)
            for block in range(blocks)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def get_shape(self) -> list[int]:
        return [self._rows, *self._tail]

    def get_dtype(self) -> str:
        return self._pieces[0].get_dtype()

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if first is Ellipsis and not rest:
            first = slice(None)
        if not isinstance(first, slice) or first.step not in (None, 1):
            return self[...][index]
        start, stop, _ = first.indices(self._rows)
        found, end = [], 0
        for piece in self._pieces:
            begin, end = end, end + piece.rows
            low, high = max(start, begin), min(stop, end)
            if low < high:
                found.append(piece[(slice(low - begin, high - begin), *rest)])
        return joined(found) if found else self._pieces[0][(slice(0, 0), *rest)]


class RowSlice:
    """Some rows of a tensor, one behind the other."""

    def __init__(self, whole: Any, start: int, rows: int) -> None:
        self._whole, self._start, self.rows = whole, start, rows

    def get_shape(self) -> list[int]:
        return [self.rows, *shape_of(self._whole)[1:]]

    def get_dtype(self) -> str:
        return dtype_of(self._whole)

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, _ = (slice(None) if first is Ellipsis else first).indices(self.rows)
        rows: Any = (slice(self._start + start, self._start + stop), *rest)
        if not rest and rows == (slice(0, shape_of(self._whole)[0]),):
            rows = ...  # which a file that is mapped gives without a copy
        found: torch.Tensor = self._whole[rows]
        return found


class Computed:
    """One of several tensors that are computed together: the first that is read computes all of them."""

    __slots__ = ("_dtype", "_shape", "group", "name")

    def __init__(self, group: Computation, name: Any, shape: Sequence[int], dtype: str) -> None:
        self.group = group
        self.name = name
        self._shape = shape
        self._dtype = dtype
        group.expected.add(name)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self.group.take(self.name)
        return tensor if index is Ellipsis else tensor[index]


class Computation:
    """What gives several tensors, run when one of them is first read and forgotten when all of them have been.

    Loads read in several threads.

    Args:
        convert: makes the tensors of those that it takes, by the names of the sources.
    """

    def __init__(
        self, convert: Callable[[Mapping[Any, torch.Tensor]], Mapping[Any, torch.Tensor]], sources: Mapping[Any, Any]
    ) -> None:
        self.convert, self.sources = convert, sources
        self._lock = threading.Lock()
        #: what will be read
        self.expected: set[Any] = set()
        self._left: dict[Any, torch.Tensor] = {}

    def take(self, name: Any) -> torch.Tensor:
        with self._lock:
            if name not in self._left:  # not yet computed, or read once more
                made = self.convert({each: source[...] for each, source in self.sources.items()})
                self._left = {each: made[each] for each in self.expected}
            return self._left.pop(name)


def dtype_of(source: Any) -> str:
    """The name that safetensors has for the dtype of a source, as the slices of its files say it: F32, BF16, I64."""
    if hasattr(source, "get_dtype"):
        name: str = source.get_dtype()
        return name
    dtype: torch.dtype = source.dtype
    kind = (
        "BF" if dtype is torch.bfloat16 else "F" if dtype.is_floating_point else "U" if "uint" in str(dtype) else "I"
    )
    return f"{kind}{8 * dtype.itemsize}"


def in_blocks(layout: Rows, source: Any) -> Any:
    """The source of joined rows that lie part by part, where they are to lie in blocks."""
    return JoinedRows(_one_by_one(source, layout.sizes), layout.blocks)


def _one_by_one(source: Any, sizes: Sequence[int]) -> list[Any]:
    """The source of parts whose rows lie one behind the other."""
    starts = itertools.accumulate(sizes, initial=0)
    return [RowSlice(source, start, rows) for start, rows in zip(starts, sizes, strict=False)]


def fused_sources(layout: Layout, sources: Sequence[Any]) -> list[Any]:
    """The sources of the fused parameters of a layout, from those of transformers' parameters."""
    if type(layout) is Rows:
        return [sources[0] if len(sources) == 1 else JoinedRows(sources, layout.blocks)]
    if type(layout) is Cut and layout.blocks == 1 and not layout.transposed:
        return _one_by_one(sources[0], layout.sizes)

    @torch.no_grad()
    def fuse(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        made = layout.fuse(list(tensors.values()))
        # What shares a storage, tools that save take for tied.
        return {number: by_itself(tensor) for number, tensor in enumerate(made)}

    group = Computation(fuse, dict(enumerate(sources)))
    shapes, dtype = layout.fused_shapes(), dtype_of(sources[0])
    return [Computed(group, number, shape, dtype) for number, shape in enumerate(shapes)]


def joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all pieces; a view of them where they lie one behind the other, as a mapped file may have them.

    A load on the CPU only maps the file, so a copy would take most of the time and twice the memory.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    ends = itertools.accumulate((piece.nbytes for piece in pieces), initial=first.data_ptr())
    if any(
        type(piece) is not torch.Tensor
        or piece.device.type != "cpu"
        or piece.dtype != first.dtype
        or piece.shape[1:] != first.shape[1:]
        or not piece.is_contiguous()
        or piece.data_ptr() != end
        or not piece.nbytes
        for piece, end in zip(pieces, ends, strict=False)
    ):
        return torch.cat(pieces)
    memory = (ctypes.c_byte * sum(piece.nbytes for piece in pieces)).from_address(first.data_ptr())
    memory.pieces = pieces  # type: ignore[attr-defined]  # they hold the memory, as long as the view does
    return torch.frombuffer(memory, dtype=first.dtype).view(-1, *first.shape[1:])


def named_sources(sources: Mapping[str, Any]) -> tuple[dict[str, Any], WeightConverter]:
    """Sources by parameter as a part of a checkpoint, and the conversion that reads it, first in its load."""
    targets = {f"{_Named.PREFIX}{number}": target for number, target in enumerate(sources)}
    return dict(zip(targets, sources.values(), strict=True)), _Named(targets)


class _Named(WeightConverter):
    """Has a load take sources as the parameters that they are made for, whatever its conversions do to names.

    The name of a fused parameter may look like one that transformers converts: `experts.0.gate_proj.weight`.
    """

    __slots__ = ("_targets",)
    PREFIX = "patcher:"

    def __init__(self, targets: Mapping[str, str]) -> None:
        super().__init__(self.PREFIX, self.PREFIX, [_AsItIs()])
        self._targets = targets

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        _, found, number = source_key.rpartition(self.PREFIX)  # a renaming may have put a prefix in front
        target = self._targets.get(found + number)
        return (source_key, None) if target is None else (target, self.PREFIX)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightConverter:
        # A load copies a conversion for each parameter: what collects its tensor needs no names.
        return WeightConverter(self.PREFIX, self.PREFIX, [_AsItIs()])


class _AsItIs(ConversionOps):
    """One tensor as the parameter that it is read for."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        (given,) = input_dict.values()
        # In a list, as a tensor that no conversion takes: quanto takes the first row of any other.
        return {full_layer_name: given if isinstance(given, list) else [given]}  # type: ignore[dict-item]
