"""The parts of a shown value, whatever shows it: tables, notes, bars, trees, code before and after."""

from __future__ import annotations

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
    """One number of a chart with its label, the number as text, and what it means; `inside` of the one before it that
    isn't."""

    label: str
    value: float
    text: str
    tone: Tone = ""
    inside: bool = False


class Chart(NamedTuple):
    """Numbers as bars, beside one that is the measure of all.

    >>> chart = Chart("", [Bar("a", 0.5, "half"), Bar("b", 3.0, "thrice")], mark="stock")
    >>> [round(chart.share(bar.value), 2) for bar in chart.rows], round(chart.share(1.0), 2)
    ([0.17, 1.0], 0.33)
    """

    title: str
    rows: Sequence[Bar]
    mark: str

    def share(self, value: float) -> float:
        """How much of the whole length the bar of a value has, where that of the measure is 1."""
        return value / max(2.0, *(bar.value for bar in self.rows))


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
