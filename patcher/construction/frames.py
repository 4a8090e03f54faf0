"""The two questions that only the stack can answer."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn


def calling_module(depth: int) -> str:
    """The name of the module whose code calls: 1 is the caller of the function that asks, 2 is who called that."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def is_initializing(module: nn.Module) -> bool:
    """Whether the `__init__` of `module` is on the stack.

    It fails for an `__init__` that some wrapper calls under another name; such a class is initialised again by its
    own, which is found.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
        frame = frame.f_back
    return False
