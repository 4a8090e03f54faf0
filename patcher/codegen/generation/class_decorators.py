"""Decorators of definitions: left out where the config says so, with a warning where a patch may never run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

from patcher.codegen.spec import PatchKind, PatchSpec
from patcher.errors import CodegenError, PatcherWarning
from patcher.source.definitions import find, replaced_methods
from patcher.source.edits import Edit, Text
from patcher.source.modules import SourceModule
from patcher.source.reading import Definition, parsed
from patcher.source.scopes import nearest, top_level

#: Warnings that were given: a file that is generated several times is warned of once.
_WARNED: dict[str | tuple[str, type[Warning], int], int] = {}


def dropped_decorators(config: PatchSpec, text: Text) -> Iterator[Edit]:
    """The edits that leave out the decorators that a config drops."""
    tree = text.tree
    known = {node.name for node in top_level(tree.body) if isinstance(node, Definition)}
    whole = {patch.target: patch for patch in config.patches if patch.kind is not PatchKind.MODIFY_INIT}
    for (target, name), where in config.undecorated.items():
        call = f"{where}: drop_decorators({target!r}, {name!r})"
        if target in whole:
            raise CodegenError(
                f"{call} is of no use: {whole[target].call} at {whole[target].where} replaces {target!r} with its "
                "decorators. Remove one."
            )
        if target not in known:
            near = nearest(target, known)
            raise CodegenError(f"{call} names no class or function of {config.source_module}. {near}")
        decorators = _decorators(tree, target)
        matched = [part for part in decorators if _name(part) == name]
        if not matched:
            near = nearest(name, map(_name, decorators))
            raise CodegenError(f"{call} names no decorator of {target!r} in {config.source_module}. {near}")
        for part in matched:
            yield Edit(text.start_of(part.lineno), text.start_of((part.end_lineno or part.lineno) + 1), "")


def _decorators(tree: ast.Module, name: str) -> list[ast.expr]:
    return [part for node in find(tree, name) if isinstance(node, Definition) for part in node.decorator_list]


def _name(decorator: ast.expr) -> str:
    """`a.b` of `@a.b(...)`."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def replacing(method: str, owner: str, tree: ast.Module, package: str) -> list[str]:
    """The decorators of a class that put other code in the place of one of its methods."""
    return [name for name in map(_name, _decorators(tree, owner)) if method in replaced_methods(name, tree, package)]


def warn_of_decorators(config: PatchSpec, source: SourceModule, original: ast.Module, text: str) -> None:
    """Issue a warning for each patched method that a decorator of its class may keep from running."""
    own = {*config.dropped, *config.excluded}  # what may have been bound anew
    for patch in (patch for patch in config.patches if patch.target.count(".") == 1):
        owner, _, method = patch.target.partition(".")
        for name in map(_name, _decorators(original, owner)):
            tree = parsed(text) if name.partition(".")[0] in own else original
            if (owner, name) not in config.undecorated and method in replaced_methods(name, tree, source.package):
                warnings.warn_explicit(
                    f"{patch.call} may never run: @{name} of {owner} puts another {method} in the place of the "
                    f"class's own. Leave the decorator out with config.drop_decorators({owner!r}, {name!r}).",
                    PatcherWarning,
                    patch.where.file,
                    patch.where.line,
                    registry=_WARNED,
                )
