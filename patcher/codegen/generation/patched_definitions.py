"""Patches as edits of a file's text: whole definitions replaced."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from patcher.codegen.generation.provenance import Provenance
from patcher.codegen.spec import External, Patch, PatchKind
from patcher.errors import CodegenError
from patcher.source.edits import Edit, Place, Text, applied
from patcher.source.reading import Definition, Location, Source, own_decorators, start_line
from patcher.source.renaming import renaming
from patcher.source.scopes import free_names
from patcher.source.texts import dedented, moved

RULE = "# " + "=" * 70


class Piece(NamedTuple):
    """A definition of a patch as it is written at its place, line by line.

    Attributes:
        above: the comments above it.
        decorators: each with the comments above it, by its code.
        rest: all from `def` or `class` on, and comments in front of that.
    """

    above: list[str]
    decorators: list[tuple[str, list[str]]]
    rest: list[str]

    @property
    def lines(self) -> list[str]:
        """All of them."""
        return [*self.above, *(line for _, lines in self.decorators for line in lines), *self.rest]


@dataclass
class Context:
    """What the edits of one file share.

    Attributes:
        source: the name of the patched module, for messages.
        text: its text.
        newline: its newline.
        externals: how the file calls each imported replacement.
        bound: the names of the original that the file binds at its top level.
        removable: those that can be left out, each with the calls that do it.
        provenance: where the code of each patch is from.
        edits: what changes.
        behind: statements of the top level, each with the definitions that are written behind it.
        done: the patches in the order of the text, each with the names that it gave the file.
    """

    source: str
    text: Text
    newline: str
    externals: dict[External, str]
    bound: set[str]
    removable: dict[str, str]
    provenance: Provenance
    edits: list[Edit] = field(default_factory=list)
    behind: dict[ast.stmt, list[list[str]]] = field(default_factory=dict)
    done: list[Patch] = field(default_factory=list)

    def indent(self, node: ast.stmt) -> str:
        """The white space in front of a statement."""
        return self.text.indent(node.lineno)

    def read(self, patch: Patch, indent: str, names: Mapping[str, str] | None = None, name: str = "") -> Piece:
        """The patch code for its place, under another name if one is given."""
        assert patch.source is not None
        return self.read_source(
            patch.source, patch.replacement, {**dict(patch.name_map), **(names or {})}, indent, name
        )

    def read_source(
        self,
        source: Source,
        given: Any,
        names: Mapping[str, str],
        indent: str = "",
        name: str = "",
        more: Callable[[Text, Any], Iterable[Edit]] = lambda text, node: (),
    ) -> Piece:
        """The code of a patch or a helper, renamed and indented for its place.

        Args:
            source: the code.
            given: the object that it is the code of.
            names: what it has to call differently.
            indent: the white space in front of it at its place.
            name: what it is called there, its own name by default.
            more: further edits of it.
        """
        text, node = _parsed(source.text, source.indent)
        edits = [*_without_decorators(text, node, own_decorators(given, source)), *more(text, node)]
        try:
            edits += renaming(text, names)
        except CodegenError as error:
            raise CodegenError(f"{Location(source.file or source.name, source.line)}: {error}") from None
        if name:
            edits.append(Edit(*text.name_of(node), name))
        changed = applied(text.text, edits).removeprefix(_GUARD if source.indent else "")
        return _split(moved(changed.removesuffix("\n"), source.indent, indent), indent)

    def replace(self, place: Place, lines: Sequence[str]) -> None:
        """Write lines in the place of a statement."""
        text = self.text
        start, end = text.start_of(start_line(place.node)), text.end_of(text.last_line(place.node))
        self.edits.append(Edit(start, end, self.newline.join(lines)))

    def rename(self, node: ast.ClassDef, name: str) -> None:
        """Give a class of the top level another name; the one that it has stays another name for it."""
        self.edits.append(Edit(*self.text.name_of(node), name))
        self.behind.setdefault(node, []).append(["", "", f"{node.name} = {name}"])

    def put_above(self, place: Place, lines: Sequence[str]) -> None:
        """Write lines right above a statement, indented as it is, where `# Copied from` isn't true any more."""
        text, indent = self.text, self.indent(place.node)
        for number in place.comments(text):
            if text.lines[number - 1].lstrip().startswith("# Copied from"):
                self.edits.append(Edit(text.start_of(number), text.start_of(number + 1), ""))
        start = text.start_of(start_line(place.node))
        self.edits.append(Edit(start, start, "".join(f"{indent}{line}{self.newline}" for line in lines)))

    def put_behind(self, place: Place, lines: Sequence[str]) -> None:
        """Write lines right behind a statement."""
        end = self.text.end_of(self.text.last_line(place.node))
        self.edits.append(Edit(end, end, "".join(f"{self.newline}{line}" for line in lines)))


_GUARD = "if True:\n"


def _parsed(text: str, indent: str) -> tuple[Text, Any]:
    """A definition as a text of its own, which is inside of something if it is indented."""
    parsed = Text((_GUARD if indent else "") + text)
    block: list[ast.stmt] = parsed.tree.body
    if indent:
        assert isinstance(block[0], ast.If)
        block = block[0].body
    return parsed, block[0]


