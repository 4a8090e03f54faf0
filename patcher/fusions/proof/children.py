"""What a call of a module's child does: whether it may write into what it is given, by its class and its settings."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from patcher.fusions.methods import known_of_class, self_of, trees_of
from patcher.fusions.proof.frames import Frame, definition_of, parameters_of
from patcher.fusions.proof.purity import (
    FRESH,
    MODULES,
    PLAIN,
    SEVERAL,
    SHARED,
    WRITING_SETTINGS,
    kind_of_function,
    unwrapped,
)
from patcher.fusions.proof.statements import Statements
from patcher.fusions.proof.values import CODE, GIVEN, OUTSIDE, Summary, Value, roots_of

#: Modules that run their children, or of which a forward takes the children one by one.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_DEPTH = 4


@dataclass(frozen=True)
class Facts:
    """What decides what a call of a module does.

    Attributes:
        problem: why its class doesn't tell.
        settings: those by which modules of torch write into what they are given.
        children: its children, and functions that it keeps.
    """

    cls: type[nn.Module]
    problem: str = ""
    settings: tuple[tuple[str, Any], ...] = ()
    children: tuple[tuple[str, Facts | Kept], ...] = ()

    def child(self, name: str) -> Summary | None:
        """What a call of a child does."""
        found = next((child for known, child in self.children if known == name), None)
        return None if found is None else summary_of(found)


#: Of what isn't there, nothing can be called.
_ABSENT = Summary(gives_back=False)


def summaries(module: nn.Module) -> tuple[tuple[str, Summary], ...]:
    """What calls of a module's children do, and of the functions that it keeps, those that its methods mention."""
    children, own = module._modules, vars(module)
    found: list[tuple[str, Summary]] = []
    for name, lacking in _mentioned(type(module)):
        if name in children:
            child = children[name]
            found.append((name, _ABSENT if child is None else summary_of(_facts(child, 1))))
        elif name in own:
            if own[name] is None:
                found.append((name, _ABSENT))
            elif callable(own[name]):
                found.append((name, summary_of(_kept(own[name], module))))
        elif lacking and module._parameters.get(name, module._buffers.get(name)) is None:
            found.append((name, _ABSENT))
    return tuple(found)


@known_of_class
def _mentioned(cls: type[nn.Module]) -> tuple[tuple[str, bool], ...]:
    """The attributes that its methods read of a module, and whether the class itself lacks them."""
    names = {
        node.attr
        for tree in trees_of(cls).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self_of(tree)
    }
    return tuple((name, inspect.getattr_static(cls, name, None) is None) for name in sorted(names))


def _inside(module: nn.Module, depth: int) -> Iterable[tuple[str, Facts | Kept]]:
    for name, child in module._modules.items():
        if child is not None:
            yield name, _facts(child, depth + 1)
    for name, value in vars(module).items():
        if callable(value) and name != "forward":
            yield name, _kept(value, module)


def _kept(value: Any, module: nn.Module) -> Kept:
    """What a module keeps and may call."""
    function, keywords = (value.func, value.keywords) if _only_names(value) else (value, {})
    if {"inplace", "out", "max_norm"} & set(keywords):
        return Kept(None)
    if isinstance(function, MethodType) and function.__self__ is module:
        return Kept(function.__func__, type(module))
    return Kept(function if isinstance(function, FunctionType) or kind_of_function(function) else None)


def _only_names(value: Any) -> bool:
    return isinstance(value, partial) and not value.args


@dataclass(frozen=True)
class Kept:
    """A function that a module keeps as an attribute.

    Attributes:
        function: None where it is something else that can be called.
        bound: the class of the module, where it is a method of the module itself.
    """

    function: Any
    bound: type[nn.Module] | None = None


def _facts(module: nn.Module, depth: int) -> Facts:
    cls = type(module)
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return Facts(cls, f"{cls.__name__} has hooks")
    if "forward" in vars(module):
        return Facts(cls, f"the forward of {cls.__name__} was replaced on the object")
    settings = tuple((name, bool(vars(module)[name])) for name in WRITING_SETTINGS if name in vars(module))
    if cls in MODULES:
        return Facts(cls, "", settings)
    if depth > _DEPTH:
        return Facts(cls, f"{cls.__name__} is nested too deep")
    return Facts(cls, "", settings, tuple(_inside(module, depth)))


