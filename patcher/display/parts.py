"""The parts of a shown value: tables, notes, charts, trees and diffs, for any renderer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

#: The meaning of a text, for its colour. A text must be understood without its colour.
Tone = Literal["", "good", "bad", "warning", "changed", "dim", "name", "code", "made", "arrow"]
#: Characters that move the cursor, colour or reorder text, all but the newline and the tab.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def visible(text: str) -> str:
    r"""Return an untrusted text (names of classes, keys, files) with its control characters escaped.

    >>> visible("weight\x1b[2K\u202e")
    'weight\\x1b[2K\\u202e'
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Cell(NamedTuple):
    """A text with a tone."""

    text: str
    tone: Tone = ""


#: A line of plain and toned texts.
Line = Sequence[str | Cell]


class Branch(NamedTuple):
    """A line of a tree with notes and the branches below, which are folded unless it is open."""

    label: Line
    notes: Sequence[Line] = ()
    below: Sequence[Branch] = ()
    is_open: bool = False
    path: str = ""


class Table(NamedTuple):
    """A table with a title, the heads of its columns, and rows; a page folds it if it is long."""

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
    """A bar of a chart; an `inside` one belongs to the last bar before it that isn't.

    In a chart of shares, `text` is the formatted value, and `tone` its meaning.
    """

    label: str
    value: float
    inside: bool = False
    note: str = ""
    text: str = ""
    tone: Tone = ""


class Chart(NamedTuple):
    """Bars on a logarithmic scale that begins at a ten-thousandth of the allowed value, or shares from zero on.

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
        """The label of the allowed value."""
        return "stock" if self.is_share else f"{self.allowed:.2g} allowed"

    def number(self, bar: Bar) -> str:
        """Return the formatted value of a bar."""
        return bar.text or (f"{bar.value:.2g}" if bar.value else "the same")

    def share(self, value: float) -> float:
        """Return the length of the bar of a value, as a share of the full length."""
        if self.is_share:
            return min(1.0, value / max(2 * self.allowed, *(bar.value for bar in self.rows)))
        low, high = math.log10(self.allowed) - 4, max(0.0, math.log10(self.allowed) + 2)
        if not math.isfinite(value):
            return 1.0
        return min(1.0, max(0.0, (math.log10(value) - low) / (high - low))) if value > 0 else 0.0

    def tone(self, bar: Bar) -> Tone:
        """Return the tone of a bar: whether its value is allowed."""
        if self.is_share:
            return bar.tone
        return "good" if bar.value <= self.allowed else "bad"  # nan is bad


def blocks(share: float, length: int) -> str:
    """Return a bar of block characters.

    >>> blocks(0.3, 4)
    '█▎'
    """
    eighths = round(share * length * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).strip()


Part = Table | Notes | Chart | Code | Branch


def is_filled(part: Part) -> bool:
    """Whether a part has anything to show."""
    return bool(getattr(part, "rows", True))
