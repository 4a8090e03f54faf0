"""The parts of a shown value, whatever shows it: tables, notes, bars, code before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from patcher.display.tree import ModuleNode

#: What something means, for its colour; the text says it too.
Tone = Literal["", "good", "bad", "warning", "changed", "dim"]


class Cell(NamedTuple):
    """An emphasized text."""

    text: str
    tone: Tone = ""


class Table(NamedTuple):
    """One titled table: the heads of its columns, and its rows; a page folds one that is long."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str | Cell, ...]]
    is_long: bool = False


class Notes(NamedTuple):
    """Texts of one or more lines under a title."""

    title: str
    texts: Sequence[str]
    tone: Tone


class Bar(NamedTuple):
    """One number of a chart with its label and a note; `inside` of the one before it that isn't.

    Where it is a share, `text` is the number as text, and `tone` what it means.
    """

    label: str
    value: float
    inside: bool = False
    note: str = ""
    text: str = ""
    tone: Tone = ""


class Chart(NamedTuple):
    """Numbers as bars, on a scale of powers of ten: from a ten-thousandth of what is allowed. Or shares of something,
    from zero on.

    >>> chart = Chart("", [Bar("a", 1e-7), Bar("b", 0.1)], allowed=1e-5)
    >>> [round(chart.share(bar.value), 2) for bar in chart.bars], round(chart.share(chart.allowed), 2)
    ([0.22, 0.89], 0.44)
    """

    title: str
    bars: Sequence[Bar]
    allowed: float
    is_share: bool = False

    @property
    def mark(self) -> str:
        """The text at the mark."""
        return "stock" if self.is_share else f"{self.allowed:.2g} allowed"

    def number(self, bar: Bar) -> str:
        """A value as text."""
        return bar.text or (f"{bar.value:.2g}" if bar.value else "the same")

    def share(self, value: float) -> float:
        """How much of the whole length the bar of a value has."""
        if self.is_share:
            return min(1.0, value / max(2 * self.allowed, *(bar.value for bar in self.bars)))
        low, high = math.log10(self.allowed) - 4, max(0.0, math.log10(self.allowed) + 2)
        if not math.isfinite(value):
            return 1.0
        return min(1.0, max(0.0, (math.log10(value) - low) / (high - low))) if value > 0 else 0.0

    def tone(self, bar: Bar) -> Tone:
        """Whether that much is allowed."""
        if self.is_share:
            return bar.tone
        return "good" if bar.value <= self.allowed else "bad"  # nan is not


class Code(NamedTuple):
    """Code before and after: where it is, what it was and became, and the unified diff."""

    where: str
    was: str
    becomes: str
    diff: str


Part = Table | Notes | Chart | Code | ModuleNode


def is_filled(part: Part) -> bool:
    """Whether there is anything to show."""
    contents: dict[type, Any] = {Table: "rows", Notes: "texts", Chart: "bars"}
    return type(part) not in contents or bool(getattr(part, contents[type(part)]))
