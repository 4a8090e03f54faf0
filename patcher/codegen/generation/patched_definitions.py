"""Patches as edits of the syntax tree: whole definitions replaced."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import libcst as cst

from patcher.codegen.generation.provenance import Provenance
from patcher.codegen.spec import External, Patch, PatchKind
from patcher.source import trees as tree
from patcher.source.folding import Folded
from patcher.source.indentation import dedented
from patcher.source.modules import lines_of
from patcher.source.reading import Source, own_decorators
from patcher.source.scopes import free_names
from patcher.source.trees import Definition, code_of, comment_lines, marker, why


@dataclass
class Context:
    """What the edits of one file share.

    Attributes:
        source: the name of the patched module, for messages.
        newline: its newline.
        unit: one step of its indentation.
        externals: how the file calls each imported replacement.
        bound: the names of the original that the file binds at its top level.
        removable: those that can be left out, each with the calls that do it.
        folded: what stands for statements that no edit touches.
        provenance: where the code of each patch is from.
        done: the patches in the order of the text, each with the names that it gave the file.
    """

    source: str
    newline: str
    unit: str
    externals: dict[External, str]
    bound: set[str]
    removable: dict[str, str]
    folded: Folded
    provenance: Provenance
    done: list[Patch] = field(default_factory=list)

    def read(
        self, patch: Patch, depth: int, names: dict[str, str] | None = None, *, whole: bool = False
    ) -> Definition:
        """The patch code, renamed and indented for its place; `whole` if more of it is to be changed."""
        assert patch.source is not None
        return self.read_source(
            patch.source, patch.replacement, dict(patch.name_map) | (names or {}), depth, whole=whole
        )

    def read_source(
        self, source: Source, given: Any, names: dict[str, str], depth: int = 0, *, whole: bool = False
    ) -> Definition:
        """The code of a patch or a helper, renamed and indented for its place."""
        own, indent = own_decorators(given, source), self.unit * depth
        said = Counter(re.findall(r"[^\W\d]\w*", source.text))
        # But for its definition: that is called what it takes the place of.
        names = {name: new for name, new in names.items() if said[name] > (name == source.name)}
        if not whole:
            source = self._folded(source, names, indent)
        return tree.read_definition(source, own, names, self.newline, indent, self.unit)

    def _folded(self, source: Source, names: dict[str, str], indent: str) -> Source:
        """A source with the statements folded that are only moved."""
        lines, node = lines_of(source.text), source.tree()
        inner = lines[node.body[0].lineno - 1]
        if source.indent or inner[: len(inner) - len(inner.lstrip())] != self.unit or self.folded.name in source.text:
            return source
        words = {*names, *(new.partition(".")[0] for new in names.values())}
        self.folded.fold_statements(lines, [node], words, indent, self.newline)
        return replace(source, text="".join(lines))


def replace_definition(
    patch: Patch, node: Definition, context: Context, depth: int, *, nested: bool = False
) -> list[Any]:
    """The statements that stand where a class or a function was."""
    is_class = isinstance(node, cst.ClassDef)
    wrong, fix = PatchKind.REPLACE_CLASS, "Use replace_function."
    if is_class:
        wrong, fix = PatchKind.REPLACE_FUNCTION, "Use replace_class, or override_method for one of its methods."
    what = "class" if is_class else "function"
    if patch.wanted is wrong:
        raise patch.error(f"does not fit: {patch.target!r} is a {what} in {context.source}. {fix}")
    origin = context.provenance.comment(patch)
    box = marker(f"[PATCHED {what.upper()}] {patch.target}", why(patch.description), *origin)
    above = tree.without_copied_from(node.leading_lines)
    leading = [*above, *box]
    context.done.append(patch)
    name = node.name.value
    if isinstance(patch.replacement, External):
        if patch.is_import:
            return [cst.parse_statement(patch.replacement.statement(name)).with_changes(leading_lines=leading)]
        return [assignment(name, context.externals[patch.replacement], leading)]
    assert patch.source is not None
    kept = "" if nested else _kept_name(patch, name, is_class, context)
    own = patch.source.name
    names = {old: kept for old, new in (*patch.name_map, (name, name)) if kept and new == name}
    if own == name:  # the new class is meant everywhere but in its own bases, which are read before it exists
        new = context.read(patch, depth)
        if isinstance(new, cst.ClassDef) and kept:
            bases = [base.with_changes(value=tree.renamed(base.value, {name: kept})) for base in new.bases]
            new = new.with_changes(bases=bases)
    else:
        new = context.read(patch, depth, names | {own: name}).with_changes(name=cst.Name(name))
    if not kept:
        return [below(new, leading)]
    original = cast(Definition, tree.renamed(node, {name: kept}))
    note = comment_lines([f"The original, used by the patched {name} below."])
    original = original.with_changes(name=cst.Name(kept), leading_lines=[*above, *note])
    return [original, below(new, [*comment_lines([], blank_before=2), *box])]


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


def below(node: Any, lines: Sequence[cst.EmptyLine]) -> Any:
    """A statement with more lines above it."""
    return node.with_changes(leading_lines=[*lines, *node.leading_lines])


def assignment(name: str, value: str, leading: Sequence[cst.EmptyLine] = ()) -> Any:
    """`name = value` below its comments."""
    return cst.parse_statement(f"{name} = {value}").with_changes(leading_lines=leading)


def is_overload(node: Definition) -> bool:
    """Whether a definition only tells type checkers a signature, `@overload`."""
    return any(code_of(each.decorator).rpartition(".")[2] == "overload" for each in node.decorators)


def behind_overloads(node: Any, stubs: Sequence[Definition]) -> Any:
    """A definition with the lines above its overloads, which are left out."""
    if not stubs:
        return node
    return node.with_changes(leading_lines=[*stubs[0].leading_lines, *tree.without_blank(node.leading_lines)])
