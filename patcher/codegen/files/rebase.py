"""Code under a patch that is not what a file was made from any more: found, shown, and merged with the patch."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import tempfile
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from patcher.codegen.files.writer import diff_path, replace_all
from patcher.codegen.generation.provenance import Provenance, config_line, recorded
from patcher.codegen.spec import Patch, PatchKind, PatchSpec
from patcher.errors import CodegenError
from patcher.source.canonical import fingerprint
from patcher.source.definitions import find, span
from patcher.source.differences import diff_of, reversed_diff
from patcher.source.edits import lines_of
from patcher.source.indentation import dedented, docstring_lines, in_strings
from patcher.source.modules import load
from patcher.source.reading import Location, Source, own_decorators


@dataclass(frozen=True)
class OriginalChange:
    """A definition that a config patches, and that isn't what the generated file was made from.

    Attributes:
        target: its dotted name.
        where: the line of the config that patches it.
        asked: the call on that line.
        releases: the release that the file was made from, and the one that is installed; empty if there is none.
        then: the text of the original when the file was made, None if that can't be told.
        now: its text now.
        unknown: why `then` can't be told.
    """

    target: str
    where: Location
    asked: str
    releases: tuple[str, str]
    then: str | None
    now: str
    unknown: str = ""

    @property
    def labels(self) -> tuple[str, str]:
        """What to call the original then and now."""
        then, now = self.releases
        return (then, now) if then and now and then != now else ("then", "now")

    def __str__(self) -> str:
        then, now = self.labels
        since = f" ({then} -> {now})" if then != "then" else ""
        said = f"{self.where}: {self.asked} patches code that has changed since the file was made{since}"
        if self.then is None:
            return f"{said}. {self.unknown}{f' It is now:{chr(10)}{self.now}' if self.now else ' It is gone.'}"
        return f"{said}{'' if self.now else ', and is gone'}:\n{self.diff}"

    @property
    def diff(self) -> str:
        """What happened to the original; empty where it isn't known what it was."""
        then, now = (f"{self.target} ({label})" for label in self.labels)
        return "" if self.then is None else diff_of(self.then, self.now, then, now)


def changed_originals(config: PatchSpec, path: Path) -> tuple[OriginalChange, ...]:
    """The originals under the patches of a config that changed since its file was written.

    They are told also where the file can't be generated any more, which their change may be the reason of.
    """
    if not path.is_file():
        return ()
    text, source = _decoded(path.read_bytes()), load(config.source_module, config.where)
    try:
        tree = ast.parse(source.text)
    except SyntaxError:
        return ()  # of which the generator tells
    before, now = recorded(text), Provenance.of(config, tree).originals
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    if not changed:
        return ()
    old, unknown = _source_then(text, path, {name: before[name] for name in changed})
    made = re.search(r"^# Source:[^(\n]*(?:\n#[^(\n]*)?\(([^)]*)\)", text, re.MULTILINE)
    releases = (re.sub(r"[\s#]+", " ", made[1]) if made else "", source.version)
    askers = {name: (where, f"exclude_from_output({name!r})") for name, where in config.excluded.items()}
    askers |= dict.fromkeys(config.derived, (config.where, "from_patcher()"))
    askers |= {patch.definition: (patch.where, patch.asked) for patch in config.patches}
    return tuple(
        OriginalChange(
            name, *askers[name], releases, None if old is None else _cut(old, name), _cut(source.text, name), unknown
        )
        for name in changed
    )


def _decoded(data: bytes) -> str:
    """The text of a generated file, whatever it says its encoding is."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError:
        encoding = "utf-8"
    return data.decode(encoding, "replace")


def _source_then(text: str, path: Path, wanted: dict[str, str]) -> tuple[str | None, str]:
    """The source that a file was made from, or why it can't be told."""
    diff = diff_path(path)
    if not diff.is_file():
        return None, f"There is no {diff.name} beside the file to tell what it was; --diff writes it."
    try:
        old = reversed_diff(diff.read_bytes().decode("utf-8"), text)
        tree = ast.parse(old)
    except (ValueError, SyntaxError):
        return None, f"{diff.name} would tell what it was, but does not fit the file."
    if any(fingerprint(find(tree, name)) != mark for name, mark in wanted.items()):
        return None, f"{diff.name} would tell what it was, but is of another source."
    return old, ""


