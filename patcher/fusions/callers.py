"""How a parent module calls a child, and which of the child's children it uses, according to its source."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import nn

from patcher.fusions.methods import nodes_of, readable, trees_of
from patcher.fusions.purity import Body
from patcher.source.call_sites import calls_of_child, none_by_default

#: The attributes that a joined projection keeps.
KEPT = frozenset({"weight", "bias", "in_features", "out_features"})


class Caller:
    """The module whose methods call the one at `path`: the closest parent that isn't an `nn.ModuleList`."""

    def __init__(self, modules: Mapping[str, nn.Module], path: str) -> None:
        self.modules = modules
        self.path = path.rpartition(".")[0]
        while self.path and type(modules.get(self.path)) is nn.ModuleList:
            self.path = self.path.rpartition(".")[0]
        self.module = modules.get(self.path) if path else None
        self.name, _, index = path[len(self.path) :].strip(".").partition(".")
        self.is_listed = bool(index)
        self.parameters = _parameters(modules[path]) if path in modules else []
        #: the attributes whose values determine which calls run
        self.constants: dict[str, Any] = {}

    @property
    def classes(self) -> tuple[Any, ...]:
        """What determines how the module is called: the classes and names of the modules around it."""
        parts = self.path.split(".") if self.path else []
        ancestors = [".".join(parts[:depth]) for depth in range(len(parts) + 1)] if self.module is not None else []
        names = [re.sub(r"\d+", "0", part) for part in parts]
        return self.name, self.is_listed, tuple(type(self.modules.get(path)) for path in ancestors), tuple(names)

    @cached_property
    def calls(self) -> list[tuple[dict[str, ast.expr], ast.Call, ast.FunctionDef]]:
        """The arguments of each call by parameter, the call, and the method that it is in.

        Calls in branches that the attributes of the module rule out are left out.
        """
        found = []
        for _, method in readable(type(self.module)) if self.module is not None else ():
            calls = calls_of_child(method.node, self.name, self.is_listed)
            body = Body(method, self.module) if calls else None
            reached = set(body.reached()) if body is not None else set()
            if body is not None and not reached.issuperset(calls):
                self.constants |= body.constants
            for call in calls:
                if call in reached:
                    found.append((_arguments_by_parameter(call, self.parameters), call, method.node))
        return found

    def passes(self, parameter: str) -> str:
        """Describe what is passed for a parameter that is None by default, "" if nothing but None."""
        for arguments, _, tree in self.calls:
            match arguments.get(parameter):
                case None | ast.Constant(value=None):
                    continue
                case ast.Name(id=name) if name in none_by_default(tree):  # it passes on its own argument
                    if Caller(self.modules, self.path)._passes_nothing(name):
                        continue
            return f"{type(self.module).__name__} passes {parameter}={ast.unparse(arguments[parameter])}"
        return ""

    def _passes_nothing(self, parameter: str) -> bool:
        """Whether there are calls, and none of them passes the parameter, not even by `*args`."""
        calls = [call for _, call, _ in self.calls]
        is_shown = not any(isinstance(value, ast.Starred) for call in calls for value in call.args)
        return bool(calls) and is_shown and not self.passes(parameter)

    def same(self, parameters: tuple[str, ...]) -> bool:
        """Whether there are calls, and each passes one variable for all of these parameters."""
        passed = [[arguments.get(parameter) for parameter in parameters] for arguments, _, _ in self.calls]
        return bool(passed) and all(
            isinstance(first, ast.Name) and all(isinstance(other, ast.Name) and other.id == first.id for other in rest)
            for first, *rest in passed
        )

    def uses_as_modules(self, group: tuple[str, ...]) -> str:
        """Describe the uses of children of the module other than calls, "" if there are none."""
        if self.module is None:
            return ""
        return uses_as_modules(type(self.module), group, lambda _, owner: getattr(owner, "attr", None) == self.name)


def uses_as_modules(
    cls: type[nn.Module], group: tuple[str, ...], is_owner: Callable[[ast.FunctionDef, ast.expr], bool]
) -> str:
    """Describe the uses of children other than calls, comparisons with None, and attributes that they keep.

    Args:
        is_owner: whether an expression in a method is the module that has the children.
    """
    by_method: dict[str, dict[str, None]] = {}
    for name, tree in trees_of(cls).items():
        allowed: list[ast.expr] = []
        for node in nodes_of(tree):  # a node comes before those inside of it
            match node:
                case ast.Attribute(value=owner, attr=attr) if attr in group and is_owner(tree, owner):
                    if node not in allowed:
                        by_method.setdefault(f"{cls.__name__}.{name}()", {})[ast.unparse(node)] = None
                case ast.Attribute(value=inner, attr=attr) if attr in KEPT:
                    allowed.append(inner)
                case ast.Compare(left=inner, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                    allowed.append(inner)
                case ast.Call(func=inner):
                    allowed.append(inner)
    uses = dict.fromkeys(text for texts in by_method.values() for text in texts)
    if not uses:
        return ""
    return f"{' and '.join(by_method)} takes {', '.join(uses)}, which must stay modules of their own for that"


def _parameters(module: nn.Module) -> list[str]:
    code = inspect.unwrap(type(module).forward).__code__
    return list(code.co_varnames[1 : code.co_argcount])


def _arguments_by_parameter(call: ast.Call, parameters: list[str]) -> dict[str, ast.expr]:
    arguments: dict[str, ast.expr] = {}
    for parameter, value in zip(parameters, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        arguments[parameter] = value
    return arguments | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
