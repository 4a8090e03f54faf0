"""`exclude_from_output`: definitions that the file leaves out, and their entries in `__all__`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import libcst as cst

from patcher.codegen.spec import Patch
from patcher.errors import CodegenError
from patcher.source import trees as tree
from patcher.source.reading import Location
from patcher.source.scopes import nearest


def exclude(
    module: cst.Module, excluded: Sequence[tuple[str, Location]], patches: Sequence[Patch], source: str
) -> dict[cst.CSTNode, Sequence[Any]]:
    """The edits that leave names out of a module.

    Raises:
        CodegenError: for a name that the module doesn't define, or that is patched as well.
    """
    if not excluded:
        return {}
    edits: dict[cst.CSTNode, Sequence[Any]] = {}
    known: dict[str, list[Any]] = {}
    for node in tree.statements(module.body):
        name = tree.bound_by(node)
        if name.isidentifier():
            known.setdefault(name, []).append(node)
    patched = {patch.target.split(".")[0]: patch for patch in patches}
    for name, where in excluded:
        if name not in known:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) names no class, function or constant of {source}. "
                f"{nearest(name, known)}"
            )
        if name in patched:
            raise CodegenError(
                f"{where}: exclude_from_output({name!r}) leaves out what {patched[name].asked} at "
                f"{patched[name].where} patches. Remove one."
            )
        edits.update((node, ()) for node in known[name])
    names = {name for name, _ in excluded}
    for node in known.get("__all__", []):
        edits[node] = [cast(cst.SimpleStatementLine, node.visit(_Unlisted(names)))]
    return edits


class _Unlisted(cst.CSTTransformer):
    """Removes the strings of `__all__` that name what is left out."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if not isinstance(original_node, (cst.List, cst.Tuple)):
            return updated_node
        removed = [element for element in original_node.elements if self._names_it(element.value)]
        if not removed:
            return updated_node
        return original_node.with_changes(elements=tree.without(original_node.elements, removed))

    def _names_it(self, value: cst.BaseExpression) -> bool:
        return isinstance(value, cst.SimpleString) and value.evaluated_value in self.names
