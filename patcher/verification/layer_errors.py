"""Where an error begins: how far what each layer gives is from what it gives in stock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from patcher.patterns import inside, is_number
from patcher.verification.numerics import CallGap


class LayerErrors(NamedTuple):
    """How far what each layer gives is from what it gives in stock, on one input.

    Attributes:
        inputs: what went in.
        allowed: the error that is allowed, as a part of the magnitude of what stock gives, or of 1 where that is less.
        errors: (path, error) of each layer, and of what is before, between and after them, in the order of the calls;
            of the layer where the error begins what is in it too.
        begins: the module where it begins, None where all is as it should be.
    """

    inputs: str
    allowed: float
    errors: tuple[tuple[str, float], ...]
    begins: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {**self._asdict(), "errors": dict(self.errors)}


def layer_errors(gaps: Iterable[CallGap], inputs: str, allowed: float, begins: str | None = None) -> LayerErrors:
    """Of a run of both models.

    >>> from patcher.verification.numerics import Difference
    >>> gap = Difference(1e-3, 1e-3, 1.0)
    >>> called = "embed", "layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1", ""
    >>> gaps = [CallGap(path, gap, gap) for path in called]
    >>> [path for path, _ in layer_errors(gaps, "a row", 1e-5, begins="layers.1.mlp").errors]
    ['embed', 'layers.0', 'layers.1', 'layers.1.mlp']
    """
    worst: dict[str, float] = {}
    for path, _, after in gaps:
        if not math.isinf(after.absolute) or after.scale:  # else it gives something else, which may be what is meant
            error = math.inf if math.isnan(after.share) else after.share
            worst[path] = max(error, worst.get(path, 0.0))
    rows: list[str] = []
    for path in _layers(list(worst)):
        rows.append(path)
        if begins is not None and begins.startswith(inside(path)) and path:
            rows += [each for each in worst if each.rpartition(".")[0] == path]
    return LayerErrors(inputs, allowed, tuple((path, worst[path]) for path in rows), begins)


def _layers(paths: Sequence[str]) -> list[str]:
    """The outermost numbered modules, and of the others the outermost that have none of these in them."""
    numbered = {path for path in paths if is_number(path.rpartition(".")[2]) and _numbers(path) == 1}
    around = {path[:place] for path in numbered for place, letter in enumerate(path) if letter == "."} | {""}
    others = [path for path in paths if path not in around and not _numbers(path)]
    outermost = {path for path in others if not any(path.startswith(inside(other)) for other in others)}
    return [path for path in paths if path in numbered or path in outermost]


def _numbers(path: str) -> int:
    return sum(map(is_number, path.split(".")))
