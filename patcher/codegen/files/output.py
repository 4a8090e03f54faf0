"""Generated files on disk: written atomically, and checked against their configs and originals."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patcher.codegen.files.projects import discover, load_configs, read_settings
from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.generation.header import config_path, fingerprints_of, made_by, recorded
from patcher.codegen.spec import PatchSpec
from patcher.errors import CodegenError
from patcher.source.modules import load
from patcher.source.reading import Location
from patcher.source.scopes import NOTHING
from patcher.source.texts import diff_of

Folder = str | os.PathLike[str] | None


def write(config: PatchSpec, output_dir: Folder = None, diff: bool = False, *, formatted: bool = False) -> Path:
    """Generate the file of a config and write it.

    >>> import tempfile
    >>> from patcher.codegen import PatchConfig
    >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(config, folder, diff=True).name
    'patched_modeling_llama.py'

    Args:
        config: the description.
        output_dir: the folder, by default `generated/` next to the file of the config.
        diff: also write a unified diff against the original, with the suffix `.diff`. An existing one is always
            updated.
        formatted: format the text with ruff.

    Returns:
        The path of the generated file.

    Raises:
        CodegenError: if it can't be generated; then no file is changed.
    """
    return write_generated(build_formatted(config, formatted), output_folder(config, output_dir), diff=diff)


class ModelingCodeGenerator:
    """`generate` and `write` with the interface of another generator.

    >>> from patcher.codegen import PatchConfig
    >>> generator = ModelingCodeGenerator(PatchConfig("transformers.models.llama.modeling_llama"))
    >>> generator.load_source()
    >>> generator.generate().startswith(generator.source_code[:20])
    False

    Args:
        config: the description.
    """

    def __init__(self, config: PatchSpec) -> None:
        self.config = config
        self.source_code = ""

    def load_source(self) -> None:
        """Read the patched module into `source_code`; `generate` doesn't need it."""
        self.source_code = load(self.config.source_module, self.config.where).text

    def generate(self, output_path: Path | None = None) -> str:
        """Return the text of the file, and write it to a path if one is passed."""
        generated = build(self.config)
        if output_path is not None:
            replace_all({output_path: generated.text.encode()}, self.config.where)
        return generated.text


def build_formatted(config: PatchSpec, formatted: bool) -> Generated:
    """Return a generated file as it is written."""
    generated = build(config)
    if not formatted:
        return generated
    return replace(generated, text=run_ruff(generated.text, config.target_file, config.where))


def write_generated(generated: Generated, folder: Path, *, diff: bool = False) -> Path:
    """Write the generated file and its diff, both or none."""
    path = folder / generated.config.target_file
    replace_all(files_of(generated, path, diff=diff), generated.config.where)
    return path


def files_of(generated: Generated, path: Path, *, diff: bool = False) -> dict[Path, bytes]:
    """Return the contents of the generated file, and of its diff if it is requested or exists on disk."""
    files = {path: generated.text.encode()}
    if diff or diff_path(path).is_file():
        files[diff_path(path)] = unified_diff(generated).encode()
    return files


def output_folder(config: PatchSpec, output_dir: Folder) -> Path:
    """Return the folder that the file of a config is written to."""
    if output_dir is not None:
        return Path(output_dir)
    home = Path(config.config_file)
    if not home.is_file():
        raise config.error(
            "this config isn't in a file, so there is no folder beside it to write to. "
            "Give write(config, output_dir=...)."
        )
    return home.parent / "generated"


def diff_path(path: Path) -> Path:
    """Return the path of the diff of a generated file."""
    return path.with_suffix(".diff")


def unified_diff(generated: Generated) -> str:
    """Return the diff from the original to the generated text."""
    names = f"a/{generated.source.relative_path}", f"b/{generated.config.target_file}"
    return diff_of(generated.source.text, generated.text, *names)


