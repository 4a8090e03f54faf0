"""How the module around another one calls it, and what it uses of its children, as far as its source shows."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from patcher.fusions.methods import readable, trees_of
from patcher.fusions.purity import Body
from patcher.source.call_sites import calls_of_child, none_by_default

#: What a part of a joined projection still has.
HELD = frozenset({"weight", "bias", "in_features", "out_features"})


class Caller:
    """The module whose forward calls the one at `path`: lists call nothing."""

    def __init__(self, modules: Mapping[str, nn.Module], path: str) -> None:
        self.modules = modules
        self.path = path.rpartition(".")[0]
        while self.path and type(modules.get(self.path)) is nn.ModuleList:
            self.path = self.path.rpartition(".")[0]
        self.module = modules.get(self.path) if path else None
        self.name, _, number = path[len(self.path) :].strip(".").partition(".")
        self.is_listed = bool(number)
        self.parameters = _parameters(modules[path]) if path in modules else []
        #: the attributes of the module whose values say which of its calls run
        self.constants: dict[str, Any] = {}

    @property
    def classes(self) -> tuple[Any, ...]:
        """What of the modules around decides how the module is called: their classes, and their names."""
        parts = self.path.split(".") if self.path else []
        around = [".".join(parts[:number]) for number in range(len(parts) + 1)] if self.module is not None else []
        names = [re.sub(r"\d+", "0", part) for part in parts]
        return self.name, self.is_listed, tuple(type(self.modules.get(path)) for path in around), tuple(names)

    def calls(self) -> Iterator[tuple[dict[str, ast.expr], ast.Call, ast.FunctionDef]]:
        """The arguments of each call by the names of the parameters, the call, and the method it is in.

        Of calls in branches those that run, by what the module around says of itself.
        """
        for _, method in readable(type(self.module)) if self.module is not None else ():
            calls = calls_of_child(method.node, self.name, self.is_listed)
            body = Body(method, self.module) if calls else None
            reached = set(body.reached()) if body is not None else set()
            if body is not None and not reached.issuperset(calls):
                self.constants |= body.constants
            for call in calls:
                if call in reached:
                    yield _given(call, self.parameters), call, method.node

    def passes(self, parameter: str) -> str:
        """What it passes for a parameter that is None by default, "" if nothing that is known to be anything else."""
        for given, _, tree in self.calls():
            match given.get(parameter):
                case None | ast.Constant(value=None):
                    continue
                case ast.Name(id=name) if name in none_by_default(tree):  # it passes on what it is given
                    if Caller(self.modules, self.path)._passes_nothing(name):
                        continue
            return f"{type(self.module).__name__} passes {parameter}={ast.unparse(given[parameter])}"
        return ""

    def _passes_nothing(self, parameter: str) -> bool:
        """Whether there are calls, and none that passes the parameter, or may pass it among others."""
        calls = [call for _, call, _ in self.calls()]
        is_shown = not any(isinstance(argument, ast.Starred) for call in calls for argument in call.args)
        return bool(calls) and is_shown and not self.passes(parameter)

    def same(self, parameters: tuple[str, ...]) -> bool:
        """Whether each call passes one variable for all of these parameters, and there is a call."""
        passed = [[given.get(each) for each in parameters] for given, _, _ in self.calls()]
        return bool(passed) and all(
            isinstance(first, ast.Name) and all(isinstance(each, ast.Name) and each.id == first.id for each in rest)
            for first, *rest in passed
        )

    def uses_as_modules(self, group: tuple[str, ...]) -> str:
        """Which children of the module it uses as modules of their own, "" if none."""
        found: dict[str, list[str]] = {}
        for method, tree in trees_of(type(self.module)).items() if self.module is not None else ():
            for node in taken_as_modules(tree, group, lambda owner: getattr(owner, "attr", None) == self.name):
                found.setdefault(f"{type(self.module).__name__}.{method}()", []).append(ast.unparse(node))
        uses = dict.fromkeys(text for texts in found.values() for text in texts)
        if not uses:
            return ""
        return f"{' and '.join(found)} takes {', '.join(uses)}, which must stay modules of their own for that"


def taken_as_modules(
    tree: ast.AST, group: Iterable[str], is_owner: Callable[[ast.expr], bool]
) -> Iterator[ast.Attribute]:
    """The uses of children that are neither calls nor looks at what a part of a joined projection still has.

    Args:
        is_owner: whether an expression is the module that has them.
    """
    held: list[ast.expr] = []
    for node in ast.walk(tree):  # a node comes before those inside of it
        match node:
            case ast.Attribute(value=owner, attr=attr) if attr in group and is_owner(owner):
                if node not in held:
                    yield node
            case ast.Attribute(value=inner, attr=attr) if attr in HELD:
                held.append(inner)
            case ast.Compare(left=inner, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                held.append(inner)
            case ast.Call(func=inner):
                held.append(inner)


def _parameters(module: nn.Module) -> list[str]:
    code = inspect.unwrap(type(module).forward).__code__
    return list(code.co_varnames[1 : code.co_argcount])


def _given(call: ast.Call, parameters: list[str]) -> dict[str, ast.expr]:
    given: dict[str, ast.expr] = {}
    for parameter, argument in zip(parameters, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        given[parameter] = argument
    return given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
