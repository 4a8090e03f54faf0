"""Which methods of a class its decorators replace, read from their source.

`@use_experts_implementation` puts a `forward` of its own in the place of the class's, which asks the config whose code
is to run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

from patcher.source.modules import find_spec
from patcher.source.scopes import ImportedName, imported_names, statements_of

#: Decorators of the package `kernels`, which needn't be installed here, and what they replace once kernels are used.
_FROM_HUB = {"use_kernel_forward_from_hub": frozenset({"forward"})}


def replaced_methods(name: str, tree: ast.Module, package: str) -> frozenset[str]:
    """The methods of a class that a decorator, by its name in a module, replaces by code that doesn't call them."""
    return _replaced(name, _functions(tree), imported_names(tree), package)


@lru_cache(maxsize=8)
def _functions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in statements_of(tree, ast.FunctionDef):
        found.setdefault(node.name, []).append(node)
    return found


def _replaced(
    name: str, functions: dict[str, list[ast.FunctionDef]], imported: dict[str, ImportedName], package: str
) -> frozenset[str]:
    """The methods of a class that a decorator replaces, by other code than one that calls them."""
    if name in _FROM_HUB:
        return _FROM_HUB[name]
    if name in functions:
        return frozenset(method for node in functions[name] for method in _dispatched(node))
    origin = imported.get(name)
    if origin is None or not origin.attribute:
        return frozenset()
    return _replaced_by(origin.module_in(package), origin.attribute)


@cache
def _replaced_by(module: str, name: str) -> frozenset[str]:
    spec = find_spec(module)
    if name in _FROM_HUB or spec is None or not (spec.origin or "").endswith(".py"):
        return _FROM_HUB.get(name, frozenset())
    tree = ast.parse(Path(spec.origin or "").read_bytes())
    return _replaced(name, _functions(tree), imported_names(tree), spec.parent or "")


def _dispatched(decorator: ast.FunctionDef) -> Iterator[str]:
    """The attributes of its argument that a decorator sets to functions that don't call what was there."""
    inner = {node.name: node for node in ast.walk(decorator) if isinstance(node, ast.FunctionDef)}
    assignments = [node for node in ast.walk(decorator) if isinstance(node, ast.Assign)]
    kept = {
        target.id: node.value.attr
        for node in assignments
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Attribute)
    }
    for node in assignments:
        for target in node.targets:
            new = inner.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if isinstance(target, ast.Attribute) and new is not None:
                called = [part.func for part in ast.walk(new) if isinstance(part, ast.Call)]
                if target.attr not in {kept.get(func.id) for func in called if isinstance(func, ast.Name)}:
                    yield target.attr
