"""How the rest of a model calls a module: whether what a fusion assumes of its arguments can be expected."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping

from torch import nn

from patcher.fusions.rewrite import methods_with
from patcher.fusions.tracing import Assumptions

__all__ = ["passes"]


def passes(modules: Mapping[str, nn.Module], path: str, assumptions: Assumptions) -> str:
    """Why the calls of a module don't meet the assumptions, as far as the source of its parent tells; "" if they may.

    A rewritten method checks its assumptions itself, so this only decides whether it is worth having.
    """
    if not (assumptions.none or assumptions.same):
        return ""
    parent_path, _, name = path.rpartition(".")
    parent = modules.get(parent_path)
    parameters = _parameters(modules[path])
    found = False
    for call in _calls(parent, name) if parent is not None else ():
        found = True
        given = _given(call, parameters)
        for parameter in assumptions.none:
            value = given.get(parameter)
            if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
                return f"cross attention: {type(parent).__name__} passes {parameter}={ast.unparse(value)}"
        if assumptions.same:
            values = {ast.dump(given[one]) if one in given else "" for one in assumptions.same}
            if len(values) > 1 or "" in values:
                shown = ", ".join(
                    f"{one}={ast.unparse(given[one])}" if one in given else f"no {one}" for one in assumptions.same
                )
                return f"its inputs differ: {type(parent).__name__} passes {shown}"
            if not all(isinstance(given[one], ast.Name) for one in assumptions.same):
                return f"its inputs are computed one by one: {type(parent).__name__} passes an expression"
    if assumptions.same and not found:
        return f"nothing shows that {', '.join(assumptions.same)} are one tensor"
    return ""


def _parameters(module: nn.Module) -> list[str]:
    code = inspect.unwrap(type(module).forward).__code__
    return list(code.co_varnames[1 : code.co_argcount])


def _calls(parent: nn.Module, name: str) -> Iterator[ast.Call]:
    found: list[ast.Call] = []

    def collect(node: ast.FunctionDef) -> bool:
        for child in ast.walk(node):
            if (
                isinstance(child, ast.Call)
                and isinstance(child.func, ast.Attribute)
                and child.func.attr == name
                and isinstance(child.func.value, ast.Name)
            ):
                found.append(child)
        return False

    methods_with(type(parent), collect)
    yield from found


def _given(call: ast.Call, parameters: list[str]) -> dict[str, ast.expr]:
    given: dict[str, ast.expr] = {}
    for parameter, argument in zip(parameters, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        given[parameter] = argument
    given.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None})
    return given
