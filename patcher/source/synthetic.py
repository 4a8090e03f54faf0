"""Modules made of text, whose source `inspect.getsource` and tracebacks show."""

from __future__ import annotations

import linecache
import sys
from types import ModuleType


def module_of_text(name: str, text: str, file: str) -> ModuleType:
    """A module in `sys.modules` that has a source and has not been run.

    >>> import inspect
    >>> module = module_of_text("made_up", "x = 1\\n", "<made up>")
    >>> exec(inspect.getsource(module), vars(module))
    >>> module.x
    1
    """
    module = ModuleType(name)
    module.__file__, module.__package__ = file, name.rpartition(".")[0]
    # Without a time of change linecache keeps it for good.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[name] = module
    return module
