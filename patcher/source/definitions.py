"""Definitions of a module by their dotted names."""

from __future__ import annotations

import ast
import functools

from patcher.source.reading import Definition
from patcher.source.scopes import bound_by, top_level

_BINDING = (Definition, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)


def find(tree: ast.Module, name: str) -> list[ast.stmt]:
    """What a module binds a dotted name to: classes, functions, assignments and imports, guarded ones included.

    >>> [node.lineno for node in find(ast.parse("class A:\\n    if x:\\n        def f(self): ..."), "A.f")]
    [3]
    """
    owner, _, last = name.rpartition(".")
    if not owner:
        return list(_by_name(tree).get(last, []))
    classes = [node for node in _by_name(tree).get(owner, []) if isinstance(node, ast.ClassDef)]
    body = [node for cls in classes for node in top_level(cls.body) if isinstance(node, _BINDING)]
    return [node for node in body if last in bound_by(node) and not is_accessor(node)]


@functools.lru_cache(maxsize=8)
def _by_name(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """The definitions, assignments and imports of a module, by the names that they bind."""
    found: dict[str, list[ast.stmt]] = {}
    for node in top_level(tree.body):
        if isinstance(node, _BINDING):
            for name in bound_by(node):
                found.setdefault(name, []).append(node)
    return found


def is_accessor(node: ast.stmt) -> bool:
    """Whether a definition belongs to the one of a property above, `@name.setter`."""
    words = [ast.unparse(each).rpartition(".") for each in getattr(node, "decorator_list", ())]
    return any(owner == getattr(node, "name", "") and owner for owner, _, _ in words)
