"""Cases of which CI runs a few, and all of which are run at night."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def thinned(cases: Mapping[str, Any], step: int) -> list[Any]:
    """Arguments for `pytest.mark.parametrize`: by their names, and one of so many runs in CI."""
    marks = [() if number % step == 0 else pytest.mark.nightly for number in range(len(cases))]
    return [pytest.param(case, id=name, marks=mark) for (name, case), mark in zip(cases.items(), marks, strict=True)]


def sampled(cases: Iterable[Any], ci: Collection[str]) -> list[Any]:
    """Arguments for `pytest.mark.parametrize`, marked `nightly` but for those that CI runs.

    Args:
        cases: strings or paths.
        ci: the cases, or the stems of the paths, that CI runs.
    """
    cases = list(cases)
    names = [str(getattr(case, "stem", case)) for case in cases]
    assert set(ci) < set(names), set(ci) - set(names)
    marked = [() if name in ci else pytest.mark.nightly for name in names]
    return [pytest.param(case, id=name, marks=mark) for case, name, mark in zip(cases, names, marked, strict=True)]
