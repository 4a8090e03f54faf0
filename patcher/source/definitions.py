"""Definitions of a module by their dotted names."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patcher.source.reading import Definition, first_line
from patcher.source.scopes import bound_by, top_level

#: of a property, the last part of "Class.name.setter"
ACCESSORS = ("setter", "deleter", "getter")
_BINDING = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)


def find(tree: ast.Module, name: str) -> list[ast.stmt]:
    """What a module binds a dotted name to: classes, functions, assignments and imports, guarded ones included.

    >>> [node.lineno for node in find(ast.parse("class A:\\n    if x:\\n        def f(self): ..."), "A.f")]
    [3]
    """
    *path, last = name.split(".")
    body = _inside(tree.body, path)
    if body is not None:
        return _named(body, last)
    if last in ACCESSORS and len(path) > 1:
        body = _inside(tree.body, path[:-1])
        return _named(body or [], path[-1], last)
    return []


def _inside(body: Sequence[ast.stmt], path: Sequence[str]) -> list[ast.stmt] | None:
    """The bodies of the classes that a dotted name leads to, None where there is no such class."""
    for name in path:
        classes = [node for node in top_level(body) if isinstance(node, ast.ClassDef) and node.name == name]
        if not classes:
            return None
        body = [statement for node in classes for statement in node.body]
    return list(body)


def _named(body: Sequence[ast.stmt], name: str, accessor: str = "") -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in top_level(body):
        if isinstance(node, Definition):
            if node.name == name and _accessor(node) == accessor:
                found.append(node)
        elif isinstance(node, _BINDING) and not accessor and name in bound_by(node):
            found.append(node)
    return found


def _accessor(node: Definition) -> str:
    words = [ast.unparse(decorator).rpartition(".") for decorator in node.decorator_list]
    return next((word for owner, _, word in words if owner == node.name and word in ACCESSORS), "")


def span(node: ast.stmt) -> tuple[int, int]:
    """The first and the last line of a statement, its decorators included."""
    return first_line(node) if isinstance(node, Definition) else node.lineno, node.end_lineno or node.lineno
