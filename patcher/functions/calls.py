"""Which functions call which, from their bytecode, closures and defaults, as far as that can be followed.

Followed are functions that code finds by a global name, in a closure, as a default or as a member of a class; then
those that these call. What holds a function otherwise (a table, a class that is no module, an attribute of an imported
module, an object) can't be given other globals: an edge through it says so, and matters where it leads to a function
that is replaced. Registries of transformers, which all models share (`ALL_ATTENTION_FUNCTIONS`), are not followed.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from patcher.compat.modeling_code import is_architecture_module, is_modeling_module, registered
from patcher.construction.init_hooks import own_members
from patcher.functions.references import references_of
from patcher.functions.rules import FunctionRules, Hit

#: Packages whose functions call none of a model's.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "accelerate", "peft", "patcher", "kernels"}) - {
    "__main__"
}


class Edge(NamedTuple):
    """A function that another one may call, and what stands in the way of having it call a copy."""

    to: Any  # a FunctionType; as an attribute of that type it would pass for a method
    obstacle: str = ""


class Blocked(NamedTuple):
    """A function that is reached otherwise than by name, and how."""

    value: Any
    how: str


@dataclass(eq=False)
class Node:
    """One function and what it refers to.

    Attributes:
        hits: the names by which it knows functions that are replaced, "" for those in a closure or a default.
        edges: the functions that it may call.
        blocked: functions that it reaches in ways that can't be changed.
        shared: what it finds in tables that all models share.
        builds: the classes of modules that it calls.
        known: the names of the functions that it finds by name.
        registries: function -> the shared table that it is looked up in.
        defaults: id -> a function that runs where a config chooses none of a shared table, and the table.
        written: the global names that it binds.
    """

    function: Any
    hits: list[tuple[str, Hit]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    shared: list[Blocked] = field(default_factory=list)
    builds: set[type[nn.Module]] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    registries: dict[str, str] = field(default_factory=dict)
    defaults: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()


class CallGraph:
    """The functions that are reached from those that were added, and which of them reach one that is replaced."""

    def __init__(self, rules: FunctionRules) -> None:
        self.rules = rules
        self.nodes: dict[int, Node] = {}
        self._needing: set[int] | None = None

    def add(self, functions: Iterable[FunctionType]) -> None:
        """Look at functions, and at all that they may call."""
        waiting = list(functions)
        while waiting:
            function = waiting.pop()
            if id(function) in self.nodes or id(function) in self.rules.replacements:
                continue
            node = self.nodes[id(function)] = self._node(function)
            self._needing = None
            waiting += [edge.to for edge in node.edges]

    def needs(self, function: Any) -> bool:
        """Whether a function that was added may call one that is replaced."""
        if self._needing is None:
            callers: dict[int, list[int]] = {}
            for key, node in self.nodes.items():
                for edge in node.edges:
                    callers.setdefault(id(edge.to), []).append(key)
            waiting = [key for key, node in self.nodes.items() if node.hits or node.blocked]
            self._needing = set()
            while waiting:
                key = waiting.pop()
                if key not in self._needing:
                    self._needing.add(key)
                    waiting += callers.get(key, ())
        return id(function) in self._needing

    def reached(
        self,
        functions: Iterable[FunctionType],
        *,
        all_of_them: bool = False,
        unused: Callable[[Node], Container[int]] = lambda node: (),
    ) -> Iterator[Node]:
        """The nodes from which a replaced function is reached, from some on; or all of them.

        Args:
            unused: the ids of the functions that a node has, and doesn't call.
        """
        waiting, seen = list(functions), set[int]()
        while waiting:
            function = waiting.pop()
            if id(function) in seen or id(function) not in self.nodes or not (all_of_them or self.needs(function)):
                continue
            seen.add(id(function))
            node = self.nodes[id(function)]
            yield node
            left_out = unused(node)
            waiting += [edge.to for edge in node.edges if not edge.obstacle and id(edge.to) not in left_out]

    def member_edges(self, cls: type) -> Iterator[tuple[str, Edge]]:
        """The functions of one class, its own alone, by the names of its members."""
        for name, value in own_members(cls).items():
            if name in ("__dict__", "__weakref__", "__init_subclass__", "__class_getitem__"):
                continue
            for edge in member_functions(value):
                yield name, Edge(*edge)

    def hit_of(self, function: Any) -> Hit | None:
        """What replaces a function that is held as an object: not a method, whose name may be the same."""
        if not isinstance(function, FunctionType) or "." in function.__qualname__.replace("<locals>.", ""):
            return None
        return self.rules.hit(function.__name__, function)

    def held(self, value: Any, obstacle: str, seen: set[int] | None = None) -> Iterator[Edge]:
        """The functions that a value holds which is none."""
        seen = set() if seen is None else seen
        if id(value) in seen or isinstance(value, (str, bytes, int, float, torch.Tensor, torch.dtype, ModuleType)):
            return
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield Edge(value, obstacle)
        elif isinstance(value, MethodType):
            yield from self.held(value.__func__, obstacle, seen)
        elif isinstance(value, functools.partial):
            yield from self.held((value.func, *value.args, *value.keywords.values()), obstacle, seen)
        elif isinstance(value, Mapping) and _is_plain(value):
            yield from self.held(tuple(value.values()), obstacle, seen)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for each in value:
                yield from self.held(each, obstacle, seen)
        elif isinstance(value, type):
            if not issubclass(value, (nn.Module, torch.Tensor)):
                for cls in filter(is_followed, value.__mro__):
                    for _, edge in self.member_edges(cls):
                        yield Edge(edge.to, obstacle)
        elif (wrapped := getattr(value, "__dict__", {}).get("__wrapped__")) is not None:
            yield from self.held(wrapped, obstacle, seen)
        elif not isinstance(value, nn.Module) and is_followed(type(value)):
            yield from self.held(type(value), obstacle, seen)

    def _node(self, function: FunctionType) -> Node:
        node, references = Node(function), references_of(function.__code__)
        space = function.__globals__
        tables: list[Any] = []
        called: set[int] = set()
        handed: list[Any] = []  # what it hands on: to a table, where it looks in one
        if is_followed_module(space.get("__name__", "")):
            node.written = references.written
            for reference in references.read:
                if reference.name in space:
                    value = space[reference.name]
                    tables += [value] * is_shared_table(value)
                    (called.add(id(value)) if reference.is_called else handed.append(value))
                    self._read(node, reference.name, reference.attributes, reference.is_called)
            for level, module, name in references.imported:
                self._imported(node, level, module, name)
        for variable, value in closure_of(function).items():
            tables += [value] * is_shared_table(value)
            handed.append(value)
            held = f"holds it in its closure, as {variable!r}"
            self._given(node, value, held if variable in references.written_cells else "", held)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._given(node, value, "", "holds it in a default")
        for value in handed if tables else ():
            if isinstance(value, FunctionType) and id(value) not in called:
                node.defaults[id(value)] = value, tables[0]
        wrapped = vars(function).get("__wrapped__")
        if isinstance(wrapped, FunctionType) and all(edge.to is not wrapped for edge in node.edges):
            node.edges.append(Edge(wrapped, "wraps it in a way that can't be followed"))
        return node

    def _read(self, node: Node, name: str, attributes: tuple[str, ...], is_called: bool) -> None:
        """What a function does with what a global name is bound to."""
        space = node.function.__globals__
        value = space[name]
        if isinstance(value, ModuleType):
            self._attribute(node, value, name, attributes)
        elif isinstance(value, type):
            if issubclass(value, nn.Module):
                if is_called and not attributes:
                    node.builds.add(value)
                elif attributes:
                    found = inspect.getattr_static(value, attributes[0], None)
                    how = f"calls it through {value.__name__}.{attributes[0]}"
                    self._through(node, [Edge(edge.to, how) for edge in member_functions(found)])
            elif is_followed_module(value.__module__):
                how = f"calls it through the class {value.__name__}, which is no module"
                self._through(node, self.held(value, how))
        elif (hit := self.rules.hit(name, value)) is not None:
            node.hits.append((name, hit))
            node.known.add(name)
        elif isinstance(value, FunctionType):
            node.known.add(name)
            node.edges.append(Edge(value))
        elif is_cached(value):
            node.known.add(name)
            node.edges += self.held(value.__wrapped__, "")
        elif isinstance(value, torch.jit.ScriptFunction):
            node.known.add(name)
            text = str(value.code)
            names = {key.rpartition(":")[2] for layer in self.rules.layers for key, _ in layer}
            node.blocked += [Blocked(each, f"is compiled by torch.jit, with {each}") for each in names if each in text]
        elif isinstance(value, Mapping | list | tuple | set) and _is_registry(name, value, space):
            items = value.values() if isinstance(value, Mapping) else value
            for each in items if _is_plain(value) else registered(value):
                node.registries.setdefault(getattr(each, "__name__", ""), name)
                node.shared.append(Blocked(each, f"comes to it through {name} as well, which all models share"))
        else:
            self._through(node, self.held(value, f"finds it in {name}"))

    def _attribute(self, node: Node, module: ModuleType, name: str, attributes: tuple[str, ...]) -> None:
        text, value = name, module  # type: str, Any
        for each in attributes:
            if not isinstance(value, ModuleType):
                break
            text, value = f"{text}.{each}", vars(value).get(each)
        if isinstance(value, ModuleType) or value is None:
            return
        self._other(node, value, f"calls it as {text}", is_followed_module(getattr(value, "__module__", "") or ""))

    def _imported(self, node: Node, level: int, module: str, name: str) -> None:
        package = node.function.__globals__.get("__package__") or ""
        try:
            full = importlib.util.resolve_name("." * level + (module or ""), package) if level else module
        except ImportError:
            return
        value = vars(sys.modules[full]).get(name) if full in sys.modules else None
        self._other(node, value, f"imports it where it runs, from {full}", is_followed_module(full))

    def _other(self, node: Node, value: Any, how: str, by_name: bool) -> None:
        """A function that is reached otherwise than by a global name."""
        if isinstance(value, type) or not callable(value):
            return
        is_named = any(value is each for each in self.rules.named.values())
        if is_named or (by_name and self.hit_of(value) is not None):
            node.blocked.append(Blocked(value, how))
        elif isinstance(value, FunctionType) and by_name:
            node.edges.append(Edge(value, how))

    def _given(self, node: Node, value: Any, obstacle: str, held: str) -> None:
        """A value in a closure or a default."""
        if isinstance(value, FunctionType):
            hit = self.hit_of(value)
            if hit is None:
                node.edges.append(Edge(value, obstacle))
            elif obstacle:
                node.blocked.append(Blocked(value, obstacle))
            else:
                node.hits.append(("", hit))
        elif not isinstance(value, type):
            self._through(node, self.held(value, held))

    def _through(self, node: Node, edges: Iterable[Edge]) -> None:
        """Functions that are held by something which isn't followed."""
        for edge in edges:
            if self.hit_of(edge.to) is not None:
                node.blocked.append(Blocked(*edge))
            else:
                node.edges.append(edge)


