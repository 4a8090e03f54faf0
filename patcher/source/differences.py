"""Unified diffs of texts."""

from __future__ import annotations

import difflib
import io


def diff_of(old: str, new: str, old_name: str, new_name: str, context: int = 3) -> str:
    """A unified diff that keeps every character, as `git apply` takes it; empty where the texts are the same.

    >>> print(diff_of("one\\ntwo", "one\\n2\\n", "a", "b"), end="")
    --- a
    +++ b
    @@ -1,2 +1,2 @@
     one
    -two
    \\ No newline at end of file
    +2
    """
    before, after = (io.StringIO(text, newline="\n").readlines() for text in (old, new))
    lines = difflib.unified_diff(before, after, old_name, new_name, n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
