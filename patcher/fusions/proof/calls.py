"""How the rest of a model calls a module: whether what a fusion assumes of its arguments can be expected."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping

from torch import nn

from patcher.fusions.methods import known_of_class, trees_of
from patcher.fusions.proof.tracing import Guards
from patcher.source.call_sites import calls_of_child, none_by_default, positional_parameters


def passes(modules: Mapping[str, nn.Module], path: str, guards: Guards, *, certainly: bool = False) -> str:
    """Why the calls of a module don't meet the guards, as far as the source of its parent tells; "" if they may.

    A rewritten method checks its guards itself, so this only decides whether it is worth having. With `certainly`
    a call has to be found.
    """
    if not (guards.none or guards.same):
        return ""
    parent_path = _parent_of(modules, path)
    parent = modules.get(parent_path)
    parameters = _parameters(modules[path])
    found = False
    name, _, number = path[len(parent_path) :].strip(".").partition(".")
    for call, caller in _calls(type(parent), name, bool(number)) if parent is not None else ():
        found = True
        given = _given(call, parameters)
        for parameter in guards.none:
            match given.get(parameter):
                case None if certainly and _may_pass(call, caller, parameter):
                    return f"nothing shows that {type(parent).__name__} doesn't pass {parameter}"
                case None | ast.Constant(value=None):
                    continue
                case ast.Name(id=name) if name in _optional(caller, call):
                    # It passes on what it is given: whether that is anything, its own parent says.
                    if not passes(modules, parent_path, Guards(none=(name,)), certainly=True):
                        continue
            what = "with a cache it has another input" if parameter.startswith("past_") else "cross attention"
            return f"{what}: {type(parent).__name__} passes {parameter}={ast.unparse(given[parameter])}"
        if guards.same:
            shown = [f"{one}={ast.unparse(given[one])}" if one in given else f"no {one}" for one in guards.same]
            if len({ast.dump(given[one]) if one in given else one for one in guards.same}) > 1:
                return f"its inputs may be different tensors: {type(parent).__name__} passes {', '.join(shown)}"
            if not all(isinstance(given[one], ast.Name) for one in guards.same):
                return f"its inputs are computed one by one: {type(parent).__name__} passes an expression"
    if guards.same and not found:
        return f"nothing shows that {', '.join(guards.same)} are one tensor"
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
    return [(call, tree) for tree in trees_of(cls).values() for call in calls_of_child(tree, name, listed)]


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
    names = [*positional_parameters(caller), *caller.args.kwonlyargs]
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
    if not found:
        return ""
    methods = dict.fromkeys(f"{type(parent).__name__}.{method}()" for method, _ in found)
    uses = dict.fromkeys(text for _, text in found)
    return f"{' and '.join(methods)} takes {', '.join(uses)}, which must stay modules of their own for that"


@known_of_class
def _modules_used(cls: type[nn.Module], name: str, group: tuple[str, ...]) -> list[tuple[str, str]]:
    """(method, how) of the uses that methods of a class make of projections of its child as modules."""
    found: list[tuple[str, str]] = []
    for method, tree in trees_of(cls).items():
        held: list[ast.expr] = []
        for node in ast.walk(tree):  # a node comes before those inside of it
            match node:
                case ast.Attribute(value=ast.Attribute(attr=child), attr=attr) if child == name and attr in group:
                    if node not in held:
                        found.append((method, ast.unparse(node)))
                case ast.Attribute(value=inner, attr=attr) if attr in _HELD:
                    held.append(inner)
                case ast.Call(func=inner):
                    held.append(inner)
    return found
