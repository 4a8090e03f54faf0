"""Unified diffs of texts, and back."""

from __future__ import annotations

import difflib
import io
import re

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def lines_of_text(text: str) -> list[str]:
    """Lines with their ends, as git has them: only `\\n` ends one."""
    return io.StringIO(text, newline="\n").readlines()


def exact_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff that keeps every character, as `git apply` takes it: either text follows from the other."""
    lines = difflib.unified_diff(lines_of_text(old), lines_of_text(new), old_name, new_name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def diff_of(old: str, new: str, old_name: str, new_name: str, context: int = 3) -> str:
    """A unified diff of two texts, empty where all lines are the same."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=context)
    return "".join(f"{line}\n" for line in lines)


def reversed_diff(diff: str, new: str) -> str:
    """The text that a unified diff leads from, given the one that it leads to.

    >>> reversed_diff(exact_diff("one\\ntwo", "one\\n2\\n", "a", "b"), "one\\n2\\n")
    'one\\ntwo'

    Raises:
        ValueError: the two don't fit together.
    """
    rows: list[str] = []
    for row in lines_of_text(diff):
        if row.startswith("\\"):  # no newline at the end of the file, said of the line above
            rows[-1] = rows[-1].removesuffix("\n")
        else:
            rows.append(row)
    lines, old, position = lines_of_text(new), list[str](), 0
    rest = iter(rows[2:])
    for head in rest:
        match = _HUNK.match(head)
        if match is None:
            raise ValueError(f"no hunk: {head!r}")
        left, begin, right = int(match[1] or 1), int(match[2]), int(match[3] or 1)
        begin -= 1 if right else 0
        if not position <= begin <= len(lines):
            raise ValueError(f"a hunk out of order: {head!r}")
        old += lines[position:begin]
        position = begin
        while left > 0 or right > 0:
            row = next(rest, "")
            sign, line = row[:1], row[1:]
            if sign not in (" ", "+", "-") or (sign != "-" and lines[position : position + 1] != [line]):
                raise ValueError(f"the text has no such line: {row!r}")
            if sign != "-":
                position, right = position + 1, right - 1
            if sign != "+":
                old.append(line)
                left -= 1
    return "".join([*old, *lines[position:]])