def member_functions(value: Any) -> list[Edge]:
    """The functions in a member of a class, each with what stands in the way of putting another in its place."""
    if isinstance(value, FunctionType):
        return [Edge(value)]
    if isinstance(value, staticmethod | classmethod):
        return member_functions(value.__func__)
    if isinstance(value, property):
        return [edge for part in (value.fget, value.fset, value.fdel) for edge in member_functions(part)]
    if isinstance(value, functools.cached_property):
        return member_functions(value.func)
    if isinstance(value, functools.partialmethod):
        return [Edge(edge.to, "is a partialmethod") for edge in member_functions(value.func)]
    wrapped = getattr(value, "__wrapped__", None) if callable(value) and not isinstance(value, type) else None
    return [Edge(edge.to, "is wrapped by an object") for edge in member_functions(wrapped)] if wrapped else []


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of functions around it that it reads, without those that have no value, and the class it is in."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    found.pop("__class__", None)
    return found


def is_cached(value: Any) -> bool:
    """Whether it is what `functools.lru_cache` makes of a function."""
    return hasattr(value, "cache_parameters") and isinstance(getattr(value, "__wrapped__", None), FunctionType)


def is_followed_module(name: str) -> bool:
    """Whether the functions of a module are looked into: those of libraries call nothing of a model."""
    return name.partition(".")[0] not in _OTHERS


