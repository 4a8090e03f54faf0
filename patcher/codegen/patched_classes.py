"""One class with the patches of its methods and nested classes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, cast

import libcst as cst

from patcher.codegen.patched_definitions import Context, assignment, replace_definition
from patcher.codegen.spec import ACCESSORS, External, Patch, PatchKind
from patcher.codegen.wrapped_init import wrap_init
from patcher.source import trees as tree
from patcher.source.scopes import looks_misspelt, nearest
from patcher.source.trees import code_of, definitions, marker, why

__all__ = ["edit_class"]

#: a patch, with the rest of its dotted target: empty for `modify_init` of the class
Item = tuple[Sequence[str], Patch]


def edit_class(node: cst.ClassDef, items: Sequence[Item], context: Context, path: str, depth: int) -> cst.ClassDef:
    """A class with the patches of its methods and nested classes.

    Args:
        node: the class.
        items: its patches.
        context: what the edits share.
        path: the dotted name of the class.
        depth: how deep it is indented.
    """
    edit = _ClassEdit(node, context, path, depth)
    inner: dict[str, list[Item]] = {}
    for rest, patch in sorted(items, key=lambda item: item[1].target):
        nested = edit.nested.get(rest[0]) if rest else None
        if nested is not None and (len(rest) > 1 or patch.kind is PatchKind.MODIFY_INIT):
            inner.setdefault(rest[0], []).append((rest[1:], patch))
        elif nested is not None and patch.kind in (PatchKind.REPLACE_CLASS, PatchKind.EXTERNAL):
            edit.edits[nested] = replace_definition(patch, nested, context, edit.depth_of(nested), nested=True)
        elif not rest:
            new = context.read(patch, depth + 1)
            edit.put(patch, "__init__", *wrap_init(patch, node, edit.members, new, path))
        elif patch.kind in (PatchKind.OVERRIDE_METHOD, PatchKind.EXTERNAL):
            edit.override(patch, list(rest))
        else:
            near = nearest(rest[0], edit.nested)
            raise patch.error(f"names no class: {path!r} in {context.source} has no class {rest[0]!r}. {near}")
    for name, parts in inner.items():
        nested = edit.nested[name]
        edit.edits[nested] = [edit_class(nested, parts, context, f"{path}.{name}", edit.depth_of(nested))]
    return edit.result()


class _ClassEdit:
    """The edits of one class, before they are applied."""

    def __init__(self, node: cst.ClassDef, context: Context, path: str, depth: int) -> None:
        self.node, self.context, self.path, self.depth = node, context, path, depth
        self.members = definitions(node.body.body)
        self.nested = {member.name.value: member for member in self.members if isinstance(member, cst.ClassDef)}
        self.edits: dict[cst.CSTNode, Sequence[Any]] = {}
        self.added: list[Any] = []
        #: position among the members, name and patch of each patched method
        self.patched: list[tuple[int, str, Patch]] = []

    def depth_of(self, member: tree.Definition) -> int:
        return self.depth + 1 + tree.depth_of(member, self.node.body.body)

    def put(self, patch: Patch, name: str, edits: dict[Any, Sequence[Any]], added: Sequence[Any]) -> None:
        """Note the edits of one patch; the header lists patches in the order of the members."""
        self.edits.update(edits)
        self.added.extend(added)
        position = self.members.index(next(iter(edits))) if edits else len(self.members)
        self.patched.append((position, name, patch))

    def override(self, patch: Patch, rest: list[str]) -> None:
        """Replace or add one method."""
        accessor = rest[1] if len(rest) == 2 and rest[1] in ACCESSORS else ""
        name = rest[0]
        if len(rest) > 1 and not accessor:
            raise patch.error(
                f"names no method: {self.path!r} in {self.context.source} has no nested class {name!r}. "
                f"{nearest(name, self.nested)}"
            )
        found = [
            member
            for member in self.members
            if isinstance(member, cst.FunctionDef) and member.name.value == name and _accessor(member) == accessor
        ]
        self._check_misspelt(patch, name, accessor, bool(found))
        _check_calls_itself(patch, self.path, name)

        def read(depth: int) -> Any:
            if isinstance(patch.replacement, External):
                return assignment(name, self.context.externals[patch.replacement])
            return self.context.read(patch, depth).with_changes(name=cst.Name(name))

        # of several, such as the branches of an `if`, the definition that stays bound is the last: replace each
        edits: dict[Any, Sequence[Any]] = {
            member: [_in_place_of(member, read(self.depth_of(member)), patch)] for member in found
        }
        self.put(patch, ".".join(rest), edits, [] if found else [read(self.depth + 1)])

    def _check_misspelt(self, patch: Patch, name: str, accessor: str, is_known: bool) -> None:
        known = {member.name.value for member in self.members}
        where = f"{self.path!r} in {self.context.source}"
        near = [other for other in known if patch.new is None and looks_misspelt(name, other)]
        if is_known:
            if patch.new:
                raise patch.error(f"says new=True, and {where} has a method {name!r}. Leave new out to replace it.")
        elif accessor:
            raise patch.error(f"names no method: {where} has no @{name}.{accessor}. {nearest(name, known)}")
        elif near:
            raise patch.error(
                f"names no method of {where}, and one of nearly that name. {nearest(name, near)} "
                f"If {name!r} is to be a new method, write override_method(..., new=True)."
            )

    def result(self) -> cst.ClassDef:
        """The class with all of them."""
        changed = cast(cst.ClassDef, self.node.visit(tree.Rewriter(self.edits, self.node)))
        if self.added:
            changed = _append(changed, self.added)
        if not self.patched:
            return changed
        self.patched.sort(key=lambda entry: entry[:2])
        self.context.done.extend(patch for _, _, patch in self.patched)
        title = f"Methods patched: {', '.join(name for _, name, _ in self.patched)}"
        notes = [f"  {name}: {why(p.description)[5:]}" for _, name, p in self.patched if p.description.strip()]
        box = marker(f"[MODIFIED CLASS] {self.path}", title, *notes)
        return changed.with_changes(leading_lines=[*tree.without_copied_from(changed.leading_lines), *box])


def _in_place_of(member: cst.FunctionDef, new: Any, patch: Patch) -> Any:
    """A new method with the comments, and the decorators if they stay, of the one that it replaces."""
    above = tree.without_copied_from(member.leading_lines)
    new = new.with_changes(leading_lines=[*above, *new.leading_lines])
    if not isinstance(new, cst.FunctionDef) or not patch.keep_decorators:
        return new
    known = {code_of(decorator.decorator) for decorator in member.decorators}
    own = [decorator for decorator in new.decorators if code_of(decorator.decorator) not in known]
    after = list(new.lines_after_decorators)
    if member.decorators and not own:
        after = [*member.lines_after_decorators, *after]
    return new.with_changes(decorators=[*member.decorators, *own], lines_after_decorators=after)


def _accessor(member: cst.FunctionDef) -> str:
    """`setter` for a `@name.setter`, `overload` for an `@overload`, empty for a method proper."""
    for decorator in member.decorators:
        text = code_of(decorator.decorator)
        if text in {f"{member.name.value}.{kind}" for kind in ACCESSORS}:
            return text.rpartition(".")[2]
        if text.rpartition(".")[2] == "overload":
            return "overload"
    return ""


def _check_calls_itself(patch: Patch, path: str, name: str) -> None:
    """A patched method that calls `Class.method` to reach the original would call itself for ever."""
    if patch.source is None:
        return
    for part in ast.walk(patch.source.tree()):
        if isinstance(part, ast.Attribute) and ast.unparse(part) == f"{path}.{name}":
            raise patch.error(
                f"calls {path}.{name}, which it replaces: it would call itself for ever. "
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
