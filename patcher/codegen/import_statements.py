"""Import statements: relative ones made absolute, names dropped, others added."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import libcst as cst

from patcher.codegen.spec import Import
from patcher.errors import CodegenError
from patcher.source.modules import SourceModule
from patcher.source.reading import Location
from patcher.source.trees import statements, without

_WITH_STATEMENTS = (
    cst.Module,
    cst.BaseCompoundStatement,
    cst.BaseSuite,
    cst.SimpleStatementLine,
    cst.Else,
    cst.Finally,
    cst.ExceptHandler,
    cst.ExceptStarHandler,
    cst.MatchCase,
)


class _Absolute(cst.CSTTransformer):
    """Rewrites `from ..x import y`. Only statements are visited: an import can't hide in an expression."""

    def __init__(self, source: SourceModule, where: Location) -> None:
        super().__init__()
        self.source = source
        self.where = where

    def on_visit(self, node: cst.CSTNode) -> bool:
        return isinstance(node, _WITH_STATEMENTS)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if not isinstance(original_node, cst.ImportFrom) or not original_node.relative:
            return updated_node
        module = original_node.module
        tail = cst.Module([]).code_for_node(module) if module is not None else ""
        name = absolute_name(tail, len(original_node.relative), self.source, self.where)
        dotted = cst.parse_expression(name)
        after = original_node.whitespace_after_from
        return updated_node.with_changes(
            relative=(),
            module=dotted,
            whitespace_after_from=after if not after.empty else cst.SimpleWhitespace(" "),
            whitespace_before_import=(
                original_node.whitespace_before_import
                if not original_node.whitespace_before_import.empty
                else cst.SimpleWhitespace(" ")
            ),
        )


def absolute_name(tail: str, level: int, source: SourceModule, where: Location) -> str:
    """The absolute name of a module that an import statement with so many dots names."""
    try:
        return importlib.util.resolve_name("." * level + tail, source.package)
    except ImportError:
        raise CodegenError(
            f"{where}: {source.name} imports from {'.' * level}{tail}, which is above its top package "
            f"{source.package!r}. Such a module can't be imported either: name the module by its full dotted name."
        ) from None


def make_absolute(module: cst.Module, source: SourceModule, where: Location) -> cst.Module:
    """The module with every relative import made absolute, those in functions and guards included."""
    return module.visit(_Absolute(source, where))


class _Drop(cst.CSTTransformer):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def on_visit(self, node: cst.CSTNode) -> bool:
        return isinstance(node, _WITH_STATEMENTS) and not isinstance(node, (cst.ClassDef, cst.FunctionDef))

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.SimpleStatementLine) and not updated_node.body:
            return cst.RemoveFromParent()
        if not isinstance(original_node, (cst.Import, cst.ImportFrom)):
            return updated_node
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node
        removed = [alias for alias in original_node.names if bound_name(alias) in self.names]
        if len(removed) == len(original_node.names):
            return cst.RemoveFromParent()
        return updated_node.with_changes(names=without(original_node.names, removed)) if removed else updated_node


def bound_name(alias: cst.ImportAlias) -> str:
    """The name that one part of an import statement binds."""
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return alias.evaluated_name.split(".")[0]


def drop_names(module: cst.Module, names: Collection[str]) -> cst.Module:
    """The module with these names left out of the imports of its top level."""
    return module.visit(_Drop(names)) if names else module


def merge(imports: Iterable[Import]) -> list[Import]:
    """The statements in a fixed order, one for each module: the order of the config doesn't matter."""
    plain, named = dict[tuple[str, str], Import](), dict[str, Import]()
    for entry in imports:
        if not entry.names:
            plain.setdefault((entry.module, entry.alias), entry)
        else:
            known = named.get(entry.module)
            names = sorted({*entry.names, *(known.names if known else ())})
            named[entry.module] = Import(entry.module, tuple(names), "", (known or entry).where)
    return [plain[key] for key in sorted(plain)] + [named[key] for key in sorted(named)]


def last_import(module: cst.Module) -> Any:
    """The statement behind which new imports go: the last one with an import above the first definition.

    Returns:
        That statement, or the docstring if there is no import, or None.
    """
    found = None
    for index, node in enumerate(module.body):
        if isinstance(node, (cst.ClassDef, cst.FunctionDef)):
            break
        if _has_import([node]) or (index == 0 and _is_docstring(node)):
            found = node
    return found


def _has_import(body: Sequence[Any]) -> bool:
    return any(
        isinstance(part, (cst.Import, cst.ImportFrom))
        for node in statements(body)
        for part in (node.body if isinstance(node, cst.SimpleStatementLine) else [node])
    )


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )
