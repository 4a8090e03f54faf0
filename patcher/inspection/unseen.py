"""What no load can see: names and shapes fit, and the values may be in another order all the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from patcher.display.parts import Table
from patcher.loading.findings import folded
from patcher.loading.routes import Route

#: What may be otherwise, and the parameters of which that is so.
Unseen = tuple[tuple[str, tuple[str, ...]], ...]

_ORDER = "the order of tensors of one shape"
_TRANSPOSED = "whether a square weight is transposed"


def unseen(
    routes: Iterable[Route],
    *,
    replaced: Collection[str],
    tensors: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> Unseen:
    """The parameters whose values may be in another order than their module has them, without a shape that says so.

    Only of replaced modules and conversions of a patcher: fusions know the order of what they join.

    Args:
        routes: those of the load.
        replaced: the paths of the replaced modules.
        tensors: those of the checkpoint, by key; one that isn't in it has any shape.
        parameters: those of the model, by name.
    """
    found: dict[str, list[str]] = {_ORDER: [], _TRANSPOSED: []}
    for route in routes:
        names = route.parameters
        if not route.by and not any(path in replaced for name in names for path in _paths_around(name)):
            continue
        if _alike(route.keys, tensors) or _alike(names, parameters):
            found[_ORDER] += names
        found[_TRANSPOSED] += (name for name in names if _is_square(parameters.get(name)))
    return tuple((what, tuple(folded(names))) for what, names in found.items() if names)


def table_of(found: Unseen) -> Table:
    """What a plan shows of it."""
    rows = [(what, ", ".join(names), "patcher.verify(model, patcher)") for what, names in found]
    return Table("Not seen by a load", ("what", "parameters", "seen by"), rows)


def _paths_around(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _alike(names: tuple[str, ...], tensors: Mapping[str, Any]) -> bool:
    """Whether two of several tensors have one shape."""
    shapes = [tuple(tensors[name].shape) if name in tensors else None for name in names]
    return len(set(shapes)) < len(shapes)


def _is_square(parameter: Any) -> bool:
    """Whether a matrix, or each of a stack of them, fits when it is transposed."""
    shape: tuple[int, ...] = () if parameter is None else parameter.shape
    return len(shape) in (2, 3) and shape[-1] == shape[-2] > 1
