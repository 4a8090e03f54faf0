"""How the rest of a model calls a module: whether what a fusion assumes of its arguments can be expected."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping

from torch import nn

from patcher.fusions.rewrite import known_of_class, methods_with
from patcher.fusions.tracing import Assumptions
from patcher.source.call_sites import calls_of_child, none_by_default

__all__ = ["passes", "touches"]


def passes(modules: Mapping[str, nn.Module], path: str, assumptions: Assumptions, *, certainly: bool = False) -> str:
    """Why the calls of a module don't meet the assumptions, as far as the source of its parent tells; "" if they may.

    A rewritten method checks its assumptions itself, so this only decides whether it is worth having. With `certainly`
    a call has to be found.
    """
    if not (assumptions.none or assumptions.same):
        return ""
    parent_path = _parent_of(modules, path)
    parent = modules.get(parent_path)
    parameters = _parameters(modules[path])
    found = False
    name, _, number = path[len(parent_path) :].strip(".").partition(".")
    for call, caller in _calls(type(parent), name, bool(number)) if parent is not None else ():
        found = True
        given = _given(call, parameters)
        for parameter in assumptions.none:
            value = given.get(parameter)
            if value is None and certainly and _may_pass(call, caller, parameter):
                return f"nothing shows that {type(parent).__name__} doesn't pass {parameter}"
            if value is None or (isinstance(value, ast.Constant) and value.value is None):
                continue
            passed_on = isinstance(value, ast.Name) and value.id in _optional(caller, call)
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


def _optional(function: ast.FunctionDef, call: ast.Call) -> set[str]:
    """The parameters of a method that are None by default, and that still are when it makes a call."""
    loops = [node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if any(node is call for node in ast.walk(loop))]
    # What stands behind the call comes after it, but in a loop.
    again = {id(node) for loop in around for node in ast.walk(loop)}
    set_before = {node.id for node in _set_by(function) if node.lineno <= call.lineno or id(node) in again}
    return set(none_by_default(function)) - set_before


def _set_by(node: ast.AST) -> Iterator[ast.Name]:
    """Where a piece of code sets names; but for those that it only sets where they aren't None."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If):
        match node.test:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                yield from (one for child in node.body for one in _set_by(child) if one.id != name)
                children = list(node.orelse)
    for child in children:
        yield from _set_by(child)


def _parent_of(modules: Mapping[str, nn.Module], path: str) -> str:
    """The module whose forward calls the one at `path`: lists call nobody."""
    parent_path = path.rpartition(".")[0]
    while parent_path and type(modules.get(parent_path)) is nn.ModuleList:
        parent_path = parent_path.rpartition(".")[0]
    return parent_path


@known_of_class
def _calls(cls: type[nn.Module], name: str, listed: bool) -> list[tuple[ast.Call, ast.FunctionDef]]:
    """The calls of a child, or of the children in a list of that name, and the methods they are in."""
    found: list[tuple[ast.Call, ast.FunctionDef]] = []

    def collect(node: ast.FunctionDef) -> bool:
        found.extend((call, node) for call in calls_of_child(node, name, listed))
        return False

    methods_with(cls, collect)
    return found


def _given(call: ast.Call, parameters: list[str]) -> dict[str, ast.expr]:
    given: dict[str, ast.expr] = {}
    for parameter, argument in zip(parameters, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        given[parameter] = argument
    given.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None})
    return given


def _may_pass(call: ast.Call, caller: ast.FunctionDef, parameter: str) -> bool:
    """Whether a call may pass a parameter in arguments that its source doesn't name."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return True
    # What the caller has a name for isn't among the others that it was given.
    names = [*caller.args.posonlyargs, *caller.args.args, *caller.args.kwonlyargs]
    return any(keyword.arg is None for keyword in call.keywords) and parameter not in {one.arg for one in names}


#: What a part of a joined projection still has.
_HELD = frozenset({"weight", "bias", "in_features", "out_features"})


def touches(modules: Mapping[str, nn.Module], path: str, group: tuple[str, ...]) -> str:
    """Why a parent needs the projections as modules of their own; "" if it doesn't."""
    parent_path, _, name = path.rpartition(".")
    parent = modules.get(parent_path)
    if parent is None or not path:
        return ""
    found = _modules_used(type(parent), name, group)
    return f"{type(parent).__name__} uses {', '.join(found)} as a module" if found else ""


@known_of_class
def _modules_used(cls: type[nn.Module], name: str, group: tuple[str, ...]) -> list[str]:
    """Where methods of a class use projections of its child as modules."""
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

    methods_with(cls, collect)
    return found
