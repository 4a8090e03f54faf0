"""`modify_init`: the original `__init__` stays under another name, and the patched one calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import libcst as cst

from patcher.codegen.spec import Patch
from patcher.errors import CodegenError
from patcher.source.trees import Definition, Rename, comment_lines

ORIGINAL = "_original_init"


def wrap_init(
    patch: Patch,
    node: cst.ClassDef,
    members: Sequence[Definition],
    new: Definition,
    path: str,
) -> tuple[dict[Any, Sequence[Any]], list[Any]]:
    """The edits for one class: what stands in the place of members, and what is added to them.

    The original is called as `Class._original_init(self, ...)`, through the class and not through `self`: a subclass
    whose `__init__` is modified too has an `_original_init` of its own, and would be called in its place.
    """
    assert isinstance(new, cst.FunctionDef)
    params = list(new.params.params)
    if len(params) < 2:
        raise patch.error(
            "needs a function of (original_init, self, ...), and "
            f"{new.name.value!r} takes {len(params)} positional argument(s). Add original_init in front."
        )
    called, own = params[0].name.value, params[1].name.value
    new = new.with_changes(name=cst.Name("__init__"), params=new.params.with_changes(params=params[1:]))
    found = [m for m in members if isinstance(m, cst.FunctionDef) and m.name.value == "__init__" and not m.decorators]
    found = found or [m for m in members if isinstance(m, cst.FunctionDef) and m.name.value == "__init__"]
    if not found:
        rewriter = _CallSuper(patch, called, own, path)
        rewritten = cast(cst.FunctionDef, new.visit(rewriter))
        if rewriter.uses != rewriter.calls:
            raise rewriter.unclear()
        return {}, [rewritten]
    if any(member.name.value == ORIGINAL for member in members):
        raise patch.error(
            f"would keep the original as {ORIGINAL!r}, and {path!r} has a method of that "
            "name. Use override_method for its __init__."
        )
    rewritten = cast(cst.FunctionDef, new.visit(Rename({called: f"{path}.{ORIGINAL}"})))
    blank = [cst.EmptyLine(indent=False)]
    rewritten = rewritten.with_changes(leading_lines=[*blank, *rewritten.leading_lines])
    edits: dict[Any, Sequence[Any]] = {}
    for member in found:
        note = comment_lines(["The __init__ of the original, called by the patched one below."])
        original = member.with_changes(name=cst.Name(ORIGINAL), leading_lines=[*member.leading_lines, *note])
        edits[member] = [original, rewritten]
    return edits, []


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
        if isinstance(original_node, cst.Name) and original_node.value == self.called:
            self.uses += 1
        if not isinstance(original_node, cst.Call) or not self._is_called(original_node.func):
            return updated_node
        self.calls += 1
        args = updated_node.args
        first = args[0].value if args else None
        if not isinstance(first, cst.Name) or first.value != self.own or args[0].star or args[0].keyword:
            raise self.unclear()
        parent = "super()" if self.depth == 1 else f"super({self.path}, {self.own})"
        return updated_node.with_changes(func=cst.parse_expression(f"{parent}.__init__"), args=args[1:])

    def _is_called(self, func: cst.CSTNode) -> bool:
        return isinstance(func, cst.Name) and func.value == self.called

    def unclear(self) -> CodegenError:
        return self.patch.error(
            "modifies a class that inherits its __init__, so "
            f"{self.called} stands for super().__init__. Call it as {self.called}({self.own}, ...), and no other way."
        )
