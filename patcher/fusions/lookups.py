"""The lookups of an analysis beyond its source: the result is valid as long as they give the same objects."""

from __future__ import annotations

import builtins
import inspect
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

#: (owner, name) -> the object
Lookup = Callable[[Any, str], Any]


class Lookups(threading.local):
    """A recorder for the lookups of the analysis that runs in this thread."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[Lookup, int, str], tuple[Any, Any]] | None = None

    def begin(self) -> None:
        self._recorded = {}

    def end(self) -> tuple[tuple[Lookup, Any, str, Any], ...]:
        recorded, self._recorded = self._recorded or {}, None
        return tuple((lookup, owner, name, result) for (lookup, _, name), (owner, result) in recorded.items())

    def get(self, lookup: Lookup, owner: Any, name: str) -> Any:
        """Return `lookup(owner, name)`, which is recorded."""
        result = lookup(owner, name)
        if self._recorded is not None:
            self._recorded[lookup, id(owner), name] = owner, result
        return result


lookups = Lookups()


def are_unchanged(recorded: tuple[tuple[Lookup, Any, str, Any], ...]) -> bool:
    """Whether all recorded lookups give the same objects still."""
    return all(lookup(owner, name) is result for lookup, owner, name, result in recorded)


def member(cls: type, name: str) -> Any:
    """Return a member of a class without running a descriptor; None if there is none."""
    return inspect.getattr_static(cls, name, None)


def code_of(function: FunctionType, name: str) -> CodeType:
    return function.__code__


def in_namespace(namespace: Mapping[str, Any], name: str) -> Any:
    """Return a global or builtin; `...` if there is none."""
    return namespace.get(name, getattr(builtins, name, ...))


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a Python module or a class; `...` if there is none."""
    return getattr(owner, name, ...)
