"""What may be cut and joined: optimizers that treat each value by itself, and conversions that only move values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode

from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.conversion import Converted
from patcher.layouts.layouts import Flatten, Layout, Rows
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
    if type(layout) in (Rows, Flatten, Matrices):
        return True
    if isinstance(layout, Converted) and only_moves(layout.transform):
        return True
    return _calls_only_movements(layout) and _is_permutation(layout)


class _OnlyMovements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets through what puts values elsewhere, and nothing that makes other values or looks at them."""

    #: Names of ATen; others, as `reshape` and `narrow`, are made of these.
    KNOWN = frozenset(
        "_reshape_alias _unsafe_view alias as_strided cat clone copy_ detach diagonal empty empty_like empty_strided "
        "expand flip new_empty new_empty_strided permute roll select slice split split_with_sizes squeeze stack t "
        "transpose unbind unfold unsqueeze view".split()
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or name not in self.KNOWN:
            raise NotImplementedError(f"{func} is not known to only move values")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _calls_only_movements(layout: Layout) -> bool:
    """Run it both ways without values: what asks for one raises there, and so does what isn't known."""
    parts = [torch.empty(shape, dtype=torch.float64, device="meta") for shape in layout.stock_shapes]
    try:
        with _OnlyMovements():  # type: ignore[no-untyped-call]
            layout.separate(layout.fuse(parts))
    except Exception:  # of a user's code, whatever it raises on tensors without values
        return False
    return True


@torch.no_grad()
def _is_permutation(layout: Layout) -> bool:
    """Whether each value goes to a place of its own, and back: numbers say where a value was."""
    sizes = [torch.Size(shape).numel() for shape in layout.stock_shapes]
    numbers = torch.arange(sum(sizes), dtype=torch.float64)

    def whole(tensors: Any) -> torch.Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    parts = zip(torch.split(numbers, sizes), layout.stock_shapes, strict=True)
    fused = layout.fuse([part.reshape(shape).clone() for part, shape in parts])
    return torch.equal(whole(fused).sort().values, numbers) and torch.equal(whole(layout.separate(fused)), numbers)
