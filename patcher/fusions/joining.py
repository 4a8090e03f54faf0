"""The weights of joined projections: rows put together while a checkpoint is read, and taken apart on save."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps

from patcher.conversions.transforms import single
from patcher.fusions.weight_layout import LayoutConversion, ReverseLayoutConversion


class JoinRows(LayoutConversion):
    """Put the rows of several tensors one under the other, and remember how many each had."""

    #: how many rows each tensor had, once it has run
    sizes: tuple[int, ...] = ()

    def fuse(self, tensors: list[torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        self.sizes = tuple(tensor.shape[0] for tensor in tensors)
        return {name: _joined(tensors)}

    def separate(self, tensors: dict[str, Any], name: str) -> list[torch.Tensor]:
        return list(torch.split(single(tensors[name]), list(self.sizes)))

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitRows(self)


class SplitRows(ReverseLayoutConversion):
    """The reverse of `JoinRows`."""


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
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