def _without_decorators(text: Text, node: Any, own: Collection[int]) -> list[Edit]:
    """The edits that remove some decorators, and if none is left the empty lines behind them."""
    listed = node.decorator_list
    lines = {n for index in own for n in range(listed[index].lineno, (listed[index].end_lineno or 0) + 1)}
    if own and len(own) == len(listed):
        lines |= {n for n in range(min(lines), node.lineno) if not text.lines[n - 1].strip()}
    return [Edit(text.start_of(line), text.start_of(line + 1), "") for line in sorted(lines)]


def _split(code: str, indent: str) -> Piece:
    _, node = _parsed(code, indent)
    shift = 1 if indent else 0
    lines, at, decorators = code.split("\n"), start_line(node) - shift, list[tuple[str, list[str]]]()
    above, done = lines[: at - 1], at - 1
    for decorator in node.decorator_list:
        end = (decorator.end_lineno or 0) - shift
        decorators.append((ast.unparse(decorator), lines[done:end]))
        done = end
    return Piece(above, decorators, lines[done:])


def replace_definition(patch: Patch, place: Place, context: Context) -> None:
    """Write a patch in the place of a class or a function."""
    node: Any = place.node
    is_class = isinstance(node, ast.ClassDef)
    wrong, fix = PatchKind.REPLACE_CLASS, "Use replace_function."
    if is_class:
        wrong, fix = PatchKind.REPLACE_FUNCTION, "Use replace_class, or override_method for one of its methods."
    what = "class" if is_class else "function"
    if patch.wanted is wrong:
        raise patch.error(f"does not fit: {patch.target!r} is a {what} in {context.source}. {fix}")
    box = marker(
        f"[PATCHED {what.upper()}] {patch.target}", why(patch.description), *context.provenance.comment(patch)
    )
    context.done.append(patch)
    name, indent = node.name, context.indent(node)
    if isinstance(patch.replacement, External):
        new = patch.replacement.statement(name) if patch.is_import else ""
        context.put_above(place, box)
        context.replace(place, [indent + (new or f"{name} = {context.externals[patch.replacement]}")])
        return
    assert patch.source is not None
    kept = _kept_name(patch, name, is_class, context)
    own = patch.source.name
    names = {old: kept for old, new in (*patch.name_map, (name, name)) if kept and new == name}
    if own == name and kept:  # the new class is what it names, but in its own bases, which are read first
        based = names

        def rename_bases(text: Text, node: Any) -> list[Edit]:
            found = [part for base in node.bases for part in ast.walk(base) if isinstance(part, ast.Name)]
            return [Edit(*text.span(part), based[part.id]) for part in found if part.id in based]

        given = {old: new for old, new in patch.name_map if old not in based}
        new_one = context.read_source(patch.source, patch.replacement, given, indent, more=rename_bases)
    else:
        new_one = context.read(patch, indent, names | ({own: name} if own != name else {}), name)
    if not kept:
        context.put_above(place, box)
        context.replace(place, new_one.lines)
        return
    context.put_above(place, [f"# The original, used by the patched {name} below."])
    context.edits += _renamed_original(context.text, node, kept)
    lines = ["", "", *(f"{indent}{line}" for line in box), *new_one.lines]
    if isinstance(place.owner, ast.Module):
        context.behind.setdefault(node, []).append(lines)
    else:
        context.put_behind(place, lines)


def _renamed_original(text: Text, node: Definition, kept: str) -> list[Edit]:
    """The edits that give a definition of a file another name, in itself as well."""
    first = start_line(node)
    start, end = text.start_of(first), text.end_of(text.last_line(node))
    part, _ = _parsed(text.text[start:end], text.indent(first))
    shift = start - (len(part.text) - (end - start))
    edits = [Edit(edit.start + shift, edit.end + shift, edit.text) for edit in renaming(part, {node.name: kept})]
    return [Edit(*text.name_of(node), kept), *edits]


def _kept_name(patch: Patch, name: str, is_class: bool, context: Context) -> str:
    """The name under which the original stays, because the replacement builds on it; empty if it doesn't."""
    assert patch.source is not None
    node: Any = patch.source.tree()
    bases = [*node.bases, *(keyword.value for keyword in node.keywords)] if is_class else []
    used = free_names("\n".join(map(ast.unparse, bases)) if is_class else dedented(patch.source.text))
    mapped = {dict(patch.name_map).get(word, word) for word in used}
    if name not in mapped or (not is_class and patch.source.name == name):
        return ""
    kept = f"Original{name}" if is_class else f"original_{name}"
    if kept in context.bound:
        raise patch.error(
            f"builds on what it replaces, and {context.source} already has a "
            f"{kept!r}, the name that the original would get. Write the original's code into the replacement."
        )
    return kept


def marker(title: str, *notes: str) -> list[str]:
    """The comment box above a patched definition."""
    return [RULE, *(f"# {note}" for note in (title, *notes) if note), RULE]


def why(description: str) -> str:
    """A description on one line."""
    text = " ".join(description.split())
    return f"Why: {text}" if text else ""


def is_overload(node: Any) -> bool:
    """Whether a definition is a signature for type checkers only, `@overload`."""
    return any(ast.unparse(each).rpartition(".")[2] == "overload" for each in node.decorator_list)