def _cut(text: str, name: str) -> str:
    """The text of a definition, at the left; of all that have the name."""
    lines = [line.rstrip("\r\n") for line in lines_of(text)]
    parts = []
    for node in find(ast.parse(text), name):
        first, last = span(node)
        indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
        kept = in_strings(node) - docstring_lines(node)  # docstrings move with the code, as in a config
        numbered = enumerate(lines[first - 1 : last], first)
        parts.append("".join(f"{line if n in kept else line.removeprefix(indent)}\n" for n, line in numbered))
    return "\n".join(parts)


def write_rebase(config: PatchSpec, changes: Iterable[OriginalChange], path: Path) -> tuple[Path, int] | None:
    """Merge each patch with what happened to its original, into a file beside the generated one.

    Returns:
        The path and the number of conflicts, or None if of no original it is known what it was.

    Raises:
        CodegenError: git is missing, or the file holds something else, which may be somebody's work.
    """
    parts, conflicts = [], 0
    patches = {patch.definition: patch for patch in config.patches}
    for change in changes:
        if change.then is None:
            continue
        patch = patches.get(change.target)
        source = _own_text(config, change.target, patch)
        then, now = change.labels
        place = config_line(patch.place if patch else change.where) or str(change.where)
        title = f"# {place}: {change.asked}, original of {then} -> {now}"
        if source is None:
            parts.append(f"{title}\n# no edited copy of the original, so nothing to merge\n{change.diff}")
            continue
        merged, number = _merged(source, change, config.where)
        conflicts += number
        parts.append(f"{title}\n# {number} conflict{'' if number == 1 else 's'}\n{merged}")
    if not parts:
        return None
    side = path.with_suffix(".rebase")
    data = "\n\n".join(parts).encode("utf-8")
    if side.exists() and side.read_bytes() != data:
        raise CodegenError(
            f"{config.where}: {side} is there already, and differs from what --rebase would write: it may "
            "hold what was merged by hand. Take it over into the config, or remove it."
        )
    replace_all({side: data}, config.where)
    return side, conflicts


def _own_text(config: PatchSpec, target: str, patch: Patch | None) -> str | None:
    """The text that the config has in the place of an original; None where it has no edited copy of it."""
    if patch is None:
        sources: list[tuple[Source, object]] = [(h.source, h.helper) for h in config.helpers]
        source, obj = next(((s, o) for s, o in sources if s.name == target), (None, None))
    else:
        source, obj = patch.source, patch.replacement
    if source is None or (patch is not None and patch.kind is PatchKind.MODIFY_INIT):
        return None
    lines = lines_of(source.text)
    ours = [source.decorators[index] for index in own_decorators(obj, source)]
    gone = {number - source.line for first, last in ours for number in range(first, last + 1)}
    return dedented("".join(line for number, line in enumerate(lines) if number not in gone))


def _merged(source: str, change: OriginalChange, where: Location) -> tuple[str, int]:
    """What `git merge-file` makes of a patch and the change of its original, with the number of conflicts."""
    git = shutil.which("git")
    if git is None:
        raise CodegenError(f"{where}: --rebase merges with git, which is not installed. Install git.")
    name = ast.parse(source).body[0].name  # type: ignore[attr-defined]
    head = re.compile(rf"^((?:async )?def|class) +{re.escape(change.target.split('.')[-1])}\b", re.MULTILINE)
    originals = [head.sub(rf"\1 {name}", text or "") for text in (change.then, change.now)]  # one name for all three
    labels = ("the patch", *(f"the original, {label}" for label in change.labels))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(3)]
        for file, text in zip(files, (source, *originals), strict=True):
            file.write_bytes(text.encode("utf-8"))
        options = [option for label in labels for option in ("-L", label)]
        done = subprocess.run(
            [git, "merge-file", "-p", "--diff3", *options, *map(str, files)], capture_output=True, check=False
        )
    if not 0 <= done.returncode <= 127:
        raise CodegenError(f"{where}: git merge-file failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode("utf-8"), done.returncode
