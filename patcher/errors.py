"""Everything that patcher raises on its own behalf.

>>> from patcher import Patcher, PatcherError
>>> try:
...     Patcher(fusions="qkw")
... except PatcherError as error:
...     print(f"{type(error).__name__}: {error}")
InvalidPatcherError: fusions: 'qkw' isn't a fusion; did you mean 'qkv'? Known names: ...

```
PatcherError
├── InvalidPatcherError      an invalid Patcher, or an unsupported use of one
│   └── NoSuchNameError      a name that isn't there, or can't be set: an AttributeError as well
├── PatchConflictError       two patches that want different things of one class or module
├── UnmatchedPatchError      a key, filter, conversion or fusion that matched nothing
├── PatchConstructionError   a replacement could not be built
├── PatchedWeightsError      weights that are missing, left over, or can't be restored
├── VerificationError        the patched model is not the stock model
├── PresetDriftError         the code that a preset is pinned to has changed
└── CodegenError             a modeling file could not be generated
```

None of them derives from `OSError`, `ValueError`, `TypeError` or `RuntimeError`: `transformers.pipeline` catches those
and tries the next model class, which would turn one clear error into a list of unrelated ones. For the same reason the
registry of `patcher.monkey_patching`, which keeps the contract of the one it stands in for, raises built-in errors.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

__all__ = [
    "CodegenError",
    "InvalidPatcherError",
    "PatchConflictError",
    "PatchConstructionError",
    "PatchedWeightsError",
    "PatcherError",
    "PatcherWarning",
    "PresetDriftError",
    "UnmatchedPatchError",
    "VerificationError",
]


class PatcherError(Exception):
    """The root of the tree: `except PatcherError` catches all that this package raises."""


class InvalidPatcherError(PatcherError):
    """An invalid argument of a Patcher, or a combination that isn't supported."""


class NoSuchNameError(InvalidPatcherError, AttributeError):
    """A name that a module or a Patcher doesn't have, or that can't be set; `hasattr` is false as ever."""


class PatchConflictError(PatcherError):
    """Two patches ask for different replacements of one class, or claim one module."""


class UnmatchedPatchError(PatcherError):
    """A class key, a filter, a conversion or a fusion did nothing in this load."""


class PatchConstructionError(PatcherError):
    """A replacement could not be built; `__cause__` holds the error that it raised."""


class PatchedWeightsError(PatcherError):
    """Weights of a replaced module are missing or left over, or can't be saved in the original format."""


class VerificationError(PatcherError):
    """A patched model differs from the stock model."""


class PresetDriftError(PatcherError):
    """The code that a Patcher is pinned to is not the code that is installed."""


class CodegenError(PatcherError):
    """A modeling file could not be generated."""


class PatcherWarning(UserWarning):
    """What `strict=False` says in place of `UnmatchedPatchError` and `PatchedWeightsError`."""


def no_such_name(module: str, name: str, known: Iterable[str], where: str = "") -> NoSuchNameError:
    """What `__getattr__` of a module raises for a name that it doesn't have.

    Args:
        known: the names that it has.
        where: what lists them all.
    """
    by_folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.5)
    hint = f"write {module}.{by_folded[close[0]]}" if close else where and f"{where} lists what there is"
    return NoSuchNameError(f"module {module!r} has no attribute {name!r}{hint and f'; {hint}'}.")


def public_name(module: str, name: str) -> Any:
    """What a `__getattr__` gives from a module that is imported for it, now.

    Raises:
        PatcherError: a library lacks what the module needs of it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        # Of an attribute it is the module without it, of an import the name. What is not installed says so itself.
        owner = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", "")
        library = (owner or "").partition(".")[0]
        if isinstance(error, NoSuchNameError | ModuleNotFoundError) or library in ("", "patcher"):
            raise
        raise unknown_release(library, str(error)) from error


def unknown_release(library: str, what: str) -> PatcherError:
    """The error for a release of a library that lacks something, or does it otherwise."""
    release = importlib.import_module("importlib.metadata").version(library)  # late: it takes long to import
    return PatcherError(
        f"This release of patcher doesn't know {library} {release}: {what}. "
        f"Install a release of {library} that patcher's metadata lists, or a newer patcher."
    )


def warn(text: str) -> None:
    """Issue a `PatcherWarning` at the line of the user's code that called us, through transformers or not."""
    frame = calling_frame(("patcher.", "transformers.", "contextlib."))
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, PatcherWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
    )


def calling_frame(inside: tuple[str, ...]) -> FrameType:
    """The innermost frame that is not inside of some modules: prefixes of their names, each with a dot at its end."""
    frame = sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(inside):
        frame = frame.f_back
    return frame
