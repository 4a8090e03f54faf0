"""Patches as edits of the syntax tree: each function here changes one definition and says what it found."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import libcst as cst

from patcher.codegen.spec import ACCESSORS, External, Patch, PatchKind
from patcher.codegen.wrapped_init import wrap_init
from patcher.errors import CodegenError
from patcher.source import trees as tree
from patcher.source.reading import own_decorators
from patcher.source.scopes import looks_misspelt, nearest
from patcher.source.trees import Definition, code_of, comment_lines, definitions, marker, why


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
    raise CodegenError(
        f"{patch.where}: {patch.asked} does not fit: {patch.target!r} is a {'class' if is_class else 'function'} "
        f"in {source}. {fix}"
    )


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
        raise CodegenError(
            f"{patch.where}: {patch.asked} builds on what it replaces, and {context.source} already has a "
            f"{kept!r}, the name that the original would get. Write the original's code into the replacement."
        )
    return kept


def assignment(name: str, value: str, leading: Sequence[cst.EmptyLine]) -> cst.SimpleStatementLine:
    """`name = value` below its comments."""
    target = cst.AssignTarget(cst.Name(name))
    return cst.SimpleStatementLine([cst.Assign([target], cst.parse_expression(value))], leading_lines=leading)


def edit_class(
    node: cst.ClassDef, items: Sequence[tuple[Sequence[str], Patch]], context: Context, path: str, depth: int
) -> cst.ClassDef:
    """A class with the patches of its methods and nested classes.

    Args:
        node: the class.
        items: each patch with the rest of its dotted target, empty for `modify_init` of this class.
        context: what the edits share.
        path: the dotted name of the class.
        depth: how deep it is indented.
    """
    edits: dict[cst.CSTNode, Sequence[Any]] = {}
    added: list[Any] = []
    inner: dict[str, list[tuple[Sequence[str], Patch]]] = {}
    patched: list[tuple[int, str, Patch]] = []
    members = definitions(node.body.body)
    nested = {member.name.value: member for member in members if isinstance(member, cst.ClassDef)}
    for rest, patch in sorted(items, key=lambda item: item[1].target):
        if not rest:
            position = wrap_init(patch, node, members, context.read(patch, depth + 1), path, edits, added)
            patched.append((position, "__init__", patch))
        elif rest[0] in nested and (len(rest) > 1 or patch.kind is PatchKind.MODIFY_INIT):
            inner.setdefault(rest[0], []).append((rest[1:], patch))
        elif rest[0] in nested and len(rest) == 1 and patch.kind in (PatchKind.REPLACE_CLASS, PatchKind.EXTERNAL):
            inside = nested[rest[0]]
            deep = depth + 1 + tree.depth_of(inside, node.body.body)
            edits[inside] = replace_definition(patch, inside, context, deep, nested=True)
        elif patch.kind in (PatchKind.OVERRIDE_METHOD, PatchKind.EXTERNAL):
            position = _override(patch, list(rest), node, context, depth + 1, edits, added, path)
            patched.append((position, ".".join(rest), patch))
        else:
            raise CodegenError(
                f"{patch.where}: {patch.asked} names no class: {path!r} in {context.source} has no class "
                f"{rest[0]!r}. {nearest(rest[0], nested)}"
            )
    for name, parts in inner.items():
        inside = nested[name]
        deep = depth + 1 + tree.depth_of(inside, node.body.body)
        edits[inside] = [edit_class(inside, parts, context, f"{path}.{name}", deep)]
    changed = cast(cst.ClassDef, node.visit(tree.Rewriter(edits, node))) if edits else node
    if added:
        changed = _append(changed, added)
    if not patched:
        return changed
    patched.sort(key=lambda entry: (entry[0], entry[1]))
    context.done.extend(patch for _, _, patch in patched)
    notes = [f"  {name}: {why(patch.description)[5:]}" for _, name, patch in patched if patch.description.strip()]
    box = marker(f"[MODIFIED CLASS] {path}", f"Methods patched: {', '.join(n for _, n, _ in patched)}", *notes)
    return changed.with_changes(leading_lines=[*tree.without_copied_from(changed.leading_lines), *box])


def _override(
    patch: Patch,
    rest: list[str],
    node: cst.ClassDef,
    context: Context,
    depth: int,
    edits: dict[cst.CSTNode, Sequence[Any]],
    added: list[Any],
    path: str,
) -> int:
    """Replace or add one method. Returns its position among the members, for the order of the header."""
    members = definitions(node.body.body)
    accessor = rest[1] if len(rest) == 2 and rest[1] in ACCESSORS else ""
    name = rest[0]
    if len(rest) > 1 and not accessor:
        classes = [member.name.value for member in members if isinstance(member, cst.ClassDef)]
        raise CodegenError(
            f"{patch.where}: {patch.asked} names no method: {path!r} in {context.source} has no nested class "
            f"{name!r}. {nearest(name, classes)}"
        )
    found = [
        member
        for member in members
        if isinstance(member, cst.FunctionDef) and member.name.value == name and _accessor(member) == accessor
    ]
    _check_misspelt(patch, name, accessor, found, members, context, path)
    _check_calls_itself(patch, path, name)

    def read(depth: int) -> Any:
        if isinstance(patch.replacement, External):
            return assignment(name, context.externals[patch.replacement], ())
        return context.read(patch, depth).with_changes(name=cst.Name(name))

    if not found:
        added.append(read(depth))
        return len(members)
    # of several, such as the branches of an `if`, the definition that stays bound is the last: replace each
    for member in found:
        new = read(depth + tree.depth_of(member, node.body.body))
        above = tree.without_copied_from(member.leading_lines)
        replaced = new.with_changes(leading_lines=[*above, *new.leading_lines])
        if isinstance(replaced, cst.FunctionDef) and patch.keep_decorators:
            known = {code_of(decorator.decorator) for decorator in member.decorators}
            own = [decorator for decorator in replaced.decorators if code_of(decorator.decorator) not in known]
            replaced = replaced.with_changes(decorators=[*member.decorators, *own])
            if member.decorators and not own:
                replaced = replaced.with_changes(
                    lines_after_decorators=[*member.lines_after_decorators, *replaced.lines_after_decorators]
                )
        edits[member] = [replaced]
    return members.index(found[0])


def _accessor(member: cst.FunctionDef) -> str:
    """`setter` for a `@name.setter`, `overload` for an `@overload`, empty for a method proper."""
    for decorator in member.decorators:
        text = code_of(decorator.decorator)
        if text in {f"{member.name.value}.{kind}" for kind in ACCESSORS}:
            return text.rpartition(".")[2]
        if text.rpartition(".")[2] == "overload":
            return "overload"
    return ""


def _check_misspelt(
    patch: Patch,
    name: str,
    accessor: str,
    found: list[cst.FunctionDef],
    members: list[Definition],
    context: Context,
    path: str,
) -> None:
    known = {member.name.value for member in members}
    if found:
        if patch.new:
            raise CodegenError(
                f"{patch.where}: {patch.asked} says new=True, and {path!r} in {context.source} has a method "
                f"{name!r}. Leave new out to replace it."
            )
        return
    if accessor:
        raise CodegenError(
            f"{patch.where}: {patch.asked} names no method: {path!r} in {context.source} has no "
            f"@{name}.{accessor}. {nearest(name, known)}"
        )
    near = [other for other in known if patch.new is None and looks_misspelt(name, other)]
    if near:
        raise CodegenError(
            f"{patch.where}: {patch.asked} names no method of {path!r} in {context.source}, and one of nearly that "
            f"name. {nearest(name, near)} If {name!r} is to be a new method, write override_method(..., new=True)."
        )


def _check_calls_itself(patch: Patch, path: str, name: str) -> None:
    """A patched method that calls `Class.method` to reach the original would call itself for ever."""
    if patch.source is None:
        return
    for part in ast.walk(patch.source.tree()):
        if isinstance(part, ast.Attribute) and ast.unparse(part) == f"{path}.{name}":
            raise CodegenError(
                f"{patch.where}: {patch.asked} calls {path}.{name}, which it replaces: it would call itself for ever. "
                "Write the original's code into the patch, or use replace_class with a class that inherits from it."
            )


def _append(node: cst.ClassDef, new: list[Any]) -> cst.ClassDef:
    """A class with statements at its end; a body that says nothing, `...` or `pass`, makes room for them."""
    members, comments = tree.class_members(node)
    new = [new[0].with_changes(leading_lines=[*comments, *new[0].leading_lines]), *new[1:]]
    for statement in new:
        blank = [cst.EmptyLine(indent=False)] if members else []
        members.append(statement.with_changes(leading_lines=[*blank, *statement.leading_lines]))
    return tree.with_members(node, members)
