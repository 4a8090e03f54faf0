"""The configs of a project: its settings, where they are, and how they are imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from patcher.codegen.spec import PatchSpec
from patcher.errors import CodegenError
from patcher.source import importing
from patcher.source.importing import TextLoader, imported_from_text, is_current
from patcher.source.modules import read_python
from patcher.source.reading import Location

SUFFIX = "_patch_gen_config.py"
_IMPORTING = {__file__, importlib.__file__, importing.__file__}
_SKIPPED = {"node_modules", "__pycache__", "site-packages"}


#: Where settings are, and what else may be there: those of the existing generator work as they are.
_TABLES = {
    ("patcher", "codegen"): {"search_root", "format"},
    ("patchgen",): {"search_root", "format", "package_prefix", "legacy_patches_prefix"},
}


@dataclass(frozen=True)
class Settings:
    """`[tool.patcher.codegen]` of a project: `search_root`, one folder or several, and `format`.

    A section `[tool.patchgen]` is read where there is no such section.
    """

    search_root: tuple[Path, ...]
    formatted: bool


def read_settings(start: str | os.PathLike[str] | None = None) -> Settings:
    """The settings of the project that a folder is part of.

    Raises:
        CodegenError: for invalid settings.
    """
    here = Path(start or Path.cwd()).resolve()
    file = next((file for folder in (here, *here.parents) if (file := folder / "pyproject.toml").is_file()), None)
    if file is None:
        return Settings((here,), False)
    try:
        tools = tomllib.loads(file.read_text("utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CodegenError(f"{file}: the project's settings can't be read: {error}") from error
    found = {names: functools.reduce(lambda table, name: table.get(name, {}), names, tools) for names in _TABLES}
    names = next((names for names in _TABLES if found[names]), ("patcher", "codegen"))
    table, section = found[names], f"[tool.{'.'.join(names)}]"
    if unknown := sorted(set(table) - _TABLES[names]):
        raise CodegenError(f"{file}: {section} has no setting {unknown[0]!r}. It has search_root and format.")
    roots = table.get("search_root", ".")
    folders = [file.parent / name for name in ([roots] if isinstance(roots, str) else roots)]
    for missing in (path for path in folders if not path.is_dir()):
        raise CodegenError(
            f"{file}: search_root in {section} names {missing.relative_to(file.parent).as_posix()!r}, "
            "which isn't a folder of this project."
        )
    return Settings(tuple(folders), bool(table.get("format", False)))


def discover(settings: Settings) -> list[Path]:
    """The configs of a project, `*_patch_gen_config.py` below the search root, in a fixed order."""
    found = set[Path]()
    for root in settings.search_root:
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
            found.update(Path(folder, name) for name in files if name.endswith(SUFFIX))
    return sorted(found)


def load_configs(module: str, name: str | None = None) -> list[PatchSpec]:
    """The configs of a module.

    Args:
        module: a dotted name, or the path of a file.
        name: the variable; without it `config`, or whatever configs the module holds.

    Raises:
        CodegenError: if the module can't be imported, or holds no such config.
    """
    path = Path(module)
    try:
        loaded = _import_file(path) if path.suffix == ".py" else _import_name(module)
    except CodegenError:
        raise
    except Exception as error:
        place, cause = _places(error, path)
        if path.suffix == ".py":
            read_python(path)  # Python says of many files only that they can't be read, and not where
        raise CodegenError(
            f"{place or module}: the config can't be imported: {type(error).__name__}: {error}"
            + (f", at {cause}" if cause else "")
        ) from error
    mine = str(Path(loaded.__file__ or ""))
    own = {key: value for key, value in vars(loaded).items() if isinstance(value, PatchSpec)}
    if name is None and "config" in own:
        name = "config"
    if name is None:
        local = {id(value): value for value in own.values() if value.config_file == mine}
        if not local:
            raise CodegenError(
                f"{Location(mine, 1)}: this module defines no PatchConfig. Write `config = PatchConfig(...)`."
            )
        return list(local.values())
    if name not in own:
        raise CodegenError(
            f"{Location(mine, 1)}: there is no PatchConfig named {name!r}. "
            + (f"There are: {', '.join(own)}." if own else "Define one, `config = PatchConfig(...)`.")
        )
    return [own[name]]


def _places(error: BaseException, path: Path) -> tuple[str, str]:
    """The line of the config on which its import failed, and the line of another file that failed there."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    # Not those that import.
    places = [Location(f.filename, f.lineno or 1) for f in frames if f.filename not in _IMPORTING]
    if isinstance(error, SyntaxError) and error.filename:
        places.append(Location(error.filename, error.lineno or 1))
    if not places:
        return "", ""
    # The config itself comes first, unless it is imported by a package: its files run before.
    own = [place for place in places if Path(place.file) == path.resolve()] or places[:1]
    return str(own[-1]), str(places[-1]) if places[-1] != own[-1] else ""


def _import_name(name: str) -> ModuleType:
    with _on_path(Path.cwd()):
        known = sys.modules.get(name)
        if isinstance(getattr(known, "__loader__", None), TextLoader) and not is_current(known):
            sys.modules.pop(name, None)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that the config imports
            raise CodegenError(
                f"{name}: there is no module {error.name!r}. Give the name of a config's module, or the path of its "
                "file, which ends in .py."
            ) from error


def _import_file(path: Path) -> ModuleType:
    """Import a config by its path: as part of its package if it has one, so that relative imports work."""
    path = path.resolve()
    if not path.is_file():
        raise CodegenError(f"{path}: there is no such config. Give the path of a file, or the name of a module.")
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    name = ".".join(parts)
    with _on_path(root):
        known = sys.modules.get(name)
        if known is not None and Path(getattr(known, "__file__", None) or "") == path:
            if is_current(known):
                return known
            sys.modules.pop(name, None)
        if len(parts) > 1:
            return importlib.import_module(name)
        # two folders may each hold a config of this name: loaded by its path, known by its name to its neighbours
        loader = TextLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """What a config imports is found from its folder too, and what is of the project is read from its text."""
    sys.path.insert(0, str(folder))
    try:
        with imported_from_text(folder, Path.cwd()):
            yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
