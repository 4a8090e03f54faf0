"""The parts of a shown value, whatever shows it: tables, notes, bars, trees, code before and after."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

#: What a text means, for its colour, or that it is a name or an arrow; the text says it too.
Tone = Literal["", "good", "bad", "warning", "changed", "dim", "name", "code", "made", "arrow"]
# What moves the cursor, colours or reorders text; a new line and a tab don't.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def visible(text: str) -> str:
    r"""A text of a stranger (names of classes, keys, files) with its control characters written out.

    >>> visible("weight\x1b[2K\u202e")
    'weight\\x1b[2K\\u202e'
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Cell(NamedTuple):
    """An emphasized text."""

    text: str
    tone: Tone = ""


#: A line that consists of texts.
Line = Sequence[str | Cell]


class Branch(NamedTuple):
    """A line of a tree, the notes on it, and what is below, which is folded unless it is open."""

    label: Line
    notes: Sequence[Line] = ()
    below: Sequence[Branch] = ()
    is_open: bool = False
    path: str = ""


class Table(NamedTuple):
    """One titled table: the heads of its columns, and its rows; a page folds one that is long."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str | Cell, ...]]
    is_long: bool = False


class Notes(NamedTuple):
    """Texts of one or more lines under a title."""

    title: str
    rows: Sequence[str]
    tone: Tone


class Code(NamedTuple):
    """A unified diff, with comments above it."""

    text: str


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
    >>> [round(chart.share(bar.value), 2) for bar in chart.rows], round(chart.share(chart.allowed), 2)
    ([0.22, 0.89], 0.44)
    """

    title: str
    rows: Sequence[Bar]
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
            return min(1.0, value / max(2 * self.allowed, *(bar.value for bar in self.rows)))
        low, high = math.log10(self.allowed) - 4, max(0.0, math.log10(self.allowed) + 2)
        if not math.isfinite(value):
            return 1.0
        return min(1.0, max(0.0, (math.log10(value) - low) / (high - low))) if value > 0 else 0.0

    def tone(self, bar: Bar) -> Tone:
        """Whether that much is allowed."""
        if self.is_share:
            return bar.tone
        return "good" if bar.value <= self.allowed else "bad"  # nan is not


def blocks(share: float, length: int) -> str:
    """A bar of block characters.

    >>> blocks(0.3, 4)
    '█▎'
    """
    eighths = round(share * length * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).strip()


Part = Table | Notes | Chart | Code | Branch


def is_filled(part: Part) -> bool:
    """Whether there is anything to show."""
    return bool(getattr(part, "rows", True))
