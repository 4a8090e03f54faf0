"""What refers to which functions, from bytecode, closures and defaults: a graph of objects, in which hits are marked.

Another function can be put where code finds one by a global name, in a closure, as a default or as a member of a
class: there `Rebinder` copies whatever is around it. An edge that leads anywhere else (into a table, an object, a
class that isn't a module, an attribute of an imported module) says what it goes `through`, and is refused if a
function that is replaced is behind it. Registries of transformers, which all models share (`ALL_ATTENTION_FUNCTIONS`),
are not followed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from patcher.compat.modeling_code import is_architecture_module, is_modeling_module, registered
from patcher.construction.gates import own_members
from patcher.construction.held import parts_of
from patcher.functions.references import Reference, references_of
from patcher.functions.rules import FunctionRules, Hit
from patcher.source.alike import without_kernel

#: Packages whose functions call none of a model's.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "accelerate", "peft", "patcher", "kernels"}) - {
    "__main__"
}
#: What is looked into for functions whatever library its class is of.
_CONTAINERS = (dict, list, tuple, set, frozenset, CellType, MethodType, functools.partial, functools.partialmethod)


class Edge(NamedTuple):
    """Something that a function, or whatever holds functions, refers to.

    Attributes:
        name: the name by which code finds it, "" in a closure or a default.
        through: what it is found through, where no other function can be put in its place for one model.
        hit: what replaces it.
    """

    to: Any  # as an attribute of type FunctionType it would pass for a method
    name: str = ""
    through: str = ""
    hit: Hit | None = None


@dataclass(eq=False)
class Node:
    """An object and what it refers to.

    Attributes:
        shared: (function, table) of what a function finds in tables that all models share.
        builds: the classes of modules that it calls.
        choices: id -> a function that runs where a config chooses none of a shared table, and the table.
        kept: the ids of what it finds by a global name and doesn't call.
    """

    value: Any
    edges: list[Edge] = field(default_factory=list)
    shared: list[tuple[Any, str]] = field(default_factory=list)
    builds: set[type[nn.Module]] = field(default_factory=set)
    choices: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    @property
    def hits(self) -> list[Hit]:
        """What it refers to that is replaced."""
        return [edge.hit for edge in self.edges if edge.hit is not None]


class Graph:
    """The objects that are reached from those that were added, and which of them reach a function that is replaced."""

    def __init__(self, rules: FunctionRules) -> None:
        self.rules = rules
        self.nodes: dict[int, Node] = {}
        self._needing: set[int] | None = None
        self._written: dict[int, frozenset[str]] = {}

    def add(self, edges: Iterable[Edge]) -> None:
        """Look at what edges lead to, and at all that it refers to."""
        waiting = list(edges)
        while waiting:
            value = waiting.pop().to
            if id(value) in self.nodes or id(value) in self.rules.replacements:
                continue
            node = self.nodes[id(value)] = Node(value)
            self._needing = None
            if isinstance(value, FunctionType):
                self._look_at_function(node)
            else:
                made = made_of(value)
                parts = made[0] if made is not None else _held_by(value)
                node.edges = [Edge(part, hit=self.hit_of(part)) for part in parts]
            waiting += node.edges

    def needs(self, value: Any) -> bool:
        """Whether something that was added leads to a function that is replaced."""
        if self._needing is None:
            referring: dict[int, list[int]] = {}
            for key, node in self.nodes.items():
                for edge in node.edges:
                    if edge.hit is None:
                        referring.setdefault(id(edge.to), []).append(key)
            waiting = [key for key, node in self.nodes.items() if node.hits]
            self._needing = set()
            while waiting:
                key = waiting.pop()
                if key not in self._needing:
                    self._needing.add(key)
                    waiting += referring.get(key, ())
        return id(value) in self._needing

    def changes(self, edge: Edge) -> bool:
        """Whether something else has to be put where an edge leads."""
        return edge.hit is not None or self.needs(edge.to)

    def reached(
        self,
        edges: Iterable[Edge],
        *,
        all_of_them: bool = False,
        unused: Callable[[Node], Collection[int]] = lambda node: (),
    ) -> Iterator[Node]:
        """The nodes from which a replaced function is reached, from some on; or all of them.

        Args:
            unused: the ids of what a function has, and doesn't call.
        """
        waiting, seen = [edge.to for edge in edges if edge.hit is None], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) in seen or id(value) not in self.nodes or not (all_of_them or self.needs(value)):
                continue
            seen.add(id(value))
            node = self.nodes[id(value)]
            yield node
            left_out = unused(node)
            followed = (edge.to for edge in node.edges if not edge.through and edge.hit is None)
            waiting += [each for each in followed if id(each) not in left_out]

    def members(self, cls: type) -> list[Edge]:
        """The edges of one class to its own members."""
        skipped = ("__dict__", "__weakref__", "__annotations__", "__init_subclass__", "__class_getitem__")
        members = {name: value for name, value in own_members(cls).items() if name not in skipped}
        return [self.edge(value, name, name) for name, value in members.items() if not isinstance(value, type)]

    def hit_of(self, function: Any) -> Hit | None:
        """What replaces a function that is held as an object: not a method, whose name may be the same."""
        if not isinstance(function, FunctionType) or "." in function.__qualname__.replace("<locals>.", ""):
            return None
        return self.rules.hit(function.__name__, function)

    def edge(self, to: Any, place: str, name: str = "", *, is_fixed: bool = False) -> Edge:
        """The edge to a value, that can be another one unless it is fixed or can't be made anew."""
        can_be_made = isinstance(to, FunctionType) or made_of(to) is not None
        through = place if can_be_made else f"{place}, a {type(to).__name__}"
        return Edge(to, name, through if is_fixed or not can_be_made else "", self.hit_of(to))

    def _look_at_function(self, node: Node) -> None:
        function, references = node.value, references_of(node.value.__code__)
        space = function.__globals__
        tables, called, handed = list[Any](), set[int](), list[Any]()  # what it hands on: to a table, if it has one
        if is_followed_module(space.get("__name__", "")):
            for reference in references.read:
                if reference.name in space:
                    value = without_kernel(space[reference.name])
                    tables += [value] if _is_registry(value) else []
                    (called.add(id(value)) if reference.is_called else handed.append(value))
                    self._read(node, value, reference)
            node.kept = {id(value) for value in handed} - called
            for imported in references.imported:
                self._imported(node, *imported)
        closed_over = closure_of(function)
        for name, value in closed_over.items():
            if not isinstance(value, type):
                place = f"its variable {name!r}"
                changes = f"{place}, which changes" if name in references.written_cells else ""
                edge = self.edge(value, place)
                node.edges.append(edge._replace(through=edge.through or changes))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not isinstance(value, type):
                node.edges.append(self.edge(value, "a default"))
        tables += filter(_is_registry, closed_over.values())
        for each in (*handed, *closed_over.values()) if tables else ():
            if isinstance(each, FunctionType) and id(each) not in called:
                node.choices[id(each)] = each, tables[0]
        used = {reference.name for reference in references.read}.union(references.written)
        for name in sorted(used & self._written_in(space)):
            through = f"a function that uses the global {name!r}, which changes"
            node.edges = [edge._replace(through=edge.through or through) for edge in node.edges]
        wrapped = vars(function).get("__wrapped__")
        held = [part for edge in node.edges for part in (edge.to, *(made_of(edge.to) or ((),))[0])]
        if isinstance(wrapped, FunctionType) and not any(wrapped is part for part in held):
            node.edges.append(self.edge(wrapped, "its decorator", is_fixed=True))

    def _written_in(self, space: dict[str, Any]) -> frozenset[str]:
        """The global names that functions of a module bind: a copy of its namespace would not see it."""
        if id(space) not in self._written:
            classes = [each for each in space.values() if getattr(each, "__module__", "") == space.get("__name__")]
            held = [each for cls in classes if isinstance(cls, type) for each in own_members(cls).values()]
            functions = [inspect.unwrap(getattr(each, "__func__", each)) for each in (*space.values(), *held)]
            own = [each for each in functions if isinstance(each, FunctionType) and each.__globals__ is space]
            self._written[id(space)] = frozenset(name for each in own for name in references_of(each.__code__).written)
        return self._written[id(space)]

    def _read(self, node: Node, value: Any, reference: Reference) -> None:
        """What a function does with what a global name is bound to."""
        name, place, attributes = reference.name, reference.name, list(reference.attributes)
        while isinstance(value, ModuleType) and attributes:
            place = f"{place}.{attributes[0]}"
            value = vars(value).get(attributes.pop(0))
        if place == name and (hit := self.rules.hit(name, value)) is not None:
            node.edges.append(Edge(value, name, hit=hit))
        elif isinstance(value, type) and issubclass(value, nn.Module):
            if reference.is_called and not reference.attributes:
                node.builds.add(value)
            elif attributes:
                self._otherwise(node, inspect.getattr_static(value, attributes[0], None), f"{place}.{attributes[0]}")
        elif place != name:
            self._otherwise(node, value, place)
        elif (shared := _shared(name, value)) or _is_registry(value):
            node.shared += [(each, name) for each in shared]
        else:
            node.edges.append(self.edge(value, name, name))

    def _imported(self, node: Node, level: int, module: str, name: str) -> None:
        with contextlib.suppress(ImportError):
            package = node.value.__globals__.get("__package__") or ""
            full = importlib.util.resolve_name("." * level + (module or ""), package)
            if full in sys.modules and is_followed_module(full):
                self._otherwise(node, vars(sys.modules[full]).get(name), f"an import of {full} where it runs")

    def _otherwise(self, node: Node, value: Any, place: str) -> None:
        """A value that isn't reached by a global name: one of a library is named by its module and name alone."""
        if any(value is each for each in self.rules.named.values() if each is not None):
            node.edges.append(Edge(value, "", place, self.rules.hit("", value)))
        elif is_followed_module(getattr(value, "__module__", None) or ""):
            node.edges.append(self.edge(value, place, is_fixed=True))