def is_followed(cls: type) -> bool:
    """Whether the functions of a class are code of a model: of a modeling file, or of somebody's own class.

    What all models have of transformers (loading, generation) is not.
    """
    name = cls.__module__
    return is_architecture_module(name) or (is_followed_module(name) and not is_modeling_module(name))


def is_shared_table(value: Any) -> bool:
    """Whether a value is a registry of transformers, of a kind of its own: `ALL_ATTENTION_FUNCTIONS`."""
    kind = type(value)
    return (
        isinstance(value, Mapping)
        and not _is_plain(value)
        and is_modeling_module(kind.__module__)
        and not is_architecture_module(kind.__module__)
    )


def _is_plain(value: Any) -> bool:
    """Whether a container can be looked into: one of a kind of its own may import a file for each entry."""
    return isinstance(value, list | tuple | set | frozenset) or type(value) is dict


def _is_registry(name: str, value: Any, space: Mapping[str, Any]) -> bool:
    """Whether a table is shared by all models: transformers has it outside of the files of its models."""
    if not _is_plain(value):
        return is_shared_table(value)
    return any(
        vars(module).get(name) is value
        for home, module in list(sys.modules.items())
        if home.startswith("transformers.") and not is_architecture_module(home) and isinstance(module, ModuleType)
    )
