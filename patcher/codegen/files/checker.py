"""Generated files against their configs: made again, compared, and their calls looked at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patcher.codegen.files.projects import discover, load_configs, read_settings
from patcher.codegen.files.rebase import OriginalChange, changed_originals, write_rebase
from patcher.codegen.files.writer import files_of, output_folder, write_generated
from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.generation.header import config_path, made_by
from patcher.codegen.spec import PatchKind, PatchSpec
from patcher.errors import CodegenError
from patcher.source.call_sites import CallSites, shortened, why_unfit
from patcher.source.differences import diff_of
from patcher.source.reading import parsed


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
        originals: definitions under patches that aren't what the file was made from; they keep it from being fixed.
        command: what takes them over.
        merged: the file with the patches merged with what happened to their originals, and its conflicts.
    """

    config: str
    path: Path | None = None
    drift: str = ""
    calls: tuple[CallMismatch, ...] = ()
    error: str = ""
    fixed: bool = False
    originals: tuple[OriginalChange, ...] = ()
    command: str = ""
    merged: tuple[Path, int] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.error or self.calls or self.originals) and (not self.drift or self.fixed)

    def __str__(self) -> str:
        state = "ok" if not self.drift else "fixed" if self.fixed else "drifted"
        lines = [f"{self.config}: can't be checked\n{self.error}" if self.error else f"{self.config}: {state}"]
        lines += [f"  {self.path}, {mismatch}" for mismatch in self.calls]
        lines += [f"  {str(change).rstrip()}" for change in self.originals]
        if self.originals:
            lines.append(
                f"  --fix leaves {self.path} as it is. Change the patch if it must follow, then take the new "
                f"original over by generating the file again: {self.command}"
            )
        if self.merged is not None:
            lines.append(f"  merged by --rebase, {self.merged[1]} conflicts: {self.merged[0]}")
        return "\n".join([*lines, *([self.drift.rstrip("\n")] if self.drift and not self.fixed else [])])


def check(
    configs: Iterable[str | os.PathLike[str]] | None = None,
    *,
    fix: bool = False,
    rebase: bool = False,
    output_dir: str | os.PathLike[str] | None = None,
    formatted: bool | None = None,
) -> list[CheckResult]:
    """Make generated files again and compare them with those on the disk.

    >>> check([])  # of no configs; without an argument, of all that the project has
    []

    Args:
        configs: modules or files of configs; without them, all that the project has.
        fix: write what drifted, but for files with a patch whose original has changed.
        rebase: merge such patches with the change, into a file with the suffix `.rebase`.
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
            results += [_check_one(label, config, fix, rebase, output_dir, formatted) for config in configs_here]
        except CodegenError as error:
            results.append(CheckResult(label, error=str(error)))
    return results


def _check_one(
    label: str,
    config: PatchSpec,
    fix: bool,
    rebase: bool,
    output_dir: str | os.PathLike[str] | None,
    formatted: bool,
) -> CheckResult:
    found = CheckResult(label, command=made_by(config))
    try:
        folder = output_folder(config, output_dir)
        path = folder / config.target_file
        changes = changed_originals(config, path)
        merged = write_rebase(config, changes, path) if rebase else None
        found = replace(found, path=path, originals=changes, merged=merged)
        generated = build(config)
        drift = "".join(_drift(files_of(generated, path, formatted=formatted)))
        fixed = bool(drift and fix and not changes)
        if fixed:
            write_generated(generated, folder, formatted=formatted)
    except CodegenError as error:
        return replace(found, error=str(error))
    return replace(found, drift=drift, calls=check_calls(generated), fixed=fixed)


def _drift(files: Mapping[Path, bytes]) -> Iterator[str]:
    """Diffs from what is on the disk to what should be: of the file, and of what is beside it."""
    for file, data in files.items():
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
    module = CallSites(parsed(generated.text.removeprefix("\ufeff")))
    original = CallSites(parsed(generated.source.text))
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
