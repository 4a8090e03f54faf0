"""Something to do as soon as a module is imported, by whomever."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Modules that are imported, and whose watchers are being called.
_executed: set[str] = set()


def is_imported(name: str) -> bool:
    """Whether a module is there, and all of it."""
    return sys.modules.get(name) is not None and not is_being_imported(name)


def is_being_imported(name: str) -> bool:
    """Whether a module is there in part."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name not in _executed and bool(getattr(spec, "_initializing", False))


def when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call with a module as soon as it is imported: at once, if it is.

    Where threads import at once, it may be called twice, by two of them. They may hold locks of modules that they are
    importing, so a call waits for no lock that is held while anything is imported.
    """

    def once(module: ModuleType) -> None:
        call(module)
        watcher.end()

    watcher = Watcher(name, lambda each: each == name, once)
    if not is_imported(name):
        watcher.begin()
    if is_imported(name):  # before, or by another thread that may not have seen the watcher
        watcher.end()
        call(sys.modules[name])


def after_imports_of(name: str, is_meant: Callable[[str], bool], call: Callable[[], bool]) -> None:
    """Call after each import of a module that is watched, until the call says that it is done.

    Args:
        name: what the watcher is called.
        is_meant: whether it is a module of that name.
        call: does what is to be done, or can't yet, because modules that it needs are still being imported.
    """

    def again(module: ModuleType) -> None:
        if call():
            watcher.end()

    watcher = Watcher(name, is_meant, again)
    if not call():
        watcher.begin()


class Watcher(importlib.abc.MetaPathFinder):
    """Finds modules as the finders after it do, and calls when one has been executed; from its begin to its end."""

    def __init__(self, name: str, is_meant: Callable[[str], bool], call: Callable[[ModuleType], object]) -> None:
        self.name, self.is_meant, self.call = name, is_meant, call

    def begin(self) -> None:
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.is_meant(name) or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # there may be others for this module
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and not isinstance(spec.loader, _Loader):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self.loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _executed.add(module.__name__)
        # All of them, as some may have come since the module was found.
        for each in reversed(sys.meta_path.copy()):
            if isinstance(each, Watcher) and each.is_meant(module.__name__) and each in sys.meta_path:
                each.call(module)