def made_of(value: Any) -> tuple[tuple[Any, ...], Callable[..., Any]] | None:
    """The functions that an object is made of, and what makes one like it of others; None if nothing does."""
    parts: tuple[Any, ...]
    make: Callable[..., Any]
    if isinstance(value, FunctionType | type):
        return None
    if (function := without_kernel(value)) is not value:  # its copy has none: it isn't the function that one is for
        parts, make = (function,), lambda each: each
    elif isinstance(value, staticmethod | classmethod):
        parts, make = (value.__func__,), type(value)
    elif isinstance(value, property):
        parts, make = (value.fget, value.fset, value.fdel), functools.partial(type(value), doc=value.__doc__)
    elif isinstance(value, functools.cached_property):
        parts, make = (value.func,), type(value)
    elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        parts, make = (value.__func__,), lambda each: MethodType(each, value.__self__)
    elif hasattr(value, "cache_parameters"):
        parts, make = (value.__wrapped__,), functools.lru_cache(**value.cache_parameters())
    else:
        return None
    is_made = all(each is None or isinstance(each, FunctionType) or made_of(each) is not None for each in parts)
    return (parts, make) if is_made else None


def _held_by(value: Any) -> list[Any]:
    """What an object holds that may hold functions."""
    if isinstance(value, nn.Module | torch.Tensor):
        return []
    if isinstance(value, type):
        if issubclass(value, nn.Module | torch.Tensor):
            return []
        return [member for cls in filter(is_followed, value.__mro__) for member in own_members(cls).values()]
    if type(value) in (tuple, dict) and all(without_kernel(part) is not part for part in _elements(value)):
        return []  # what `kernels` keeps of a class for `use_kernels=True`, and doesn't call
    if isinstance(value, _CONTAINERS) or is_followed(type(value)):
        return parts_of(value)
    return [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, FunctionType)]


