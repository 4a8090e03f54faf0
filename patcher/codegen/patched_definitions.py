"""Patches as edits of the syntax tree: each function here changes one definition and says what it found."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import libcst as cst

from patcher.codegen.spec import External, Patch, PatchKind
from patcher.source import trees as tree
from patcher.source.reading import own_decorators
from patcher.source.trees import Definition, comment_lines, marker, why


@dataclass
class Context:
    """What the edits of one file share.

    Attributes:
        source: the name of the patched module, for messages.
        newline: its newline.
        unit: one step of its indentation.
        externals: how the file calls each imported replacement.
        bound: the names that the file binds at its top level.
        done: the patches in the order of the text, each with the names that it gave the file.
    """

    source: str
    newline: str
    unit: str
    externals: dict[External, str]
    bound: set[str]
    done: list[Patch] = field(default_factory=list)

    def read(self, patch: Patch, depth: int, names: dict[str, str] | None = None) -> Definition:
        """The patch code, renamed and indented for its place."""
        assert patch.source is not None
        return tree.read_definition(
            patch.source,
            own_decorators(patch.replacement, patch.source),
            dict(patch.name_map) | (names or {}),
            self.newline,
            self.unit * depth,
            self.unit,
        )


def check_kind(patch: Patch, node: Definition, source: str) -> None:
    """Raise a CodegenError if the target is a class and the patch is one for functions, or the other way round."""
    is_class = isinstance(node, cst.ClassDef)
    if patch.kind is PatchKind.REPLACE_CLASS and not is_class:
        fix = "Use replace_function."
    elif patch.kind is PatchKind.REPLACE_FUNCTION and is_class:
        fix = "Use replace_class, or override_method for one of its methods."
    else:
        return
    raise patch.error(f"does not fit: {patch.target!r} is a {'class' if is_class else 'function'} in {source}. {fix}")


def replace_definition(
    patch: Patch, node: Definition, context: Context, depth: int, *, nested: bool = False
) -> list[Any]:
    """The statements that stand where a class or a function was."""
    check_kind(patch, node, context.source)
    is_class = isinstance(node, cst.ClassDef)
    title = f"[PATCHED {'CLASS' if is_class else 'FUNCTION'}] {patch.target}"
    leading = [*tree.without_copied_from(node.leading_lines), *marker(title, why(patch.description))]
    context.done.append(patch)
    name = node.name.value
    if isinstance(patch.replacement, External):
        return [assignment(name, context.externals[patch.replacement], leading)]
    assert patch.source is not None
    kept = "" if nested else _kept_name(patch, name, is_class, context)
    own = patch.source.name
    names = {old: kept for old, new in (*patch.name_map, (name, name)) if kept and new == name}
    if own == name:  # the new class is meant everywhere but in its own bases, which are read before it exists
        new = context.read(patch, depth)
        if isinstance(new, cst.ClassDef) and kept:
            bases = [cast(cst.Arg, base.visit(tree.Rename({name: kept}))) for base in new.bases]
            new = new.with_changes(bases=bases)
    else:
        new = context.read(patch, depth, names | {own: name}).with_changes(name=cst.Name(name))
    if not kept:
        return [new.with_changes(leading_lines=[*leading, *new.leading_lines])]
    original = cast(Definition, node.visit(tree.Rename({name: kept})))
    note = comment_lines([f"The original, used by the patched {name} below."])
    original = original.with_changes(
        name=cst.Name(kept), leading_lines=[*tree.without_copied_from(node.leading_lines), *note]
    )
    box = [*comment_lines([], blank_before=2), *marker(title, why(patch.description))]
    return [original, new.with_changes(leading_lines=[*box, *new.leading_lines])]


def _kept_name(patch: Patch, name: str, is_class: bool, context: Context) -> str:
    """The name under which the original stays, because the replacement builds on it; empty if it doesn't."""
    assert patch.source is not None
    node: Any = patch.source.tree()
    parts = [*node.bases, *(keyword.value for keyword in node.keywords)] if is_class else node.body
    used = {part.id for base in parts for part in ast.walk(base) if isinstance(part, ast.Name)}
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


def assignment(name: str, value: str, leading: Sequence[cst.EmptyLine] = ()) -> Any:
    """`name = value` below its comments."""
    return cst.parse_statement(f"{name} = {value}").with_changes(leading_lines=leading)