def run_ruff(text: str, name: str, where: Location) -> str:
    """Return a text formatted by `ruff check --fix` and `ruff format`, with the settings of the current folder."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        raise CodegenError(f"{where}: formatting needs ruff, which is not installed. Run `pip install ruff`.")
    for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        arguments = [ruff, *command, "--stdin-filename", name, "-"]
        result = subprocess.run(arguments, input=text.encode(), capture_output=True, check=False)
        if result.returncode != 0:
            raise CodegenError(f"{where}: ruff {command[0]} failed on {name}: {result.stderr.decode().strip()}")
        text = result.stdout.decode()
    return text


def replace_all(files: Mapping[Path, bytes], where: Location) -> None:
    """Write files of one folder, all or none. Temporary ones are renamed: a reader never sees a part of a text."""
    folder = next(iter(files)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
            staged = {path: Path(scratch, path.name) for path in files}
            for path, temporary in staged.items():
                temporary.write_bytes(files[path])
                if path.exists():
                    shutil.copymode(path, temporary)
            for path, temporary in staged.items():
                temporary.replace(path)
    except OSError as error:
        raise CodegenError(f"{where}: {error.filename or 'the file'} can't be written: {error.strerror}") from error


# --- checks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OriginalChange:
    """A patched definition that has changed since the file was generated.

    Attributes:
        target: its dotted name.
        where: the line of the config that patches it.
        call: the call on that line.
        is_gone: whether the definition no longer exists.
    """

    target: str
    where: Location
    call: str
    is_gone: bool

    def __str__(self) -> str:
        text = f"{self.where}: {self.call} patches code that has changed since the file was made"
        return text + (", and is gone" if self.is_gone else "")


@dataclass(frozen=True)
class CheckResult:
    """The result of the check of one config.

    Attributes:
        config: the file of the config, relative to its project.
        path: the generated file, None if the config couldn't be read.
        drift: a unified diff from the file on disk to the generated text, "" if they are equal.
        error: why the config couldn't be read or the file couldn't be generated.
        fixed: whether the file was rewritten.
        originals: patched definitions that have changed since; the file isn't fixed because of them.
        command: the command that generates the file from the changed originals.
    """

    config: str
    path: Path | None = None
    drift: str = ""
    error: str = ""
    fixed: bool = False
    originals: tuple[OriginalChange, ...] = ()
    command: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return not (self.error or self.originals) and (not self.drift or self.fixed)

    def __str__(self) -> str:
        state = "ok" if not self.drift else "fixed" if self.fixed else "drifted"
        lines = [f"{self.config}: can't be checked\n{self.error}" if self.error else f"{self.config}: {state}"]
        lines += [f"  {change}" for change in self.originals]
        if self.originals:
            lines.append(
                f"  --fix leaves {self.path} as it is. Change the patch if it must follow, then take the new "
                f"original over by generating the file again: {self.command}"
            )
        return "\n".join([*lines, *([self.drift.rstrip("\n")] if self.drift and not self.fixed else [])])


def check(
    configs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    fix: bool = False,
    output_dir: Folder = None,
    formatted: bool | None = None,
) -> list[CheckResult]:
    """Generate files again and compare them with those on disk.

    >>> check([])  # without an argument, all configs of the project are checked
    []

    Args:
        configs: modules or files of configs, or one of them; by default all of the project.
        fix: rewrite files that differ, except those with a patch whose original has changed.
        output_dir: the folder of the generated files, if not `generated/` next to each config.
        formatted: whether they were formatted with ruff, by default as set in the project.

    Returns:
        One result for each config. For a config that can't be imported, it has an error.
    """
    settings = read_settings()
    formatted = settings.formatted if formatted is None else formatted
    configs = [configs] if isinstance(configs, str | os.PathLike) else configs
    results: list[CheckResult] = []
    for entry in discover(settings) if configs is None else configs:
        label = config_path(str(entry)) if str(entry).endswith(".py") else str(entry)
        try:
            loaded = load_configs(str(entry))
            results += [_check_one(label, config, fix, output_dir, formatted) for config in loaded]
        except CodegenError as error:
            results.append(CheckResult(label, error=str(error)))
    return results


def _check_one(label: str, config: PatchSpec, fix: bool, output_dir: Folder, formatted: bool) -> CheckResult:
    result = CheckResult(label, command=made_by(config))
    try:
        folder = output_folder(config, output_dir)
        path = folder / config.target_file
        changes = changed_originals(config, path)
        result = replace(result, path=path, originals=changes)
        generated = build_formatted(config, formatted)
        drift = "".join(_drift(files_of(generated, path)))
        fixed = bool(drift and fix and not changes)
        if fixed:
            write_generated(generated, folder)
    except CodegenError as error:
        return replace(result, error=str(error))
    return replace(result, drift=drift, fixed=fixed)


def _drift(files: Mapping[Path, bytes]) -> Iterator[str]:
    """Yield the diffs from the files on disk to what they should contain."""
    for file, data in files.items():
        present = file.read_bytes() if file.is_file() else None
        if present == data:
            continue
        old = present.decode("utf-8", "replace") if present is not None else ""
        new = data.decode("utf-8", "replace")
        on_disk = f"{file.name} (on the disk{'' if present is not None else ': missing'})"
        if old.splitlines() == new.splitlines():
            yield f"{file.name}: differs in newlines only\n"
        else:
            yield diff_of(old, new, on_disk, f"{file.name} (as the config says)")


def changed_originals(config: PatchSpec, path: Path) -> tuple[OriginalChange, ...]:
    """Return the patched definitions that have changed since the file of a config was written.

    They are also listed if the file can't be generated any more, which may be a consequence.
    """
    if not path.is_file():
        return ()
    try:
        tree = ast.parse(load(config.source_module, config.where).text)
    except SyntaxError:
        return ()  # the generator reports it
    before, now = recorded(path.read_text("utf-8", "replace")), fingerprints_of(config, tree)
    calls = {name: (where, f"exclude_from_output({name!r})") for name, where in config.excluded.items()}
    calls |= dict.fromkeys(config.derived, (config.where, "from_patcher()"))
    calls |= {patch.definition: (patch.where, patch.call) for patch in config.patches}
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    return tuple(OriginalChange(name, *calls[name], now[name] == NOTHING) for name in changed)
