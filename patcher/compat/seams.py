"""Seams: functions of other libraries that functions of this package are called in place of.

    @seam("transformers.modeling_utils:PreTrainedModel.post_init")
    def post_init(stock, self):
        ...
        stock(self)

A seam is declared once, beside the function: where it is, and the parameters that the function relies on. It is
checked when it is installed, so that a release without it is named in one sentence instead of loading wrong weights.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from patcher.errors import PatcherError, unknown_release
from patcher.source.importing import is_imported, when_imported

F = TypeVar("F", bound=Callable[..., Any])

#: What a seam was before: the first argument of the function that is called in its place.
Stock = Callable[..., Any]


@dataclass(frozen=True)
class Seam:
    """One place in another library.

    Attributes:
        place: `module:name`, or `module:Class.name`.
        parameters: those that it must have.
        function: is called in its place, with the original as its first argument.
        follow: whether modules that have imported it by name get the new function as well.
    """

    place: str
    parameters: tuple[str, ...]
    function: Callable[..., Any]
    follow: bool = False

    @property
    def module(self) -> str:
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        """What it is called in messages: `PreTrainedModel.post_init`."""
        return self.place.partition(":")[2]

    def find(self) -> tuple[Any, str]:
        """Its owner, and its name there.

        Raises:
            PatcherError: it is gone, or lacks one of the parameters; the message names the release of the library.
        """
        *path, name = self.name.split(".")
        owner: Any = sys.modules[self.module]
        for part in path:
            owner = getattr(owner, part, None)
        require(owner, name, self.parameters, self.place.replace(":", "."))
        return owner, name

    def install(self) -> None:
        """Have the function called in its place."""
        owner, name = self.find()
        stock = inspect.getattr_static(owner, name)
        function = stock.__func__ if isinstance(stock, classmethod | staticmethod) else stock
        wrapped = functools.wraps(function)(_bound(self.function, function))
        setattr(owner, name, wrapped if function is stock else type(stock)(wrapped))
        for each in list(sys.modules.values()) if self.follow else ():
            if getattr(each, "__dict__", {}).get(name) is stock:
                setattr(each, name, wrapped)


_seams: dict[Callable[..., Any], Seam] = {}
_installed: set[Seam] = set()
_awaited: set[Seam] = set()


def seam(place: str, *parameters: str, follow: bool = False) -> Callable[[F], F]:
    """Declare that a function is called in the place of another one: see `Seam`."""

    def declared(function: F) -> F:
        _seams[function] = Seam(place, parameters, function, follow)
        return function

    return declared


def seams_in(*modules: str) -> tuple[Seam, ...]:
    """The seams that functions of some modules were declared for."""
    return tuple(each for function, each in _seams.items() if function.__module__ in modules)


def install(seams: Iterable[Seam]) -> None:
    """Install seams, all or none of those whose modules are imported, and the others as soon as theirs are.

    Raises:
        PatcherError: one is gone.
    """
    ready = [each for each in seams if each not in _installed and is_imported(each.module)]
    for each in ready:
        each.find()
    for each in ready:
        each.install()
        _installed.add(each)
    for each in set(seams) - _installed - _awaited:
        _awaited.add(each)
        when_imported(each.module, lambda _, own=each: install((own,)))  # type: ignore[misc]


def require(owner: Any, name: str, parameters: Iterable[str], place: str = "") -> None:
    """Raise a `PatcherError` where something of a library isn't as this package knows it."""
    place = place or f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    found = getattr(owner, name, None)
    if found is None:
        raise unknown_release(place.partition(".")[0], f"{place} is gone")
    known = inspect.signature(found).parameters if parameters else {}
    if missing := [each for each in parameters if each not in known]:
        raise unknown_release(place.partition(".")[0], f"{place} has no parameter {', '.join(missing)}")


def not_called(name: str) -> PatcherError:
    """The error for a seam of transformers that is there, and that it hasn't called: `PreTrainedModel.post_init`."""
    return unknown_release("transformers", f"{name} is not called where a model is loaded, or saved")


def _bound(function: Callable[..., Any], stock: Stock) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    return hooked
