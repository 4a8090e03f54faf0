"""What an analysis of source has looked at beyond the source: its answer holds as long as all of it is what it was."""

from __future__ import annotations

import builtins
import inspect
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

#: Finds something in an owner by its name.
Look = Callable[[Any, str], Any]


class Looks(threading.local):
    """What the analysis that runs in this thread has looked at, each thing once."""

    def __init__(self) -> None:
        self._noted: dict[tuple[Look, int, str], tuple[Any, Any]] | None = None

    def begin(self) -> None:
        self._noted = {}

    def end(self) -> tuple[tuple[Look, Any, str, Any], ...]:
        noted, self._noted = self._noted or {}, None
        return tuple((look, owner, name, found) for (look, _, name), (owner, found) in noted.items())

    def at(self, look: Look, owner: Any, name: str) -> Any:
        """What `look(owner, name)` finds, which is noted."""
        found = look(owner, name)
        if self._noted is not None:
            self._noted[look, id(owner), name] = owner, found
        return found


looks = Looks()


def still_found(noted: tuple[tuple[Look, Any, str, Any], ...]) -> bool:
    """Whether all that was looked at is there still."""
    return all(look(owner, name) is before for look, owner, name, before in noted)


def member(cls: type, name: str) -> Any:
    """What a class has under a name, without running anything; None if it has nothing."""
    return inspect.getattr_static(cls, name, None)


def code_of(function: FunctionType, name: str) -> CodeType:
    return function.__code__


def in_namespace(namespace: Mapping[str, Any], name: str) -> Any:
    """What a global name means there; `...` if nothing."""
    return namespace.get(name, getattr(builtins, name, ...))


def attribute(owner: Any, name: str) -> Any:
    """What a module of Python or a class has under a name; `...` if nothing."""
    return getattr(owner, name, ...)
