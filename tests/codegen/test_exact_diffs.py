"""A diff that is exact to the byte: with one text it gives the other."""

from __future__ import annotations

from hypothesis import example, given, settings, strategies as st

from patcher.source.differences import exact_diff, reversed_diff

NEWLINES = st.sampled_from(["\n", "\r\n", "\r", "\x0c", "\u2028", ""])
LINES = st.sampled_from(["", "x", "y", "-- x", "++ x", "\\ No newline at end of file", " ", "@@ -1 +1 @@", "é"])
TEXTS = st.lists(st.tuples(LINES, NEWLINES).map("".join), max_size=25).map("".join)


@settings(max_examples=300, deadline=None)
@given(old=TEXTS, new=TEXTS)
@example(old="", new="x")
@example(old="x", new="")
@example(old="x\n" * 20, new="x\n" * 9 + "y")
def test_a_diff_and_one_text_give_the_other(old: str, new: str) -> None:
    diff = exact_diff(old, new, "a", "b")
    assert reversed_diff(diff, new) == old
    assert (diff == "") == (old == new)


@settings(max_examples=200, deadline=None)
@given(old=TEXTS, new=TEXTS, other=TEXTS)
def test_a_diff_of_another_text_is_refused_or_touches_nothing_that_differs(old: str, new: str, other: str) -> None:
    diff = exact_diff(old, new, "a", "b")
    try:
        result = reversed_diff(diff, other)
    except ValueError:
        return
    # every line that the diff tells was there, so the way back is the same diff but for where its hunks are
    again = exact_diff(result, other, "a", "b")
    changed = [sorted(line for line in each.split("\n")[2:] if line[:1] in "+-") for each in (diff, again)]
    assert changed[0] == changed[1] or diff == "" or reversed_diff(again, other) == result
