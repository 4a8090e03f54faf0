"""What may be cut and joined: optimizers that treat each value by itself, and conversions that only move values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import optim
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    SplitModulelist,
    Transpose,
)

from patcher.conversions.concatenate import ReversibleConcatenate
from patcher.conversions.converted_weights import Converted
from patcher.conversions.layouts import Flatten, Layout, Rows
from patcher.fusions.experts.matrices import Matrices

#: Each value is moved by its own gradient and state, and by numbers that are the same for the whole parameter.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
#: Of others, by their names: why not.
REASONS = {
    "Adafactor": "keeps averages of the rows and columns of a whole matrix, and scales a step by all of it",
    "LBFGS": "goes by the history of all parameters at once",
    "Muon": "makes the step of a whole matrix orthogonal",
    "Optimizer8bit": "may keep its state quantized, in blocks that go across parts",
    "SparseAdam": "steps only where a gradient has entries",
}
#: Operations of transformers that put each value somewhere, and nothing else.
_MOVEMENTS = (Chunk, Concatenate, MergeModulelist, ReversibleConcatenate, SplitModulelist, Transpose)


def not_elementwise(optimizer: optim.Optimizer) -> str:
    """Why the state of a part isn't the part of a state, "" if it is."""
    cls = type(optimizer)
    known = next((base for base in cls.__mro__ if base in ELEMENTWISE), None)
    if known is None:
        found = next((reason for base in cls.__mro__ if (reason := REASONS.get(base.__name__))), "")
        return found or "isn't known to treat each value by itself"
    for derived in cls.__mro__[: cls.__mro__.index(known)]:
        if own := {name for name in vars(derived) if _is_overridden(derived, known, name)}:
            return f"has {', '.join(sorted(own))} of its own, so it isn't known to treat each value by itself"
    return ""


def _is_overridden(derived: type, known: type, name: str) -> bool:
    """Whether a class has another method than the one that is known; torch puts a wrapper around `step`."""
    if not hasattr(known, name) or (name.startswith("__") and name != "__setstate__"):
        return False
    return inspect.unwrap(getattr(derived, name)) is not inspect.unwrap(getattr(known, name))


def only_moves_values(layout: Layout) -> bool:
    """Whether each value of the originals is one of what they become, so that a state of it goes the same way."""
    if type(layout) in (Rows, Flatten, Matrices):
        return True
    if isinstance(layout, Converted) and all(type(each) in _MOVEMENTS for each in layout.done.operations):
        return True
    return _is_permutation(layout)


@torch.no_grad()
def _is_permutation(layout: Layout) -> bool:
    """Try it: with numbers that say where a value was, and with others, which have to go there too, and back."""
    sizes = [torch.Size(shape).numel() for shape in layout.stock_shapes]

    def parts(values: torch.Tensor) -> list[torch.Tensor]:
        cut = zip(torch.split(values, sizes), layout.stock_shapes, strict=True)
        return [part.reshape(shape).clone() for part, shape in cut]

    def whole(tensors: Any) -> torch.Tensor:
        return torch.cat([tensor.flatten().double() for tensor in tensors])

    count = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * 1e3
    places = whole(layout.fuse(parts(torch.arange(count, dtype=torch.float64))))
    if not torch.equal(places.sort().values, torch.arange(count, dtype=torch.float64)):
        return False
    fused = layout.fuse(parts(values))
    return torch.equal(whole(fused), values[places.long()]) and torch.equal(whole(layout.separate(fused)), values)
