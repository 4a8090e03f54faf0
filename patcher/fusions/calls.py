"""How the rest of a model calls a module: whether what a fusion assumes of its arguments can be expected."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping

from torch import nn

from patcher.fusions.rewrite import methods_with
from patcher.fusions.tracing import Assumptions

__all__ = ["passes", "touches"]


def passes(modules: Mapping[str, nn.Module], path: str, assumptions: Assumptions, *, certainly: bool = False) -> str:
    """Why the calls of a module don't meet the assumptions, as far as the source of its parent tells; "" if they may.

    A rewritten method checks its assumptions itself, so this only decides whether it is worth having. With `certainly`
    a call has to be found.
    """
    if not (assumptions.none or assumptions.same):
        return ""
    parent_path, _, name = path.rpartition(".")
    parent = modules.get(parent_path)
    parameters = _parameters(modules[path])
    found = False
    for call, caller in _calls(parent, name) if parent is not None else ():
        found = True
        given = _given(call, parameters)
        for parameter in assumptions.none:
            value = given.get(parameter)
            if value is None or (isinstance(value, ast.Constant) and value.value is None):
                continue
            passed_on = isinstance(value, ast.Name) and value.id in _optional(caller)
            # It passes on what it is given: whether that is anything, its own parent says.
            if passed_on and not passes(modules, parent_path, Assumptions(none=(value.id,)), certainly=True):  # type: ignore[attr-defined]
                continue
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
    if certainly and not found:
        return "nothing shows how it is called"
    return ""


def _parameters(module: nn.Module) -> list[str]:
    code = inspect.unwrap(type(module).forward).__code__
    return list(code.co_varnames[1 : code.co_argcount])


def _optional(function: ast.FunctionDef) -> set[str]:
    """The parameters of a method that are None by default and that it doesn't set itself."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(parameters), reversed(arguments.defaults), strict=False)]
    pairs += [
        (one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
    ]
    names = {one.arg for one, default in pairs if isinstance(default, ast.Constant) and default.value is None}
    return names - {
        child.id for child in ast.walk(function) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }


def _calls(parent: nn.Module, name: str) -> Iterator[tuple[ast.Call, ast.FunctionDef]]:
    found: list[tuple[ast.Call, ast.FunctionDef]] = []

    def collect(node: ast.FunctionDef) -> bool:
        for child in ast.walk(node):
            if (
                isinstance(child, ast.Call)
                and isinstance(child.func, ast.Attribute)
                and child.func.attr == name
                and isinstance(child.func.value, ast.Name)
            ):
                found.append((child, node))
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


#: What a part of a joined projection still has.
_HELD = frozenset({"weight", "bias", "in_features", "out_features"})


def touches(modules: Mapping[str, nn.Module], path: str, group: tuple[str, ...]) -> str:
    """Why a parent needs the projections as modules of their own; "" if it doesn't."""
    parent_path, _, name = path.rpartition(".")
    parent = modules.get(parent_path)
    if parent is None or not path:
        return ""
    found: list[str] = []

    def collect(node: ast.FunctionDef) -> bool:
        held = {
            id(child.value) for child in ast.walk(node) if isinstance(child, ast.Attribute) and child.attr in _HELD
        }
        held |= {id(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)}
        found.extend(
            ast.unparse(child)
            for child in ast.walk(node)
            if isinstance(child, ast.Attribute)
            and child.attr in group
            and isinstance(child.value, ast.Attribute)
            and child.value.attr == name
            and id(child) not in held
        )
        return False

    methods_with(type(parent), collect)
    return f"{type(parent).__name__} uses {', '.join(found)} as a module" if found else ""
