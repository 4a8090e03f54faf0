"""The source of a module, found without importing the module or its parent packages."""

from __future__ import annotations

import codecs
import difflib
import importlib.metadata
import importlib.util
import io
import tokenize
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from patcher.errors import CodegenError
from patcher.source.reading import Location


@dataclass(frozen=True)
class SourceModule:
    """The source of a module, as it is on disk.

    Attributes:
        name: the dotted name.
        package: the package that relative imports start from.
        path: the file.
        text: the source without a byte order mark; newlines are unchanged.
    """

    name: str
    package: str
    path: Path
    text: str

    @property
    def relative_path(self) -> str:
        """The path relative to the folder that the module is imported from, with forward slashes."""
        depth = len(self.name.split("."))
        parts = self.path.parts[-depth - 1 :] if self.path.name == "__init__.py" else self.path.parts[-depth:]
        return "/".join(parts)

    @property
    def version(self) -> str:
        """The top package with its version, "" if it isn't installed as a distribution."""
        package = self.name.split(".")[0]
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return ""


def find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module. Unlike `importlib.util.find_spec`, this imports no parent package."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # once transformers is imported, these are Path objects, which the finder ignores
        folders = [str(folder) for folder in spec.submodule_search_locations]
        spec = PathFinder.find_spec(part, folders)  # not by its dotted name, for which the finder imports the parents
    if spec is not None:
        spec.name = name
    return spec


def load(name: str, where: Location) -> SourceModule:
    """Return the source of a module; raises a CodegenError if the module or its Python source doesn't exist."""
    spec = find_spec(name)
    if spec is None:
        raise CodegenError(
            f"{where}: the source module {name!r} can't be found: {_missing_part(name)}. "
            "Correct the name, or install the package in this environment."
        )
    path = Path(spec.origin or "")
    if path.suffix != ".py" or not path.is_file():
        raise CodegenError(
            f"{where}: the source module {name!r} has no Python source: it is "
            f"{'compiled or built in' if spec.origin else 'a folder without __init__.py'}. "
            "Name the module that defines the classes."
        )
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return SourceModule(name, package, path, read_python(path))


def read_python(path: Path) -> str:
    """Return the text of a Python file without a byte order mark; raises a CodegenError if it isn't in UTF-8."""
    data, line = path.read_bytes(), 1
    try:
        if tokenize.detect_encoding(io.BytesIO(data).readline)[0].startswith("utf-8"):
            return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
    except SyntaxError:  # one of the first two lines declares another encoding, or an unknown one
        pass
    where = Location(str(path), line)
    raise CodegenError(f"{where}: this file can't be read, as it isn't in UTF-8. Save it as UTF-8.")


def _missing_part(name: str) -> str:
    package, _, missing = name.rpartition(".")
    while package and (spec := find_spec(package)) is None:
        package, _, missing = package.rpartition(".")
    if not package:
        return f"there is no {missing!r}"
    folders = map(Path, (spec and spec.submodule_search_locations) or [])
    names = {entry.stem for folder in folders if folder.is_dir() for entry in folder.iterdir()}
    matches = difflib.get_close_matches(missing, sorted(names), 3)
    return f"there is no {missing!r} in {package}" + (f" (nearest: {', '.join(matches)})" if matches else "")
