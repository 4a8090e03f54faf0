"""What a cell says, and the comparison that decides it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import patcher
from patcher.verification.passes import differences

EXACT = "exact"
ROUNDING = "within rounding"
WITHIN_QUANTIZATION = "within the quantizer's error"
NOT_APPLICABLE = "—"


def refused(error: BaseException) -> str:
    """The cell of a library that a patched model refuses to work with, by an error of ours."""
    return f"refused: `{type(error).__name__}`"


def compared(found: Any, expected: Any, *, rounding: float = 1e-5) -> str:
    """How near tensors are to those of stock: in dicts and lists, however deep.

    Args:
        rounding: the absolute difference that rounding explains, for values near 1; 0 where nothing computes.

    Raises:
        AssertionError: they differ by more, or are others.
    """
    one, other = (dict(_tensors("", each)) for each in (found, expected))
    assert list(one) == list(other)
    gap = differences(one, other)
    assert gap.within(rounding), gap
    return EXACT if gap.absolute == 0 else ROUNDING


def same_models(patched: Any, stock: Any, rounding: float = 1e-5) -> str:
    """How near two models are, on what `patcher.verify` runs first."""
    found = patcher.compare(stock, patched, stages="outputs", quick=True, tolerance=rounding)
    assert found.passed, str(found)
    return EXACT if found.figures("outputs")["max abs"] == 0 else ROUNDING


def worst(*outcomes: str) -> str:
    """Of several comparisons the one that says least."""
    order = (EXACT, ROUNDING, WITHIN_QUANTIZATION)
    return max(outcomes, key=order.index)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value by their places in it, and what else is in it as names that have to be the same."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(f"{name}.{key}", item)
    else:
        yield f"{name} = {value!r}", torch.empty(0)
