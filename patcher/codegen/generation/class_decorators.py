"""Decorators of definitions: left out where the config says so, and told of where a patch would never run under one.

`@use_experts_implementation` puts a `forward` of its own in the place of the class's, which asks the config whose code
is to run. What a decorator does is read from its source, as everything here is.
"""

from __future__ import annotations

import ast
import io
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from patcher.codegen.spec import PatchKind, PatchSpec
from patcher.errors import CodegenError, PatcherWarning
from patcher.source.modules import find_spec
from patcher.source.reading import parsed
from patcher.source.scopes import ImportedName, imported_names, nearest, statements_of, top_level

#: What was said: a file that is generated several times is warned of once.
_WARNED: dict[str | tuple[str, type[Warning], int], int] = {}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
#: Decorators of the package `kernels`, which needn't be installed here, and what they replace once kernels are used.
_FROM_HUB = {"use_kernel_forward_from_hub": frozenset({"forward"})}


def without_decorators(config: PatchSpec, text: str) -> str:
    """The text of a file without the decorators that its config drops."""
    if not config.undecorated:
        return text
    lines = list(io.StringIO(text, newline=""))  # as Python counts them
    found = _definitions(ast.parse(text))
    whole = {patch.target: patch for patch in config.patches if patch.kind is not PatchKind.MODIFY_INIT}
    gone: set[int] = set()
    for (target, name), where in config.undecorated.items():
        asked = f"{where}: drop_decorators({target!r}, {name!r})"
        if target in whole:
            raise CodegenError(
                f"{asked} is of no use: {whole[target].asked} at {whole[target].where} replaces {target!r} with its "
                "decorators. Remove one."
            )
        if target not in found:
            known = nearest(target, found)
            raise CodegenError(f"{asked} names no class or function of {config.source_module}. {known}")
        decorators = [(each, part) for each in found[target] for part in each.decorator_list]
        matched = [part for _, part in decorators if _name(part) == name]
        if not matched:
            known = nearest(name, (_name(part) for _, part in decorators))
            raise CodegenError(f"{asked} names no decorator of {target!r} in {config.source_module}. {known}")
        gone.update(line for part in matched for line in range(part.lineno - 1, part.end_lineno or part.lineno))
    return "".join(line for number, line in enumerate(lines) if number not in gone)


def _definitions(tree: ast.Module) -> dict[str, list[Definition]]:
    found: dict[str, list[Definition]] = {}
    for node in top_level(tree.body):
        if isinstance(node, Definition):
            found.setdefault(node.name, []).append(node)
    return found


def _name(decorator: ast.expr) -> str:
    """`a.b` of `@a.b(...)`."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def warn_of_decorators(config: PatchSpec, text: str) -> None:
    """Issue a warning for each patched method that a decorator of its class may keep from running."""
    patched = [patch for patch in config.patches if patch.target.count(".") == 1]
    if not patched:
        return
    tree = parsed(text)
    imported, found, functions = imported_names(tree), _definitions(tree), _functions(tree)
    for patch in patched:
        owner, _, method = patch.target.partition(".")
        for decorator in (part for node in found.get(owner, ()) for part in node.decorator_list):
            name = _name(decorator)
            if method in _replaced(name, functions, imported):
                warnings.warn_explicit(
                    f"{patch.asked} may never run: @{name} of {owner} puts another {method} in the place of the "
                    f"class's own. Leave the decorator out with config.drop_decorators({owner!r}, {name!r}).",
                    PatcherWarning,
                    patch.where.file,
                    patch.where.line,
                    registry=_WARNED,
                )


def _functions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in statements_of(tree, ast.FunctionDef):
        found.setdefault(node.name, []).append(node)
    return found


def _replaced(
    name: str, functions: dict[str, list[ast.FunctionDef]], imported: dict[str, ImportedName]
) -> frozenset[str]:
    """The methods of a class that a decorator replaces, by other code than one that calls them."""
    if name in _FROM_HUB:
        return _FROM_HUB[name]
    if name in functions:
        return frozenset(method for node in functions[name] for method in _dispatched(node))
    origin = imported.get(name)
    if origin is None or not origin.attribute or origin.level:
        return frozenset()
    return _replaced_by(origin.module, origin.attribute)


@cache
def _replaced_by(module: str, name: str) -> frozenset[str]:
    spec = find_spec(module)
    if name in _FROM_HUB or spec is None or not (spec.origin or "").endswith(".py"):
        return _FROM_HUB.get(name, frozenset())
    tree = ast.parse(Path(spec.origin or "").read_bytes())
    package = module.split(".")
    is_package = spec.submodule_search_locations is not None
    imported = {}
    for bound, origin in imported_names(tree).items():
        around = package[: len(package) - origin.level + is_package]
        full = ".".join([*around, origin.module]) if origin.level else origin.module
        imported[bound] = origin._replace(module=full, level=0)
    return _replaced(name, _functions(tree), imported)


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
