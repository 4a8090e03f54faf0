"""What a cell says, and the comparison that decides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
    outcome = EXACT
    for name, one, other in _pairs("", found, expected):
        assert one.shape == other.shape, f"{name}: {tuple(one.shape)} for {tuple(other.shape)}"
        assert one.dtype == other.dtype, f"{name}: {one.dtype} for {other.dtype}"
        if not torch.equal(one, other):
            torch.testing.assert_close(
                one, other, atol=rounding, rtol=rounding, msg=lambda text, at=name: f"{at}: {text}"
            )
            outcome = ROUNDING
    return outcome


def worst(*outcomes: str) -> str:
    """Of several comparisons the one that says least."""
    order = (EXACT, ROUNDING, WITHIN_QUANTIZATION)
    return max(outcomes, key=order.index)


def _pairs(name: str, found: Any, expected: Any) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    if isinstance(expected, torch.Tensor):
        return [(name, found, expected)]
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{name}: {list(found)} for {list(expected)}"
        return [pair for key in expected for pair in _pairs(f"{name}.{key}", found[key], expected[key])]
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{name}: {len(found)} for {len(expected)}"
        return [
            pair
            for number, (one, other) in enumerate(zip(found, expected, strict=True))
            for pair in _pairs(f"{name}.{number}", one, other)
        ]
    assert found == expected, f"{name}: {found!r} for {expected!r}"
    return []
