"""Classes whose stacked experts are listed, as code: the class itself changed, or a class that inherits from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import libcst as cst
from torch import nn

from patcher.codegen.dependencies import RUNTIME
from patcher.codegen.owning_classes import Owners, becomes_one_class
from patcher.fusions.rewrite import class_text
from patcher.source import trees

__all__ = ["list_experts"]

_WHY = "each expert is a plain linear layer, and runs by itself"


def list_experts(
    owners: Owners, original: type[nn.Module], fused: Mapping[str, Any], refused: Mapping[str, str]
) -> None:
    """The code of a class with a list of layers in the place of each stack, and the forward that goes one by one.

    The arguments are those of `join_projections`. The class is replaced as a whole, because decorators of the original
    choose among forwards that need stacks.
    """
    described, name = owners.described, original.__name__
    described.add_import(RUNTIME, names=["list_stack"])
    first: Any = next(iter(fused.values()))
    alike = becomes_one_class(owners, original, fused)
    if text := _replacement(original, first, _listing(first, "self")) if alike else "":
        described.replace_class(name, text, _WHY)
        return

    def write(cls: Any, new: str) -> tuple[str, str]:
        return class_text(new, name, str(cls.__doc__), cls._rewritten.values()), _WHY

    def change(cls: Any, part: str) -> tuple[str, str]:
        return _listing(cls, part), f"{part.removeprefix('self.')} is a list of linear layers"

    owners.make_subclasses(name, fused, refused, write, change)


def _replacement(original: type[nn.Module], fused: Any, listing: str) -> str:
    """The class, with another forward and more in its `__init__`; empty where it doesn't have these two itself."""
    node = trees.read_class(original)
    own = {item.name.value: item for item in node.body.body if isinstance(item, cst.FunctionDef)}
    ((name, source),) = fused._rewritten.items()
    if "__init__" not in own or name not in own:
        return ""
    init, forward = own["__init__"], cst.parse_statement(source)
    statements = [*init.body.body, *cst.parse_module(listing).body]
    edits: dict[cst.CSTNode, list[Any]] = {
        own[name]: [forward.with_changes(leading_lines=own[name].leading_lines)],
        init: [init.with_changes(body=init.body.with_changes(body=statements))],
    }
    changed = cast(cst.ClassDef, node.visit(trees.Rewriter(edits, node)))
    return trees.code_of(changed.with_changes(decorators=[], leading_lines=[]))


def _listing(fused: Any, module: str) -> str:
    """The statements that list the stacks of a module."""
    lines = []
    for stack in fused._stacks:
        options = f', bias="{stack.bias}"' if stack.bias else ""
        options += ", transposed=True" if stack.transposed else ""
        lines.append(f'list_stack({module}, "{stack.name}"{options})\n')
    return "".join(lines)
