"""Generated files against their configs: made again and compared, and so are the originals under their patches."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patcher.codegen.files.projects import discover, load_configs, read_settings
from patcher.codegen.files.writer import files_of, output_folder, write_generated
from patcher.codegen.generation.generator import build
from patcher.codegen.generation.header import config_path, made_by
from patcher.codegen.generation.provenance import Provenance, recorded
from patcher.codegen.spec import PatchSpec
from patcher.errors import CodegenError
from patcher.source.definitions import NOTHING
from patcher.source.modules import load
from patcher.source.reading import Location
from patcher.source.texts import diff_of


@dataclass(frozen=True)
class OriginalChange:
    """A definition that a config patches, and that isn't what the generated file was made from.

    Attributes:
        target: its dotted name.
        where: the line of the config that patches it.
        call: the call on that line.
        releases: the release that the file was made from, and the one that is installed; empty if there is none.
        is_gone: whether there is no such definition any more.
    """

    target: str
    where: Location
    call: str
    releases: tuple[str, str]
    is_gone: bool

    def __str__(self) -> str:
        then, now = self.releases
        since = f" ({then} -> {now})" if then and now and then != now else ""
        text = f"{self.where}: {self.call} patches code that has changed since the file was made{since}"
        return text + (", and is gone" if self.is_gone else "")


@dataclass(frozen=True)
class CheckResult:
    """What the check of one config found.

    Attributes:
        config: the file of the config, below its project.
        path: the generated file, None if the config couldn't be read.
        drift: a unified diff from the file on the disk to what the config says, empty if they agree.
        error: why the config couldn't be read or the file couldn't be generated.
        fixed: whether the drift was written away.
        originals: definitions under patches that aren't what the file was made from; they keep it from being fixed.
        command: what takes them over.
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
        """Whether nothing is left to do."""
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
        fix: write what drifted, but for files with a patch whose original has changed.
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
            configs_here = load_configs(str(entry))
            results += [_check_one(label, config, fix, output_dir, formatted) for config in configs_here]
        except CodegenError as error:
            results.append(CheckResult(label, error=str(error)))
    return results


def _check_one(
    label: str,
    config: PatchSpec,
    fix: bool,
    output_dir: str | os.PathLike[str] | None,
    formatted: bool,
) -> CheckResult:
    found = CheckResult(label, command=made_by(config))
    try:
        folder = output_folder(config, output_dir)
        path = folder / config.target_file
        changes = changed_originals(config, path)
        found = replace(found, path=path, originals=changes)
        generated = build(config)
        drift = "".join(_drift(files_of(generated, path, formatted=formatted)))
        fixed = bool(drift and fix and not changes)
        if fixed:
            write_generated(generated, folder, formatted=formatted)
    except CodegenError as error:
        return replace(found, error=str(error))
    return replace(found, drift=drift, fixed=fixed)


def _drift(files: Mapping[Path, bytes]) -> Iterator[str]:
    """Diffs from what is on the disk to what should be: of the file, and of what is beside it."""
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
    """The originals under the patches of a config that changed since its file was written.

    They are listed also where the file can't be generated any more, which their change may be the reason of.
    """
    if not path.is_file():
        return ()
    text, source = path.read_text("utf-8", "replace"), load(config.source_module, config.where)
    try:
        tree = ast.parse(source.text)
    except SyntaxError:
        return ()  # the generator reports it
    before, now = recorded(text), Provenance.of(config, tree).originals
    made = re.search(r"^# Source:[^(\n]*(?:\n#[^(\n]*)?\(([^)]*)\)", text, re.MULTILINE)
    releases = (re.sub(r"[\s#]+", " ", made[1]) if made else "", source.version)
    askers = {name: (where, f"exclude_from_output({name!r})") for name, where in config.excluded.items()}
    askers |= dict.fromkeys(config.derived, (config.where, "from_patcher()"))
    askers |= {patch.definition: (patch.where, patch.call) for patch in config.patches}
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    return tuple(OriginalChange(name, *askers[name], releases, now[name] == NOTHING) for name in changed)
