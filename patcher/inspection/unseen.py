"""Mistakes that no load can detect: names and shapes fit, but the values may be others, or in another order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from patcher.layouts.transforms import has_known_operations
from patcher.loading.findings import fold_names
from patcher.loading.record import PatchRecord
from patcher.loading.routes import Route
from patcher.patterns import parents

#: (what may be wrong, the parameters concerned)
Unseen = tuple[tuple[str, tuple[str, ...]], ...]

ORDER = "the order of tensors in conversions"
_TRANSPOSED = "whether a square weight is transposed"
_OPERATIONS = "the values of operations that transformers doesn't have"


def unseen(
    routes: Iterable[Route], record: PatchRecord, *, tensors: Mapping[str, Any], parameters: Mapping[str, Any]
) -> Unseen:
    """Return the parameters whose values may be others than their module expects, with the same shape.

    Only replaced modules and conversions of a patcher are checked: fusions define the order of what they join.

    Args:
        tensors: the tensors of the checkpoint, by key; a missing one may have any shape.
        parameters: the parameters of the model, by name.
    """
    replaced = {module.path for module in record.replaced}
    ambiguous: dict[str, list[str]] = {ORDER: [], _TRANSPOSED: [], _OPERATIONS: []}
    for route in routes:
        names = route.parameters
        ancestors = (path for name in names for path in (*parents(name), name))
        if not route.added and replaced.isdisjoint(ancestors):
            continue
        if _have_equal_shapes(route.keys, tensors) or _have_equal_shapes(names, parameters):
            ambiguous[ORDER] += names
        if not all(has_known_operations(added.transform) for added in route.added):
            ambiguous[_OPERATIONS] += names
        shapes = ((name, tuple(parameters[name].shape)) for name in names if name in parameters)
        square = (name for name, shape in shapes if len(shape) in (2, 3) and shape[-1] == shape[-2] > 1)
        ambiguous[_TRANSPOSED] += square  # matrices, or stacks of matrices
    return tuple((what, tuple(fold_names(names))) for what, names in ambiguous.items() if names)


def _have_equal_shapes(names: tuple[str, ...], tensors: Mapping[str, Any]) -> bool:
    """Whether at least two of several tensors have the same shape."""
    shapes = [tuple(tensors[name].shape) if name in tensors else None for name in names]
    return len(set(shapes)) < len(shapes)
