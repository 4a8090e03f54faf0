"""Modules of a project, imported from their text.

Python goes by the time and the size of a file: of one that is rewritten within a second it runs the bytecode of the
former text. So what a project says is compiled whenever it is read, and no bytecode is written into its folders.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

#: folders of installed packages, and packages that may be installed from a checkout, but aren't part of a project
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = {"patcher", "torch", "transformers"}


class TextLoader(SourceFileLoader):
    """Executes the text of a file, which it keeps."""

    text = b""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        self.text = self.get_data(path)
        code: CodeType = self.source_to_code(self.text, path)
        return code


def is_current(module: ModuleType | None) -> bool:
    """Whether a module was made of the text that its file has now."""
    loader = getattr(module, "__loader__", None)
    if not isinstance(loader, TextLoader) or not Path(loader.path).is_file():
        return False
    return loader.text == Path(loader.path).read_bytes()


@contextlib.contextmanager
def imported_from_text(*folders: Path) -> Iterator[None]:
    """Import what is below the folders from its text, in this block. Installed packages have their bytecode."""
    finder = _Finder(folders)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder.resolve() for folder in folders]
        self.standard = Path(os.__file__).resolve().parent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in _LIBRARIES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        file = Path(spec.loader.path).resolve()
        if _INSTALLED.intersection(file.parts) or file.is_relative_to(self.standard):
            return None
        if not any(file.is_relative_to(folder) for folder in self.folders):
            return None
        spec.loader = TextLoader(name, spec.loader.path)
        return spec
