"""What no load can see: names and shapes fit, and the values may be in another order all the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from patcher.loading.findings import folded
from patcher.loading.record import PatchRecord
from patcher.loading.routes import Route

#: What may be otherwise, and the parameters of which that is so.
Unseen = tuple[tuple[str, tuple[str, ...]], ...]

_ORDER = "the order of tensors of one shape"
_TRANSPOSED = "whether a square weight is transposed"


def unseen(
    routes: Iterable[Route], record: PatchRecord, *, tensors: Mapping[str, Any], parameters: Mapping[str, Any]
) -> Unseen:
    """The parameters whose values may be in another order than their module has them, without a shape that says so.

    Only of replaced modules and conversions of a patcher: fusions know the order of what they join.

    Args:
        routes: those of the load.
        record: what was put down of it.
        tensors: those of the checkpoint, by key; one that isn't in it has any shape.
        parameters: those of the model, by name.
    """
    replaced = {each.path for each in record.replaced}
    found: dict[str, list[str]] = {_ORDER: [], _TRANSPOSED: []}
    for route in routes:
        names = route.parameters
        around = (path for name in names for path in ("", *accumulate(name.split("."), "{}.{}".format)))
        if not route.by and replaced.isdisjoint(around):
            continue
        if _alike(route.keys, tensors) or _alike(names, parameters):
            found[_ORDER] += names
        shapes = ((name, tuple(parameters[name].shape)) for name in names if name in parameters)
        # A matrix, or each of a stack of them.
        found[_TRANSPOSED] += (name for name, shape in shapes if len(shape) in (2, 3) and shape[-1] == shape[-2] > 1)
    return tuple((what, tuple(folded(names))) for what, names in found.items() if names)


def _alike(names: tuple[str, ...], tensors: Mapping[str, Any]) -> bool:
    """Whether two of several tensors have one shape."""
    shapes = [tuple(tensors[name].shape) if name in tensors else None for name in names]
    return len(set(shapes)) < len(shapes)
