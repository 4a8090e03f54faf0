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


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Mark `nightly` what CI leaves out of tests that are marked `crossed`.

    Of the combinations of their parameters CI runs as many as it takes to have each value once.
    """
    functions: dict[Any, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("crossed"):
            functions.setdefault(getattr(item, "function", None), []).append(item)
    for group in functions.values():
        cases = [item.callspec._idlist for item in group]  # one name for each `parametrize`
        axes = [list(dict.fromkeys(names)) for names in zip(*cases, strict=True)]
        ci = [[axis[number % len(axis)] for axis in axes] for number in range(max(map(len, axes)))]
        for item, case in zip(group, cases, strict=True):
            if case not in ci:
                item.add_marker("nightly")
