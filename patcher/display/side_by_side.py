"""A unified diff as lines side by side, with what changed within a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby, zip_longest
from typing import NamedTuple

_WORDS = re.compile(r"\w+|\s+|.")
#: How far to look for the line that another one became.
_AHEAD = 12

#: A line in pieces: (text, whether the other side has another there).
Line = tuple[tuple[str, bool], ...]


class Row(NamedTuple):
    """A line before and after; None where one side has none."""

    before: Line | None
    after: Line | None


def rows_of(diff: str) -> Iterator[Row | str]:
    """The rows of a unified diff, and where each run of lines is that it shows.

    >>> where, same, changed = rows_of("--- a\\n+++ b\\n@@ -1,2 +1,2 @@\\n y = 1\\n-x = up(y)\\n+x = down(y)")
    >>> where, same == Row(before=(("y = 1", False),), after=(("y = 1", False),))
    ('@@ -1,2 +1,2 @@', True)
    >>> changed.after
    (('x = ', False), ('down', True), ('(y)', False))
    """
    for changed, lines in groupby(diff.splitlines()[2:], lambda line: line[:1] in ("-", "+")):
        if changed:
            found = list(lines)
            yield from _paired([line[1:] for line in found if line[0] == "-"], [line[1:] for line in found if line[0] == "+"])
        else:
            for line in lines:
                same: Line = ((line[1:], False),)
                yield line if line.startswith("@@") else Row(same, same)


def _paired(removed: Sequence[str], added: Sequence[str]) -> Iterator[Row]:
    """Each line beside the one that it became; those between are all new, or gone."""
    old = new = 0
    for place, line in enumerate(removed):
        ahead = range(new, min(new + _AHEAD, len(added)))
        best = max(ahead, key=lambda other: _likeness(line, added[other]), default=new)
        if ahead and _likeness(line, added[best]) > 0.5:
            yield from _apart(removed[old:place], added[new:best])
            yield _marked(line, added[best])
            old, new = place + 1, best + 1
    yield from _apart(removed[old:], added[new:])


def _apart(removed: Sequence[str], added: Sequence[str]) -> Iterator[Row]:
    for before, after in zip_longest(removed, added):
        yield Row(*(None if line is None else ((line, True),) for line in (before, after)))


def _likeness(one: str, other: str) -> float:
    mine, theirs = set(_WORDS.findall(one)), set(_WORDS.findall(other))
    return len(mine & theirs) / max(len(mine), len(theirs), 1)


def _marked(before: str, after: str) -> Row:
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    sides: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    for kind, old_from, old_to, new_from, new_to in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for side, words in zip(sides, (old[old_from:old_to], new[new_from:new_to]), strict=True):
            if words:
                side.append(("".join(words), kind != "equal"))
    return Row(tuple(sides[0]), tuple(sides[1]))
