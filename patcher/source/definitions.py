"""Definitions of a module: found by their dotted names, and without what makes no difference to what they do."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from typing import Any

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


#: the fingerprint of what isn't there
NOTHING = "none"
_LEFT_OUT = frozenset({"ctx", "type_comment", "kind"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def canonical(node: Any, *, annotations: bool = True) -> Any:
    """A syntax tree without positions, docstrings and empty fields, so that all releases of Python agree.

    >>> written, formatted = ast.parse("def f(x): 'Doc.'; return x"), ast.parse("def f( x ):  # note\\n    return (x)")
    >>> canonical(written) == canonical(formatted)
    True

    Args:
        node: a node, a list of them, or the value of a field.
        annotations: with those of parameters and of what functions return, which nothing runs.
    """
    if isinstance(node, list):
        return [canonical(item, annotations=annotations) for item in node]
    if not isinstance(node, ast.AST):
        return node
    left_out = _LEFT_OUT
    if not annotations and isinstance(node, (*_FUNCTIONS, ast.arg)):
        left_out |= {"returns", "annotation"}
    fields = {}
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        if value is not None and value != [] and name not in left_out:
            fields[name] = canonical(value, annotations=annotations)
    return (type(node).__name__, sorted(fields.items()))


def fingerprint(definitions: Iterable[ast.stmt]) -> str:
    """A short name of what definitions do: of all that have one name, as in the branches of an `if`.

    >>> fingerprint(ast.parse("def f(x: int): return x").body) == fingerprint(ast.parse("def f(x): return (x)").body)
    True

    It is of the syntax tree without docstrings, and without the annotations of functions, which nothing runs:
    more than half of what one release of transformers changes in the methods of another is nothing but that.
    """
    trees = [canonical(node, annotations=False) for node in definitions]
    return hashlib.sha256(repr(trees).encode()).hexdigest()[:8] if trees else NOTHING
