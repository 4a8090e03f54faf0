"""Definitions of a module: looked up by dotted name, fingerprinted, and the methods that their decorators replace."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from patcher.source.modules import find_spec
from patcher.source.scopes import Definition, bound_by, imported_names, statements_of, top_level

#: The fingerprint of a definition that doesn't exist.
NOTHING = "none"
_BINDING = (Definition, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind"})
#: Decorators of the package `kernels`, which needn't be installed, and what they replace once kernels are used.
_FROM_HUB = {"use_kernel_forward_from_hub": frozenset({"forward"})}


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


def replaced_methods(name: str, tree: ast.Module, package: str) -> frozenset[str]:
    """Return the methods of a class that a decorator of a module replaces by code that doesn't call them.

    `@use_experts_implementation`, for example, replaces the `forward` by one that dispatches on the config.
    """
    if name in _FROM_HUB:
        return _FROM_HUB[name]
    functions, origin = _functions(tree).get(name), imported_names(tree).get(name)
    if functions is not None:
        return frozenset(method for function in functions for method in _overwritten(function))
    if origin is None or not origin.attribute:
        return frozenset()
    module = importlib.util.resolve_name("." * origin.level + origin.module, package)
    return replaced_by_decorator_of(module, origin.attribute)


@functools.cache
def replaced_by_decorator_of(module: str, name: str) -> frozenset[str]:
    """Return the methods that a decorator replaces which a module defines or imports."""
    spec = find_spec(module)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return _FROM_HUB.get(name, frozenset())
    return replaced_methods(name, ast.parse(Path(spec.origin or "").read_bytes()), spec.parent or "")


@functools.lru_cache(maxsize=8)
def _functions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    functions: dict[str, list[ast.FunctionDef]] = {}
    for node in statements_of(tree, ast.FunctionDef):
        functions.setdefault(node.name, []).append(node)
    return functions


def _overwritten(decorator: ast.FunctionDef) -> Iterator[str]:
    """Yield the attributes of its argument that a decorator sets to functions which don't call the previous value."""
    functions = {node.name: node for node in ast.walk(decorator) if isinstance(node, ast.FunctionDef)}
    assignments = [node for node in ast.walk(decorator) if isinstance(node, ast.Assign)]
    saved = {
        target.id: node.value.attr
        for node in assignments
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Attribute)
    }
    for node in assignments:
        new = functions.get(node.value.id) if isinstance(node.value, ast.Name) else None
        for target in (target for target in node.targets if isinstance(target, ast.Attribute) and new is not None):
            called = [call.func for call in ast.walk(new) if isinstance(call, ast.Call)]  # type: ignore[arg-type]
            if target.attr not in {saved.get(function.id) for function in called if isinstance(function, ast.Name)}:
                yield target.attr
