"""The parts of a shown value: tables, notes, trees and diffs, for any renderer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

#: The meaning of a text, for its colour. A text must be understood without its colour.
Tone = Literal["", "good", "bad", "warning", "changed", "dim", "name", "code", "made", "arrow"]
#: Characters that move the cursor, colour or reorder text, all but the newline and the tab.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
#: The length of a bar of the share 1.
_BAR = 20


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


def bar(share: float, tone: Tone) -> Cell:
    """Return a bar of a share of the whole, at most half as long again as the whole.

    >>> bar(0.25, "good")
    Cell(text='█████', tone='good')
    """
    return Cell("█" * round(_BAR * min(share, 1.5)), tone)


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


Part = Table | Notes | Code | Branch


def is_filled(part: Part) -> bool:
    """Whether a part has anything to show."""
    return bool(getattr(part, "rows", True))