def _elements(value: Any) -> Iterable[Any]:
    """What a plain container holds; nothing of a dict of a kind of its own, which may import a file for each entry."""
    return value.values() if type(value) is dict else value if isinstance(value, list | tuple | set) else ()


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


def is_followed_module(name: str) -> bool:
    """Whether the functions of a module are looked into: those of libraries call nothing of a model."""
    return name.partition(".")[0] not in _OTHERS


def is_followed(cls: type) -> bool:
    """Whether the functions of a class are code of a model: of a modeling file, or of somebody's own class.

    What all models have of transformers (loading, generation) is not.
    """
    name = cls.__module__
    return is_architecture_module(name) or (is_followed_module(name) and not is_modeling_module(name))


def _is_of_all_models(module: str) -> bool:
    return is_modeling_module(module) and not is_architecture_module(module)


def _is_registry(value: Any) -> bool:
    """Whether a value is a registry of transformers, of a kind of its own: `ALL_ATTENTION_FUNCTIONS`."""
    return isinstance(value, Mapping) and type(value) is not dict and _is_of_all_models(type(value).__module__)


def _shared(name: str, value: Any) -> list[Any]:
    """The functions in a table that all models share: transformers has it outside of the files of its models."""
    if _is_registry(value):
        return registered(value)
    functions = [each for each in _elements(value) if isinstance(each, FunctionType)]
    modules = list(sys.modules.items()) if functions else []
    homes = (home for home, module in modules if getattr(module, "__dict__", {}).get(name) is value)
    return functions if any(map(_is_of_all_models, homes)) else []
