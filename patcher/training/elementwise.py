"""What may be cut and joined: optimizers that treat each value by itself, and conversions that only move values."""

from __future__ import annotations

import inspect

from torch import optim

from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.conversion import Converted
from patcher.layouts.layouts import Cut, Flatten, Layout, Rows
from patcher.layouts.operations import only_moves

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
    "LBFGS": "depends on the history of all parameters at once",
    "Muon": "makes the step of a whole matrix orthogonal",
    "Optimizer8bit": "may keep its state quantized, in blocks that go across parts",
    "SparseAdam": "steps only where a gradient has entries",
}


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
    known = type(layout) in (Rows, Cut, Flatten, Matrices)
    return known or (isinstance(layout, Converted) and only_moves(layout.transform))
