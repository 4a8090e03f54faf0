"""The question that only the stack can answer."""

from __future__ import annotations

import sys


def calling_module(depth: int) -> str:
    """The name of the module whose code calls: 1 is the caller of the function that asks, 2 is who called that."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))
