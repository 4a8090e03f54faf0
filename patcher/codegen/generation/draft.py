"""A file during generation: the edits of its original, and the code of patches for their places."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from patcher.codegen.generation.header import ROOM, config_path, fingerprints_of
from patcher.codegen.spec import Helper, Patch, PatchSpec
from patcher.errors import CodegenError
from patcher.source.modules import SourceModule
from patcher.source.reading import Location, is_of_config
from patcher.source.renaming import renaming
from patcher.source.scopes import ImportedName, imported_names, start_line
from patcher.source.texts import Edit, Place, Text, applied, indented, places

_RULE = "# " + "=" * 70


@dataclass
class Draft:
    """The state that the edits of one file share.

    Attributes:
        config: the description.
        source: the patched module.
        text: its text.
        edits: the edits of the text.
        removed: the statements that are removed.
        bound: the names that the rest of the original binds at the top level.
        behind: statements of the top level, each with the groups of lines that are inserted after it.
    """

    config: PatchSpec
    source: SourceModule
    text: Text
    edits: list[Edit] = field(default_factory=list)
    removed: set[ast.stmt] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    behind: dict[ast.stmt, list[Sequence[str]]] = field(default_factory=dict)

    # -- the original -------------------------------------------------------------------------------------------

    @cached_property
    def imported(self) -> dict[str, ImportedName]:
        """The names that the original imports."""
        return imported_names(self.text.tree)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The replaced definitions, with the fingerprints of the originals."""
        return fingerprints_of(self.config, self.text.tree)

    @cached_property
    def header_fingerprints(self) -> dict[str, str]:
        """The fingerprints that the header contains; the others are next to the patches."""
        if sum(len(name) + 11 for name in self.fingerprints) <= ROOM:
            return self.fingerprints
        patched = {*(patch.definition for patch in self.config.patches), *self.config.derived}
        return {name: fingerprint for name, fingerprint in self.fingerprints.items() if name not in patched}

    def or_without(self, name: str) -> str:
        """Return the end of a sentence that says how to remove a name of the original, "" if it can't be removed."""
        calls = []
        if name in self.imported and name not in self.config.dropped:
            calls.append(f"config.drop_import_names({name!r})")
        is_defined = any(place.bound_name == name for place in places(self.text.tree))
        if is_defined and name not in self.config.excluded:
            calls.append(f"config.exclude_from_output({name!r})")
        return f", or leave the original out: {' and '.join(calls)}" if calls else ""

    # -- edits ----------------------------------------------------------------------------------------------------

    def indent(self, node: ast.stmt) -> str:
        """Return the indentation of a statement."""
        return self.text.indent(node.lineno)

    def insert(self, position: int, text: str) -> None:
        """Insert a text at a position."""
        self.edits.append(Edit(position, position, text))

    def insert_lines_after(self, line: int, lines: Iterable[str]) -> None:
        """Insert lines after a line."""
        self.insert(self.text.end_of(line), "".join(f"\n{new_line}" for new_line in lines))

    def replace(self, node: ast.stmt, lines: Sequence[str]) -> None:
        """Replace a statement by lines."""
        start, end = self.text.start_of(start_line(node)), self.text.end_of(self.text.last_line(node))
        self.edits.append(Edit(start, end, "\n".join(lines)))

    def rename(self, node: Any, name: str) -> None:
        """Rename a definition where it is defined."""
        self.edits.append(Edit(*self.text.name_of(node), name))

    def put_above(self, place: Place, lines: Sequence[str]) -> None:
        """Insert lines right above a statement with its indentation, and remove `# Copied from`, which is obsolete."""
        text, indent = self.text, self.indent(place.node)
        for number in place.comments(text):
            if text.lines[number - 1].lstrip().startswith("# Copied from"):
                self.edits.append(Edit(text.start_of(number), text.start_of(number + 1), ""))
        position = text.start_of(start_line(place.node))
        self.insert(position, "".join(f"{indent}{line}\n" for line in lines))

    def put_behind(self, place: Place, lines: Sequence[str]) -> None:
        """Insert lines right after a statement; at the top level, together with the others that follow it."""
        if isinstance(place.owner, ast.Module):
            self.behind.setdefault(place.node, []).append(lines)
        else:
            self.insert_lines_after(self.text.last_line(place.node), lines)

    # -- code of patches --------------------------------------------------------------------------------------------

    def origin(self, patch: Patch) -> list[str]:
        """Return the comment above a patch: the line of its code, and the fingerprint of what it replaces."""
        parts, place = [], patch.place
        if patch not in self.config.of_runtime and Path(place.file).is_file():  # not a notebook's cell
            parts.append(f"from {config_path(place.file)}:{place.line}")
        if patch.definition in self.fingerprints.keys() - self.header_fingerprints.keys():
            parts.append(f"in place of {patch.definition} {self.fingerprints[patch.definition]}")
        return [", ".join(parts)] if parts else []

    def code(
        self,
        item: Patch | Helper,
        indent: str = "",
        names: Mapping[str, str] | None = None,
        name: str = "",
        edit: Callable[[Text, Any], Iterable[Edit]] = lambda text, node: (),
    ) -> list[str]:
        """Return the lines of a patch or a helper, renamed and indented for their place.

        Args:
            item: the patch or the helper.
            indent: the indentation at its place.
            names: the names to change, by default its `name_map`.
            name: its name in the file, by default its own.
            edit: returns further edits of it.
        """
        source = item.source
        assert source is not None
        text = Text(source.text)
        node: Any = text.tree.body[0]
        edits = [*_without_decorators(text, node), *edit(text, node)]
        try:
            edits += renaming(text, dict(item.name_map) if names is None else names)
        except CodegenError as error:
            raise CodegenError(f"{Location(source.file or source.name, source.line)}: {error}") from None
        if name:
            edits.append(Edit(*text.name_of(node), name))
        return indented(applied(text.text, edits).removesuffix("\n"), indent).split("\n")


def _without_decorators(text: Text, node: Any) -> list[Edit]:
    """Return the edits that remove the decorators of configs, and the blank lines after them if none is left."""
    decorators = list(filter(is_of_config, node.decorator_list))
    lines = {line for decorator in decorators for line in range(decorator.lineno, decorator.end_lineno + 1)}
    if decorators and len(decorators) == len(node.decorator_list):
        lines |= {line for line in range(min(lines), node.lineno) if not text.lines[line - 1].strip()}
    return [Edit(text.start_of(line), text.start_of(line + 1), "") for line in sorted(lines)]


def comments(*notes: str) -> list[str]:
    """Return notes as comments, without empty ones."""
    return [f"# {note}" for note in notes if note]


def marker(title: str, *notes: str) -> list[str]:
    """Return the comment box above a patched definition."""
    return [_RULE, *comments(title, *notes), _RULE]


def why(description: str) -> str:
    """Return a description as a note on one line."""
    text = " ".join(description.split())
    return f"Why: {text}" if text else ""
