"""Texts of strangers made harmless to look at: names of classes, keys of checkpoints, names of files."""

from __future__ import annotations

import re

# What moves the cursor, colours or reorders text; a new line and a tab don't.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""A text with its control characters written out, which could hide what it says.

    >>> visible("weight\x1b[2K\u202e")
    'weight\\x1b[2K\\u202e'
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
