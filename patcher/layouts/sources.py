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
    """Consecutive rows of several tensors or sources, concatenated.

    Args:
        parts: (tensor or source, its first row, the number of rows).
        blocks: the number of equal blocks, each with its share of the rows of every part.
    """

    def __init__(self, parts: Sequence[tuple[Any, int, int]], blocks: int = 1) -> None:
        first = parts[0][0]
        super().__init__((sum(rows for *_, rows in parts), *shape_of(first)[1:]), dtype_of(first))
        self._pieces = [
            (source, start + block * (rows // blocks), rows // blocks)
            for block in range(blocks)
            for source, start, rows in parts
        ]

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if first is Ellipsis and not rest:
            first = slice(None)
        if not isinstance(first, slice) or first.step not in (None, 1):
            return self[...][index]
        begin, end, _ = first.indices(self._shape[0])
        pieces, position = [], 0
        for source, start, rows in self._pieces:
            low, high = max(begin - position, 0), min(end - position, rows)
            position += rows
            if low >= high:
                continue
            is_whole = not rest and high - low == shape_of(source)[0]  # which a mapped file returns without a copy
            pieces.append(source[...] if is_whole else source[(slice(start + low, start + high), *rest)])
        return concatenate(pieces) if pieces else self._pieces[0][0][(slice(0, 0), *rest)]


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
    return JoinedRows([(source, *rows) for rows in zip(starts, layout.sizes, strict=False)], layout.blocks)


def fused_sources(layout: Layout, sources: Sequence[Any]) -> list[Any]:
    """Return the sources of the fused parameters of a layout, given those of the stock parameters."""
    if type(layout) is Rows:
        parts = [(source, 0, shape_of(source)[0]) for source in sources]
        return [sources[0] if len(sources) == 1 else JoinedRows(parts, layout.blocks)]

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
