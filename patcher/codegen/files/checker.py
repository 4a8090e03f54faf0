"""Generated files against their configs: found under a folder, made again, compared."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from patcher.codegen.config import PatchConfig
from patcher.codegen.files.writer import diff_of, diff_path, files_of, output_folder, write_generated
from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.generation.header import config_path
from patcher.codegen.spec import PatchKind
from patcher.errors import CodegenError
from patcher.source.call_sites import CallSites, shortened, why_unfit
from patcher.source.reading import Location

SUFFIX = "_patch_gen_config.py"
_IMPORTING = {__file__, importlib.__file__}
_SKIPPED = {"node_modules", "__pycache__", "site-packages"}


@dataclass(frozen=True)
class Settings:
    """`[tool.patcher.codegen]` of a project: `search_root`, one folder or several, and `format`."""

    search_root: tuple[Path, ...]
    formatted: bool


@dataclass(frozen=True)
class CheckResult:
    """What the check of one config found.

    Attributes:
        config: the file of the config, below its project.
        path: the generated file, None if the config couldn't be read.
        drift: a unified diff from the file on the disk to what the config says, empty if they agree.
        calls: calls that no longer fit what was patched.
        error: why the config couldn't be read or the file couldn't be generated.
        fixed: whether the drift was written away.
    """

    config: str
    path: Path | None = None
    drift: str = ""
    calls: tuple[CallMismatch, ...] = ()
    error: str = ""
    fixed: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is left to do."""
        return not self.error and not self.calls and (not self.drift or self.fixed)

    def __str__(self) -> str:
        if self.error:
            return f"{self.config}: can't be checked\n{self.error}"
        lines = [f"{self.config}: {'ok' if not self.drift else 'fixed' if self.fixed else 'drifted'}"]
        lines += [f"  {self.path}, {mismatch}" for mismatch in self.calls]
        return "\n".join([*lines, *([self.drift.rstrip("\n")] if self.drift and not self.fixed else [])])


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
        table = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("patcher", {}).get("codegen", {})
    except tomllib.TOMLDecodeError as error:
        raise CodegenError(f"{file}: the project's settings can't be read: {error}") from error
    if unknown := sorted(set(table) - {"search_root", "format"}):
        raise CodegenError(
            f"{file}: [tool.patcher.codegen] has no setting {unknown[0]!r}. It has search_root and format."
        )
    roots = table.get("search_root", ".")
    folders = [file.parent / name for name in ([roots] if isinstance(roots, str) else roots)]
    for missing in (path for path in folders if not path.is_dir()):
        raise CodegenError(
            f"{file}: search_root in [tool.patcher.codegen] names {missing.relative_to(file.parent).as_posix()!r}, "
            "which is no folder of this project."
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


def load_configs(module: str, name: str | None = None) -> list[PatchConfig]:
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
        raise CodegenError(
            f"{place or module}: the config can't be imported: {type(error).__name__}: {error}"
            + (f", at {cause}" if cause else "")
        ) from error
    mine = str(Path(loaded.__file__ or ""))
    own = {key: value for key, value in vars(loaded).items() if isinstance(value, PatchConfig)}
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
    # Not those that import: this file's, and `importlib.import_module`.
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
            return known
        if len(parts) > 1:
            return importlib.import_module(name)
        # two folders may each hold a config of this name: loaded by its path, known by its name to its neighbours
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def check(
    configs: Iterable[str | os.PathLike[str]] | None = None,
    *,
    fix: bool = False,
    output_dir: str | os.PathLike[str] | None = None,
    formatted: bool | None = None,
) -> list[CheckResult]:
    """Make generated files again and compare them with those on the disk.

    >>> check([])  # of no configs; without an argument, of all that the project has
    []

    Args:
        configs: modules or files of configs; without them, all that the project has.
        fix: write what drifted.
        output_dir: where the generated files are, if not in `generated/` beside each config.
        formatted: whether they were formatted with ruff; by default as the project's settings say.

    Returns:
        One result for each config. A config that can't be imported is a result with an error.
    """
    settings = read_settings()
    formatted = settings.formatted if formatted is None else formatted
    results: list[CheckResult] = []
    for entry in discover(settings) if configs is None else configs:
        label = config_path(str(entry)) if str(entry).endswith(".py") else str(entry)
        try:
            results += [_check_one(label, config, fix, output_dir, formatted) for config in load_configs(str(entry))]
        except CodegenError as error:
            results.append(CheckResult(label, error=str(error)))
    return results


def _check_one(
    label: str, config: PatchConfig, fix: bool, output_dir: str | os.PathLike[str] | None, formatted: bool
) -> CheckResult:
    try:
        generated = build(config)
        folder = output_folder(config, output_dir)
        path = folder / config.target_file
        drift = "".join(_drift(generated, path, formatted))
        if drift and fix:
            write_generated(generated, folder, diff=diff_path(path).exists(), formatted=formatted)
    except CodegenError as error:
        return CheckResult(label, error=str(error))
    return CheckResult(label, path, drift, check_calls(generated), fixed=bool(drift and fix))


def _drift(generated: Generated, path: Path, formatted: bool) -> Iterator[str]:
    """Diffs from what is on the disk to what should be: of the file, and of its diff if there is one."""
    for file, data in files_of(generated, path, diff=diff_path(path).exists(), formatted=formatted).items():
        present = file.read_bytes() if file.is_file() else None
        if present == data:
            continue
        old = present.decode("utf-8", "replace") if present is not None else ""
        new = data.decode("utf-8", "replace")
        on_disk = f"{file.name} (on the disk{'' if present is not None else ': missing'})"
        drift = diff_of(old, new, on_disk, f"{file.name} (as the config says)")
        yield drift or f"{file.name}: differs in newlines or encoding only\n"


@dataclass(frozen=True)
class CallMismatch:
    """One call that doesn't fit.

    Attributes:
        line: where it is in the generated file.
        call: its text, shortened.
        target: the patched function or method.
        problem: why it doesn't fit.
    """

    line: int
    call: str
    target: str
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.call} does not fit the patched {self.target}: {self.problem}"


def check_calls(generated: Generated) -> tuple[CallMismatch, ...]:
    """The calls in a generated file that fitted the original, and do not fit the patch.

    The check reads the file, it doesn't run it. A call that it can't follow is not reported, and neither is one that
    didn't fit the original either (decorators take arguments out of calls).
    """
    module = CallSites(ast.parse(generated.text.removeprefix("\ufeff")))
    original = CallSites(ast.parse(generated.source.text))
    targets: set[str] = set()
    for patch in generated.patches:
        if patch.kind is PatchKind.MODIFY_INIT:
            targets.add(f"{patch.target}.__init__")
        elif patch.kind is PatchKind.REPLACE_CLASS and patch.target in module.classes:
            targets.update(f"{patch.target}.{name}" for name in module.methods(patch.target))
        else:
            targets.add(patch.target)
    found = []
    for call, target, bound in module.calls():
        if target not in targets:
            continue
        if problem := why_unfit(call, original.function(target), module.function(target), bound):
            found.append(CallMismatch(call.lineno, shortened(call), target, problem))
    return tuple(sorted(found, key=lambda mismatch: (mismatch.line, mismatch.target)))
