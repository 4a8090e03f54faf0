"""A unified diff as lines side by side, with what changed within a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby, product, zip_longest
from typing import NamedTuple

_WORDS = re.compile(r"\w+|\s+|.")
_NAMES = re.compile(r"\w+")
#: Of more pairs of lines none is looked at: what has changed that much is another text.
_MOST = 40_000

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
            removed, added = ([line[1:] for line in found if line[0] == sign] for sign in "-+")
            yield from _paired(removed, added)
        else:
            for line in lines:
                same: Line = ((line[1:], False),)
                yield line if line.startswith("@@") else Row(same, same)


def _paired(removed: Sequence[str], added: Sequence[str]) -> Iterator[Row]:
    """Each line beside the one that it became; those between are all new, or gone."""
    old = new = 0
    for before, after in _alike(removed, added):
        yield from _apart(removed[old:before], added[new:after])
        yield _marked(removed[before], added[after])
        old, new = before + 1, after + 1
    yield from _apart(removed[old:], added[new:])


def _alike(removed: Sequence[str], added: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Which lines became which: those that have most words in common altogether, in one order on both sides."""
    if len(removed) * len(added) > _MOST:
        return
    words = [[set(_NAMES.findall(line)) for line in lines] for lines in (removed, added)]
    best = [[0.0] * (len(added) + 1) for _ in range(len(removed) + 1)]  # of the lines from there on
    for old, new in product(reversed(range(len(removed))), reversed(range(len(added)))):
        best[old][new] = max(best[old + 1][new], best[old][new + 1])
        if (likeness := _likeness(words[0][old], words[1][new])) >= 0.5:
            best[old][new] = max(best[old][new], likeness + best[old + 1][new + 1])
    old = new = 0
    while old < len(removed) and new < len(added):
        if best[old][new] == best[old + 1][new]:
            old += 1
        elif best[old][new] == best[old][new + 1]:
            new += 1
        else:
            yield old, new
            old, new = old + 1, new + 1


def _apart(removed: Sequence[str], added: Sequence[str]) -> Iterator[Row]:
    for before, after in zip_longest(removed, added):
        yield Row(*(None if line is None else ((line, True),) for line in (before, after)))


def _likeness(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(len(one), len(other), 1)


def _marked(before: str, after: str) -> Row:
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    sides: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    for kind, old_from, old_to, new_from, new_to in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for side, words in zip(sides, (old[old_from:old_to], new[new_from:new_to]), strict=True):
            if words:
                side.append(("".join(words), kind != "equal"))
    return Row(tuple(sides[0]), tuple(sides[1]))
