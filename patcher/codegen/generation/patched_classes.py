"""Classes of which methods and nested classes are patched, as edits of their syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import libcst as cst

from patcher.codegen.generation.patched_definitions import (
    Context,
    assignment,
    behind_overloads,
    below,
    is_overload,
    replace_definition,
)
from patcher.codegen.spec import External, Patch, PatchKind
from patcher.errors import CodegenError
from patcher.source import trees as tree
from patcher.source.definitions import ACCESSORS
from patcher.source.indentation import dedented
from patcher.source.scopes import is_rebound, looks_misspelt, nearest
from patcher.source.trees import code_of, comment_lines, marker, why

#: a patch, with the rest of its dotted target: empty for `modify_init` of the class
Item = tuple[Sequence[str], Patch]
#: the name that `modify_init` keeps an original `__init__` under
ORIGINAL = "_original_init"
_BLANK = cst.EmptyLine(indent=False)


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
    for rest, patch in items:
        nested = edit.nested.get(rest[0]) if rest else None
        if nested is not None and (len(rest) > 1 or patch.kind is PatchKind.MODIFY_INIT):
            inner.setdefault(rest[0], []).append((rest[1:], patch))
        elif nested is not None and patch.wanted in (None, PatchKind.REPLACE_CLASS):
            edit.edits[nested] = replace_definition(patch, nested, context, edit.depth_of(nested), nested=True)
        elif not rest:
            edit.wrap_init(patch)
        elif patch.wanted in (None, PatchKind.OVERRIDE_METHOD):
            edit.override(patch, *rest)
        else:
            raise patch.error(
                f"names no class: {edit.where} has no class {rest[0]!r}. {nearest(rest[0], edit.nested)}"
            )
    for name, parts in inner.items():
        nested = edit.nested[name]
        edit.edits[nested] = [edit_class(nested, parts, context, f"{path}.{name}", edit.depth_of(nested))]
    return edit.result()


class _ClassEdit:
    """The edits of one class, before they are applied."""

    def __init__(self, node: cst.ClassDef, context: Context, path: str, depth: int) -> None:
        self.node, self.context, self.path, self.depth = node, context, path, depth
        self.where = f"{path!r} in {context.source}"
        self.members = tree.definitions(node.body.body)
        self.nested = {member.name.value: member for member in self.members if isinstance(member, cst.ClassDef)}
        self.edits: dict[cst.CSTNode, Sequence[Any]] = {}
        self.added: list[Any] = []
        #: position among the members, name and patch of each patched method
        self.patched: list[tuple[int, str, Patch]] = []

    def depth_of(self, member: tree.Definition) -> int:
        return self.depth + 1 + tree.depth_of(member, self.node.body.body)

    def methods(self, name: str) -> list[cst.FunctionDef]:
        """All that define a name: accessors of a property, overloads, the branches of an `if`."""
        return [member for member in self.members if isinstance(member, cst.FunctionDef) and member.name.value == name]

    def _put(self, patch: Patch, name: str, edits: Mapping[Any, Sequence[Any]], *added: Any) -> None:
        """Note the edits of one patch; the header lists patches in the order of the members."""
        self.edits.update(edits)
        self.added.extend(added)
        position = self.members.index(next(iter(edits))) if edits else len(self.members)
        self.patched.append((position, name, patch))

    def override(self, patch: Patch, name: str, *rest: str) -> None:
        """Replace or add one method."""
        accessor = rest[0] if len(rest) == 1 and rest[0] in ACCESSORS else ""
        if rest and not accessor:
            near = nearest(name, self.nested)
            raise patch.error(f"names no method: {self.where} has no nested class {name!r}. {near}")
        found = [member for member in self.methods(name) if _accessor(member) == accessor]
        known = {member.name.value for member in self.members}
        near_names = [other for other in known if patch.new is None and looks_misspelt(name, other)]
        if found and patch.new:
            raise patch.error(f"says new=True, and {self.where} has a method {name!r}. Leave new out to replace it.")
        if not found and accessor:
            raise patch.error(f"names no method: {self.where} has no @{name}.{accessor}. {nearest(name, known)}")
        if not found and near_names:
            raise patch.error(
                f"names no method of {self.where}, and one of nearly that name. {nearest(name, near_names)} "
                f"If {name!r} is to be a new method, write override_method(..., new=True)."
            )
        says = rf"\b{self.node.name.value}\b(?s:.*)\b{name}\b"
        source = patch.source if patch.source is not None and re.search(says, patch.source.text) else None
        for part in ast.walk(source.tree()) if source is not None else ():
            if isinstance(part, ast.Attribute) and part.attr == name and ast.unparse(part) == f"{self.path}.{name}":
                raise patch.error(
                    f"calls {self.path}.{name}, which it replaces: it would call itself for ever. Write the "
                    "original's code into the patch, or use replace_class with a class that inherits from it."
                )

        def read(depth: int) -> Any:
            origin = comment_lines(self.context.provenance.comment(patch))
            if isinstance(patch.replacement, External):
                return assignment(name, self.context.externals[patch.replacement], origin)
            return below(self.context.read(patch, depth).with_changes(name=cst.Name(name)), origin)

        # of several, such as the branches of an `if`, the definition that stays bound is the last: replace each
        # what tells the signatures of the original goes with it
        stubs = [] if accessor else [member for member in self.methods(name) if is_overload(member)]
        edits: dict[Any, Sequence[Any]] = {}
        for member in found:
            place = behind_overloads(member, stubs)
            edits[member] = [_in_place_of(place, read(self.depth_of(member)), patch)]
        edits |= dict.fromkeys(stubs, ())
        self._put(patch, ".".join([name, *rest]), edits, *([] if found else [read(self.depth + 1)]))

    def wrap_init(self, patch: Patch) -> None:
        """`modify_init`: the original `__init__` stays under another name, and the patched one calls it.

        It is called as `Class._original_init(self, ...)`, through the class and not through `self`: a subclass whose
        `__init__` is modified too has an `_original_init` of its own, and would be called in its place.
        """
        new = cast(cst.FunctionDef, self.context.read(patch, self.depth + 1, whole=True))
        params = list(new.params.params)
        if len(params) < 2:
            raise patch.error(
                "needs a function of (original_init, self, ...), and "
                f"{new.name.value!r} takes {len(params)} positional argument(s). Add original_init in front."
            )
        called, own = params[0].name.value, params[1].name.value
        assert patch.source is not None
        if is_rebound(dedented(patch.source.text), called):
            raise patch.error(
                f"binds {called!r} anew, which stands for the original __init__. Give the other variable another name."
            )
        found = self.methods("__init__")
        found = [member for member in found if not member.decorators] or found
        original = f"{self.path}.{ORIGINAL}" if found else ORIGINAL
        try:
            new = cast(cst.FunctionDef, tree.renamed(new, {called: original}, parameters=True))
        except CodegenError as error:
            raise patch.error(f"can't call the original __init__: {error}") from None
        new = new.with_changes(name=cst.Name("__init__"), params=new.params.with_changes(params=params[1:]))
        new = below(new, comment_lines(self.context.provenance.comment(patch)))
        if not found:
            rewriter = _CallSuper(patch, called, own, self.path)
            new = cast(cst.FunctionDef, new.visit(rewriter))
            if rewriter.uses != rewriter.calls:
                raise rewriter.unclear()
            self._put(patch, "__init__", {}, new)
            return
        if any(member.name.value == ORIGINAL for member in self.members):
            raise patch.error(
                f"would keep the original as {ORIGINAL!r}, and {self.path!r} has a method of that "
                "name. Use override_method for its __init__."
            )
        rewritten = below(new, [_BLANK])
        note = comment_lines(["The __init__ of the original, called by the patched one below."])
        edits = dict[Any, Sequence[Any]]()
        for member in found:
            above = [*member.leading_lines, *note]
            edits[member] = [member.with_changes(name=cst.Name(ORIGINAL), leading_lines=above), rewritten]
        self._put(patch, "__init__", edits)

    def result(self) -> cst.ClassDef:
        """The class with all of them."""
        changed = cast(cst.ClassDef, self.node.visit(tree.Rewriter(self.edits, self.node)))
        if self.added:
            # A body that says nothing, `...` or `pass`, makes room for them.
            members, comments = tree.class_members(changed)
            for statement in [below(self.added[0], comments), *self.added[1:]]:
                members.append(below(statement, [_BLANK] if members else []))
            changed = tree.with_members(changed, members)
        if not self.patched:
            return changed
        self.patched.sort(key=lambda entry: entry[0])
        self.context.done.extend(patch for _, _, patch in self.patched)
        title = f"Methods patched: {', '.join(name for _, name, _ in self.patched)}"
        notes = [f"  {name}: {why(p.description)[5:]}" for _, name, p in self.patched if p.description.strip()]
        box = marker(f"[MODIFIED CLASS] {self.path}", title, *notes)
        return changed.with_changes(leading_lines=[*tree.without_copied_from(changed.leading_lines), *box])


def _in_place_of(member: cst.FunctionDef, new: Any, patch: Patch) -> Any:
    """A new method with the comments, and the decorators if they stay, of the one that it replaces."""
    new = below(new, tree.without_copied_from(member.leading_lines))
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
    if is_overload(member):
        return "overload"
    for decorator in member.decorators:
        text = code_of(decorator.decorator)
        if text in {f"{member.name.value}.{kind}" for kind in ACCESSORS}:
            return text.rpartition(".")[2]
    return ""


class _CallSuper(cst.CSTTransformer):
    """For a class without an `__init__`: `original_init(self, x)` becomes `super().__init__(x)`."""

    def __init__(self, patch: Patch, called: str, own: str, path: str) -> None:
        super().__init__()
        self.patch, self.called, self.own, self.path = patch, called, own, path
        self.depth = self.uses = self.calls = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            self.depth += 1
        return True

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.FunctionDef):
            self.depth -= 1
        if isinstance(original_node, cst.Name) and original_node.value == ORIGINAL:
            self.uses += 1
        func = original_node.func if isinstance(original_node, cst.Call) else None
        if not isinstance(func, cst.Name) or func.value != ORIGINAL:
            return updated_node
        self.calls += 1
        args = updated_node.args
        first = args[0].value if args else None
        if not isinstance(first, cst.Name) or first.value != self.own or args[0].star or args[0].keyword:
            raise self.unclear()
        parent = "super()" if self.depth == 1 else f"super({self.path}, {self.own})"
        return updated_node.with_changes(func=cst.parse_expression(f"{parent}.__init__"), args=args[1:])

    def unclear(self) -> CodegenError:
        return self.patch.error(
            "modifies a class that inherits its __init__, so "
            f"{self.called} stands for super().__init__. Call it as {self.called}({self.own}, ...), and no other way."
        )
