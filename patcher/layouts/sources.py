"""Lazy sources: what a load reads instead of a tensor of the checkpoint, for a weight that is made of several.

transformers reads a checkpoint through objects that know a shape and return rows on demand. These are such objects, so
a joined weight is read as one: transformers casts, quantizes, shards and places it like any other.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from patcher.layouts.layouts import Layout, Rows, by_itself


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of a safetensors file."""
    return tuple(value.get_shape() if hasattr(value, "get_shape") else value.shape)


def dtype_of(source: Any) -> str:
    """Return the dtype of a source by the name of safetensors: F32, BF16, I64."""
    if hasattr(source, "get_dtype"):
        name: str = source.get_dtype()
        return name
    dtype: torch.dtype = source.dtype
    kind = (
        "BF" if dtype is torch.bfloat16 else "F" if dtype.is_floating_point else "U" if "uint" in str(dtype) else "I"
    )
    return f"{kind}{8 * dtype.itemsize}"


class Source:
    """What a load reads in place of a tensor of the checkpoint."""

    __slots__ = ("_dtype", "_shape")

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self._shape, self._dtype = shape, dtype

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._shape)


class JoinedRows(Source):
    """The rows of several tensors or sources, concatenated; in equal blocks with a share of every part, if several."""

    def __init__(self, parts: Sequence[Any], blocks: int = 1) -> None:
        sizes = [shape_of(part)[0] for part in parts]
        super().__init__((sum(sizes), *shape_of(parts[0])[1:]), dtype_of(parts[0]))
        self._pieces = [
            RowSlice(part, block * (size // blocks), size // blocks)
            for block in range(blocks)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if first is Ellipsis and not rest:
            first = slice(None)
        if not isinstance(first, slice) or first.step not in (None, 1):
            return self[...][index]
        start, stop, _ = first.indices(self._shape[0])
        pieces, end = [], 0
        for piece in self._pieces:
            begin, end = end, end + piece.rows
            low, high = max(start, begin), min(stop, end)
            if low < high:
                pieces.append(piece[(slice(low - begin, high - begin), *rest)])
        return concatenate(pieces) if pieces else self._pieces[0][(slice(0, 0), *rest)]


class RowSlice(Source):
    """Consecutive rows of a tensor or source."""

    def __init__(self, source: Any, start: int, rows: int) -> None:
        super().__init__((rows, *shape_of(source)[1:]), dtype_of(source))
        self._source, self._start, self.rows = source, start, rows

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, _ = (slice(None) if first is Ellipsis else first).indices(self.rows)
        rows: Any = (slice(self._start + start, self._start + stop), *rest)
        if not rest and rows == (slice(0, shape_of(self._source)[0]),):
            rows = ...  # which a memory-mapped file returns without a copy
        tensor: torch.Tensor = self._source[rows]
        return tensor


class Computed(Source):
    """One of several tensors that are computed together, when the first of them is read."""

    __slots__ = ("group", "name")

    def __init__(self, group: Computation, name: Any, shape: Sequence[int], dtype: str) -> None:
        super().__init__(shape, dtype)
        self.group, self.name = group, name
        group.expected.add(name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self.group.take(self.name)
        return tensor if index is Ellipsis else tensor[index]


class Computation:
    """Computes several tensors of sources when one of them is first read, and drops each when it has been read.

    Thread-safe, since loads read in several threads.
    """

    def __init__(
        self, convert: Callable[[Mapping[Any, torch.Tensor]], Mapping[Any, torch.Tensor]], sources: Mapping[Any, Any]
    ) -> None:
        self.convert, self.sources = convert, sources
        self._lock = threading.Lock()
        #: the results that will be read
        self.expected: set[Any] = set()
        self._results: dict[Any, torch.Tensor] = {}

    def take(self, name: Any) -> torch.Tensor:
        with self._lock:
            if name not in self._results:  # not computed yet, or read again
                results = self.convert({key: source[...] for key, source in self.sources.items()})
                self._results = {key: results[key] for key in self.expected}
            return self._results.pop(name)


def in_blocks(layout: Rows, source: Any) -> Any:
    """Return a source of joined rows, which lie part by part, rearranged in the blocks of a layout."""
    starts = itertools.accumulate(layout.sizes, initial=0)
    parts = [RowSlice(source, start, rows) for start, rows in zip(starts, layout.sizes, strict=False)]
    return JoinedRows(parts, layout.blocks)


def fused_sources(layout: Layout, sources: Sequence[Any]) -> list[Any]:
    """Return the sources of the fused parameters of a layout, given those of the stock parameters."""
    if type(layout) is Rows:
        return [sources[0] if len(sources) == 1 else JoinedRows(sources, layout.blocks)]

    @torch.no_grad()
    def fuse(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {index: by_itself(tensor) for index, tensor in enumerate(layout.fuse(list(tensors.values())))}

    group = Computation(fuse, dict(enumerate(sources)))
    shapes, dtype = layout.fused_shapes(), dtype_of(sources[0])
    return [Computed(group, index, shape, dtype) for index, shape in enumerate(shapes)]


def concatenate(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows; without a copy if they are adjacent in memory, as they may be in a memory-mapped file."""
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
    storages = [piece.untyped_storage() for piece in pieces]
    if len({storage.data_ptr() for storage in storages}) == 1:
        rows = sum(map(len, pieces))
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    if any(storage.resizable() for storage in storages):  # not of a file: FSDP frees memory of tensors that are alive
        return torch.cat(pieces)
    memory = (ctypes.c_byte * sum(piece.nbytes for piece in pieces)).from_address(first.data_ptr())
    memory.pieces = pieces  # type: ignore[attr-defined]  # keeps the memory alive as long as the view
    return torch.frombuffer(memory, dtype=first.dtype).view(-1, *first.shape[1:])


def named_sources(sources: Mapping[str, Any]) -> tuple[dict[str, Any], WeightConverter]:
    """Return sources by keys for a checkpoint, and the conversion, first in its load, that reads them."""
    targets = {f"{_ReadSource.PREFIX}{index}": target for index, target in enumerate(sources)}
    return dict(zip(targets, sources.values(), strict=True)), _ReadSource(targets)


class _ReadSource(WeightConverter):
    """Reads sources under any names, since those of fused parameters may match conversions of transformers."""

    __slots__ = ("_targets",)
    PREFIX = "patcher:"

    def __init__(self, targets: Mapping[str, str]) -> None:
        super().__init__(self.PREFIX, self.PREFIX, [_Unchanged()])
        self._targets = targets

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        _, prefix, index = source_key.rpartition(self.PREFIX)  # a renaming may have put a prefix in front
        target = self._targets.get(prefix + index)
        return (source_key, None) if target is None else (target, self.PREFIX)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightConverter:
        # A load copies a conversion for each parameter; the copy only collects its tensor.
        return WeightConverter(self.PREFIX, self.PREFIX, [_Unchanged()])


class _Unchanged(ConversionOps):
    """Returns one tensor as the parameter that it is read for."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        (value,) = input_dict.values()
        # In a list, like a tensor that no conversion takes: of any other, quanto takes the first row.
        return {full_layer_name: value if isinstance(value, list) else [value]}  # type: ignore[dict-item]