@lru_cache(maxsize=4096)
def summary_of(called: Facts | Kept) -> Summary:
    """What a call of a module, or of a function, does."""
    if isinstance(called, Kept) and called.function is None:
        return Summary("what the module keeps under this name is no function that could be read")
    if isinstance(called, Kept):
        if kind := kind_of_function(called.function):
            several = called.function.__name__ in SEVERAL
            return Summary(gives_back=kind == SHARED, tensor=kind != PLAIN and not several, plain=1)
        return _followed(called.function, Facts(called.bound) if called.bound is not None else None)
    name = called.cls.__name__
    if called.problem:
        return Summary(called.problem)
    if called.cls in MODULES:
        settings = [f"{setting}=True" for setting, value in called.settings if value]
        if settings == ["inplace=True"]:
            return Summary(writes=f"{name}({settings[0]}) writes into its input", tensor=True)
        if settings:
            return Summary(f"{name}({settings[0]}) writes into its weight")
        return Summary(gives_back=MODULES[called.cls] != FRESH, tensor=True)
    if called.cls in _CONTAINERS:
        return _together([summary_of(child) for _, child in called.children])
    forward = called.cls.forward
    if not isinstance(forward, FunctionType) or called.cls.__call__ is not nn.Module.__call__:
        return Summary(f"{name} isn't called by its forward alone")
    return _followed(forward, called)


def _together(summaries: list[Summary]) -> Summary:
    """Any of several, or one after the other."""
    return Summary(
        next((one.reason for one in summaries if one.reason), ""),
        next((one.writes for one in summaries if one.writes), ""),
        next((one.changes for one in summaries if one.changes), ""),
        any(one.gives_back for one in summaries) or not summaries,
        any(one.keeps for one in summaries),
        bool(summaries) and all(one.tensor for one in summaries),
    )


def _followed(function: FunctionType, module: Facts | None) -> Summary:
    """What the source of a function, or of a module's forward, does to what it is given."""
    function = unwrapped(function)
    node = definition_of(function.__code__)
    called = function.__name__ if module is None else module.cls.__name__
    if node is None:
        return Summary(f"the source of {called} can't be read")
    given = frozenset({GIVEN})
    names = {name: Value(given) for name in parameters_of(node)}
    names |= {rest.arg: Value(given) for rest in (node.args.vararg, node.args.kwarg) if rest is not None}
    if module is not None:
        if not parameters_of(node):
            return Summary(f"{called} has no parameter for itself")
        names[parameters_of(node)[0]] = Value(module=module)
    owners = module.cls.__mro__ if module is not None else ()
    owner = next((base for base in owners if vars(base).get("forward") is function), None)
    frame = Frame(function, node, names, owner)
    run = Statements(frame, module, frozenset(), {}, set())
    run.body(node.body)
    if run.pending:
        return Summary(f"{called} may run {run.pending.reason} later, {frame.at(run.pending.line)}")
    unknown, writes, changes = "", "", ""
    for effect in run.effects:
        reason = f"{called} runs {effect.reason}, {frame.at(effect.line)}"
        if effect.roots is None:
            unknown = unknown or reason
        elif GIVEN in effect.roots or (effect.roots & run.escaped and GIVEN in run.escaped):
            writes = writes or reason
        elif OUTSIDE in effect.roots or effect.roots & run.escaped:
            changes = changes or reason
    if not unknown and GIVEN in run.escaped:
        unknown = f"{called} keeps what it is given"
    roots = roots_of(frame.returned)
    if CODE in roots:
        unknown = unknown or f"{called} gives back a function"
    back = GIVEN in roots or bool(roots & run.escaped)
    tensor = bool(frame.returned) and all(value.tensor for value in frame.returned)
    return Summary(unknown, writes, changes, back, OUTSIDE in roots, tensor)
