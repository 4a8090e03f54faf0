"""The configs of a project: its settings, discovery and import."""

from __future__ import annotations

import contextlib
import importlib
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
from patcher.source.importing import TextLoader, imported_from_text
from patcher.source.modules import read_python
from patcher.source.reading import Location

SUFFIX = "_patch_gen_config.py"
_IMPORTING = {__file__, importlib.__file__, importing.__file__}
_SKIPPED = {"node_modules", "__pycache__", "site-packages"}
#: The sections with settings, and their keys: those of the existing generator are valid as well.
_SECTIONS = {
    "patcher.codegen": {"search_root", "format"},
    "patchgen": {"search_root", "format", "package_prefix", "legacy_patches_prefix"},
}


@dataclass(frozen=True)
class Settings:
    """The settings `search_root` and `format`, of `[tool.patcher.codegen]` or else of `[tool.patchgen]`."""

    search_root: tuple[Path, ...]
    formatted: bool


def read_settings(start: str | os.PathLike[str] | None = None) -> Settings:
    """Return the settings of the project around a folder; raises a CodegenError if they are invalid."""
    current = Path(start or Path.cwd()).resolve()
    files = (folder / "pyproject.toml" for folder in (current, *current.parents))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return Settings((current,), False)
    try:
        tools = tomllib.loads(file.read_text("utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CodegenError(f"{file}: the project's settings can't be read: {error}") from error
    tables = {"patcher.codegen": tools.get("patcher", {}).get("codegen", {}), "patchgen": tools.get("patchgen", {})}
    name = next((name for name, table in tables.items() if table), "patcher.codegen")
    table, section = tables[name], f"[tool.{name}]"
    if unknown := sorted(set(table) - _SECTIONS[name]):
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
    """Return the configs of a project, `*_patch_gen_config.py` in the search root, in a fixed order."""
    configs = set[Path]()
    for root in settings.search_root:
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
            configs.update(Path(folder, name) for name in files if name.endswith(SUFFIX))
    return sorted(configs)


def load_configs(module: str, name: str | None = None) -> list[PatchSpec]:
    """Return the configs of a module, which is executed anew.

    Args:
        module: a dotted name, or the path of a file.
        name: the variable; by default `config`, or all configs that the module defines.

    Raises:
        CodegenError: if the module can't be imported, or has no such config.
    """
    path = Path(module)
    try:
        loaded = _import(module)
    except CodegenError:
        raise
    except Exception as error:
        place, cause = _places(error, path)
        if path.suffix == ".py":
            read_python(path)  # reports the line of undecodable text, which Python often doesn't
        raise CodegenError(
            f"{place or module}: the config can't be imported: {type(error).__name__}: {error}"
            + (f", at {cause}" if cause else "")
        ) from error
    file = str(loaded.__file__ or path)  # of a folder there is no file
    configs = {key: value for key, value in vars(loaded).items() if isinstance(value, PatchSpec)}
    if name is None and "config" not in configs:
        if defined := {id(config): config for config in configs.values() if config.config_file == file}:
            return list(defined.values())
        raise CodegenError(
            f"{Location(file, 1)}: this module defines no PatchConfig. Write `config = PatchConfig(...)`."
        )
    if (name or "config") not in configs:
        raise CodegenError(
            f"{Location(file, 1)}: there is no PatchConfig named {name!r}. "
            + (f"There are: {', '.join(configs)}." if configs else "Define one, `config = PatchConfig(...)`.")
        )
    return [configs[name or "config"]]


def _places(error: BaseException, path: Path) -> tuple[str, str]:
    """Return the line of the config on which its import failed, and that of another file that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [Location(frame.filename, frame.lineno or 1) for frame in frames if frame.filename not in _IMPORTING]
    places = [place for place in places if not place.file.startswith("<frozen")]
    if isinstance(error, SyntaxError) and error.filename:
        places.append(Location(error.filename, error.lineno or 1))
    if not places:
        return "", ""
    # If a package around the config failed, no place is in the config itself.
    in_config = [place for place in places if Path(place.file) == path.resolve()] or places[:1]
    return str(in_config[-1]), str(places[-1]) if places[-1] != in_config[-1] else ""


def _import(module: str) -> ModuleType:
    """Import a config anew: one that is given by its path as part of its package, so that relative imports work."""
    path, root, name = Path(module).resolve(), Path.cwd(), module
    is_file = path.suffix == ".py"
    if is_file:
        if not path.is_file():
            raise CodegenError(f"{path}: there is no such config. Give the path of a file, or the name of a module.")
        root, name = path.parent, path.stem
        while (root / "__init__.py").is_file():
            root, name = root.parent, f"{root.name}.{name}"
    with _on_path(root):
        if is_file or isinstance(getattr(sys.modules.get(name), "__loader__", None), TextLoader):
            sys.modules.pop(name, None)
        try:
            loaded = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that the config imports
            raise CodegenError(
                f"{name}: there is no module {error.name!r}. Give the name of a config's module, or the path of its "
                "file, which ends in .py."
            ) from error
    if is_file and loaded.__file__ != str(path):
        raise CodegenError(
            f"{path}: this config is the module {name!r}, and {loaded.__file__} is imported by that name. Rename one."
        )
    return loaded


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Add the folder of a config to the path, and import modules of the project from their source."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a file may be new
    try:
        with imported_from_text(folder, Path.cwd()):
            yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
