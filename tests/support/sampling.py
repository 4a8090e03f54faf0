"""Cases of which CI runs a few, and all of which are run at night."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
