"""Import hooks: callbacks after a module is imported, and modules of a project imported from their source."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

#: Modules that were executed, whose watchers may still be running.
_executed: set[str] = set()


def is_imported(name: str) -> bool:
    """Whether a module is imported completely."""
    return sys.modules.get(name) is not None and not is_being_imported(name)


def is_being_imported(name: str) -> bool:
    """Whether a module is imported in part."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name not in _executed and bool(getattr(spec, "_initializing", False))


def when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call a function with a module as soon as it is imported, or immediately if it already is.

    If several threads import at the same time, it may be called twice. They may hold the locks of modules that they
    import, so it must not wait for a lock that is held during an import.
    """

    def once(module: ModuleType) -> None:
        call(module)
        watcher.end()

    watcher = Watcher(name, lambda imported: imported == name, once)
    if not is_imported(name):
        watcher.begin()
    if is_imported(name):  # before, or by another thread that may not have seen the watcher
        watcher.end()
        call(sys.modules[name])


def after_imports_of(name: str, is_watched: Callable[[str], bool], call: Callable[[], bool]) -> None:
    """Call a function after each import of a watched module, until it returns True.

    Args:
        name: the name of the watcher.
        is_watched: whether the module of a name is watched.
        call: returns False if it can't run yet, because modules that it needs are still being imported.
    """

    def again(module: ModuleType) -> None:
        if call():
            watcher.end()

    watcher = Watcher(name, is_watched, again)
    if not call():
        watcher.begin()


class Watcher(importlib.abc.MetaPathFinder):
    """Finds modules as the finders after it do, and calls a function once one is executed, until `end`."""

    def __init__(self, name: str, is_watched: Callable[[str], bool], call: Callable[[ModuleType], object]) -> None:
        self.name, self.is_watched, self.call = name, is_watched, call

    def begin(self) -> None:
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.is_watched(name) or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # others may watch this module as well
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
        # All watchers, as some may have been added since the module was found.
        for finder in reversed(sys.meta_path.copy()):
            if isinstance(finder, Watcher) and finder.is_watched(module.__name__) and finder in sys.meta_path:
                finder.call(module)


# --- from source ----------------------------------------------------------------------------------------------------
#
# Python validates bytecode by the modification time and size of a file: if a file is rewritten within a second, stale
# bytecode is run. So modules of a project are always compiled, and no bytecode is written into its folders.

#: Folders of installed packages, and packages that may be in a folder of a project but aren't part of it.
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = {"patcher", "torch", "transformers", *sys.stdlib_module_names}


class TextLoader(SourceFileLoader):
    """Executes the source of a file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


@contextlib.contextmanager
def imported_from_text(*folders: Path) -> Iterator[None]:
    """Import modules in the folders from their source inside this block. Installed packages use their bytecode."""
    finder = _Finder(folders)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder.resolve() for folder in folders]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in _LIBRARIES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        file = Path(spec.loader.path).resolve()
        if _INSTALLED.intersection(file.parts) or not any(map(file.is_relative_to, self.folders)):
            return None
        spec.loader = TextLoader(name, spec.loader.path)
        return spec
