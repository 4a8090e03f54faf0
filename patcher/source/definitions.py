"""Definitions of a module: looked up by dotted name, fingerprinted, and their decorators."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from typing import Any

from patcher.source.scopes import Definition, bound_by, top_level

#: The fingerprint of a definition that doesn't exist.
NOTHING = "none"
_BINDING = (Definition, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind"})


def find(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return what a module binds a dotted name to: classes, functions, assignments and imports, guarded ones included.

    >>> [node.lineno for node in find(ast.parse("class A:\\n    if x:\\n        def f(self): ..."), "A.f")]
    [3]
    """
    owner, _, member = name.rpartition(".")
    if not owner:
        return list(_by_name(tree).get(member, []))
    classes = [node for node in _by_name(tree).get(owner, []) if isinstance(node, ast.ClassDef)]
    body = [node for cls in classes for node in top_level(cls.body) if isinstance(node, _BINDING)]
    return [node for node in body if member in bound_by(node) and not is_accessor(node)]


@functools.lru_cache(maxsize=8)
def _by_name(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    nodes: dict[str, list[ast.stmt]] = {}
    for node in top_level(tree.body):
        for name in bound_by(node) if isinstance(node, _BINDING) else ():
            nodes.setdefault(name, []).append(node)
    return nodes


def is_accessor(node: ast.stmt) -> bool:
    """Whether a definition is a setter or deleter of the property above, `@name.setter`."""
    decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())]
    return any(decorator.rpartition(".")[0] == getattr(node, "name", None) for decorator in decorators)


def canonical(node: Any, *, annotations: bool = True) -> Any:
    """Return a syntax tree without positions, docstrings and empty fields, equal for all releases of Python.

    >>> written, formatted = ast.parse("def f(x): 'Doc.'; return x"), ast.parse("def f( x ):  # note\\n    return (x)")
    >>> canonical(written) == canonical(formatted)
    True

    Args:
        node: a node, a list of nodes, or the value of a field.
        annotations: whether the annotations of parameters and return values, which nothing runs, are included.
    """
    if isinstance(node, list):
        return [canonical(item, annotations=annotations) for item in node]
    if not isinstance(node, ast.AST):
        return node
    skipped = _SKIPPED_FIELDS
    if not annotations and isinstance(node, (*_FUNCTIONS, ast.arg)):
        skipped |= {"returns", "annotation"}
    fields = {}
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        if value is not None and value != [] and name not in skipped:
            fields[name] = canonical(value, annotations=annotations)
    return (type(node).__name__, sorted(fields.items()))


def fingerprint(definitions: Iterable[ast.stmt]) -> str:
    """Return a short hash of definitions: of all that share a name, such as the branches of an `if`.

    >>> fingerprint(ast.parse("def f(x: int): return x").body) == fingerprint(ast.parse("def f(x): return (x)").body)
    True

    Docstrings and the annotations of functions, which nothing runs, don't count: they are more than half of what one
    release of transformers changes in the methods of another.
    """
    trees = [canonical(node, annotations=False) for node in definitions]
    return hashlib.sha256(repr(trees).encode()).hexdigest()[:8] if trees else NOTHING


def decorators_of(tree: ast.Module, name: str) -> list[ast.expr]:
    """Return the decorators of a class or function of a module."""
    return [part for node in find(tree, name) if isinstance(node, Definition) for part in node.decorator_list]


def decorator_name(decorator: ast.expr) -> str:
    """Return `a.b` for `@a.b(...)`."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
