"""A diff that is exact to the byte: with one text it gives the other."""

from __future__ import annotations

import io
import re

from hypothesis import example, given, settings, strategies as st

from patcher.source.texts import diff_of

NEWLINES = st.sampled_from(["\n", "\r\n", "\r", "\x0c", "\u2028", ""])
LINES = st.sampled_from(["", "x", "y", "-- x", "++ x", "\\ No newline at end of file", " ", "@@ -1 +1 @@", "é"])
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
TEXTS = st.lists(st.tuples(LINES, NEWLINES).map("".join), max_size=25).map("".join)


def lines_of(text: str) -> list[str]:
    """Lines with their ends, as git has them."""
    return io.StringIO(text, newline="\n").readlines()


def reversed_diff(diff: str, new: str) -> str:
    """The text that a unified diff leads from, given the one that it leads to."""
    rows: list[str] = []
    for row in lines_of(diff):
        if row.startswith("\\"):  # no newline at the end of the file, said of the line above
            rows[-1] = rows[-1].removesuffix("\n")
        else:
            rows.append(row)
    lines, old, position = lines_of(new), list[str](), 0
    rest = iter(rows[2:])
    for head in rest:
        match = HUNK.match(head)
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


@settings(max_examples=300, deadline=None)
@given(old=TEXTS, new=TEXTS)
@example(old="", new="x")
@example(old="x", new="")
@example(old="x\n" * 20, new="x\n" * 9 + "y")
def test_a_diff_and_one_text_give_the_other(old: str, new: str) -> None:
    diff = diff_of(old, new, "a", "b")
    assert reversed_diff(diff, new) == old
    assert (diff == "") == (old == new)
