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
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from patcher.compat.held import parts_of
from patcher.compat.modeling_code import is_architecture_module, is_modeling_module, registered
from patcher.construction.gates import own_members
from patcher.functions.references import Reference, references_of
from patcher.functions.rules import FunctionRules, Hit
from patcher.source.alike import without_kernel

#: Packages whose functions call none of a model's.
_OTHERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "accelerate", "peft", "patcher", "kernels"}) - {
    "__main__"
}
#: What is looked into for functions whatever library its class is of.
_CONTAINERS = (dict, list, tuple, set, frozenset, CellType, MethodType, functools.partial, functools.partialmethod)
#: Kinds of edges: to what is in a table that all models share, and to a class of modules that code makes objects of.
SHARED, BUILDS = "shared", "builds"


class Edge(NamedTuple):
    """Something that a function, or whatever holds functions, refers to.

    Attributes:
        name: the name by which code finds it, "" in a closure or a default.
        through: what it is found through, where no other function can be put in its place for one model.
        hit: what replaces it.
        is_kept: it is found by a global name, and not called there.
        table: what a function is handed to: it runs where a config chooses none in this table of all models.
        kind: "", for all that is followed, or `SHARED` or `BUILDS`.
    """

    to: Any  # as an attribute of type FunctionType it would pass for a method
    name: str = ""
    through: str = ""
    hit: Hit | None = None
    is_kept: bool = False
    table: Any = None
    kind: str = ""


class Node(NamedTuple):
    """An object and what it refers to."""

    value: Any
    edges: list[Edge]

    def hits(self, is_meant: Callable[[Edge], bool] = lambda edge: True) -> list[Hit]:
        """What it refers to that is replaced."""
        return [edge.hit for edge in self.edges if edge.hit is not None and not edge.kind and is_meant(edge)]


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
            edge = waiting.pop()
            if edge.kind == BUILDS:
                waiting += [member for member in self.members(edge.to) if id(member.to) not in self.nodes]
            elif id(edge.to) not in self.nodes and id(edge.to) not in self.rules.replacements:
                node = self.nodes[id(edge.to)] = Node(edge.to, self._edges_of(edge.to))
                self._needing = None
                waiting += node.edges

    def needs(self, value: Any) -> bool:
        """Whether something that was added leads to a function that is replaced."""
        if self._needing is None:
            referring: dict[int, list[int]] = {}
            for key, node in self.nodes.items():
                for edge in node.edges:
                    if edge.hit is None and not edge.kind:
                        referring.setdefault(id(edge.to), []).append(key)
            waiting = [key for key, node in self.nodes.items() if node.hits()]
            self._needing = set()
            while waiting:
                key = waiting.pop()
                if key not in self._needing:
                    self._needing.add(key)
                    waiting += referring.get(key, ())
        return id(value) in self._needing

    def changes(self, edge: Edge) -> bool:
        """Whether something else has to be put where an edge leads."""
        return not edge.kind and (edge.hit is not None or self.needs(edge.to))

    def reached(
        self, edges: Iterable[Edge], is_meant: Callable[[Edge], bool] = lambda edge: True, *, all_of_them: bool = False
    ) -> Iterator[Node]:
        """The nodes from which a replaced function is reached, from some on; or all of them.

        Args:
            is_meant: which edges are followed.
        """
        waiting, seen = [edge.to for edge in edges if edge.hit is None], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) in seen or id(value) not in self.nodes or not (all_of_them or self.needs(value)):
                continue
            seen.add(id(value))
            node = self.nodes[id(value)]
            yield node
            followed = [edge for edge in node.edges if not edge.through and not edge.kind and edge.hit is None]
            waiting += [edge.to for edge in followed if is_meant(edge)]

    def members(self, cls: type) -> list[Edge]:
        """The edges of a class to its own members, and those of the classes that it derives from."""
        return [edge for base in filter(is_followed, cls.__mro__) for edge in self._own_members(base)]

    def _own_members(self, cls: type) -> list[Edge]:
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

    def _edges_of(self, value: Any) -> list[Edge]:
        if isinstance(value, FunctionType):
            return self._edges_of_function(value)
        made = made_of(value)
        return [Edge(part, hit=self.hit_of(part)) for part in (made[0] if made is not None else _held_by(value))]

    def _edges_of_function(self, function: FunctionType) -> list[Edge]:
        references, space = references_of(function.__code__), function.__globals__
        closed_over = {name: value for name, value in closure_of(function).items() if not isinstance(value, type)}
        is_library = not is_followed_module(space.get("__name__", ""))
        named = () if is_library else references.read
        read = [(each, without_kernel(space[each.name])) for each in named if each.name in space]
        called = {id(value) for reference, value in read if reference.is_called}
        # What is handed on is handed to such a table, if there is one.
        tables = [each for each in (*(value for _, value in read), *closed_over.values()) if _is_registry(each)]
        edges: list[Edge] = []
        for reference, value in read:
            is_kept = id(value) not in called
            edges += [edge._replace(is_kept=is_kept and edge.to is value) for edge in self._read(value, reference)]
        for each in () if is_library else references.imported:
            edges += self._imported(space, *each)
        for name, value in closed_over.items():
            edge = self.edge(value, f"its variable {name!r}")
            changes = f"its variable {name!r}, which changes" if name in references.written_cells else ""
            edges.append(edge._replace(through=edge.through or changes))
        edges = [
            edge._replace(table=tables[0])
            if tables and isinstance(edge.to, FunctionType) and not edge.kind and id(edge.to) not in called
            else edge
            for edge in edges
        ]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        edges += [self.edge(value, "a default") for value in defaults if not isinstance(value, type)]
        for name in sorted({*references.written, *(each.name for each in references.read)} & self._written_in(space)):
            through = f"a function that uses the global {name!r}, which changes"
            edges = [edge if edge.kind else edge._replace(through=edge.through or through) for edge in edges]
        wrapped = vars(function).get("__wrapped__")
        held = [part for edge in edges for part in (edge.to, *(made_of(edge.to) or ((),))[0])]
        if isinstance(wrapped, FunctionType) and not any(wrapped is part for part in held):
            edges.append(self.edge(wrapped, "its decorator", is_fixed=True))
        return edges

    def _written_in(self, space: dict[str, Any]) -> frozenset[str]:
        """The global names that functions of a module bind: a copy of its namespace would not see it."""
        if id(space) not in self._written:
            classes = [each for each in space.values() if getattr(each, "__module__", "") == space.get("__name__")]
            held = [each for cls in classes if isinstance(cls, type) for each in own_members(cls).values()]
            functions = [inspect.unwrap(getattr(each, "__func__", each)) for each in (*space.values(), *held)]
            own = [each for each in functions if isinstance(each, FunctionType) and each.__globals__ is space]
            self._written[id(space)] = frozenset(name for each in own for name in references_of(each.__code__).written)
        return self._written[id(space)]

    def _read(self, value: Any, reference: Reference) -> list[Edge]:
        """What a function does with what a global name is bound to."""
        name, place, attributes = reference.name, reference.name, list(reference.attributes)
        while isinstance(value, ModuleType) and attributes:
            place = f"{place}.{attributes[0]}"
            value = vars(value).get(attributes.pop(0))
        if place == name and (hit := self.rules.hit(name, value)) is not None:
            return [Edge(value, name, hit=hit)]
        if isinstance(value, type) and issubclass(value, nn.Module):
            if attributes:
                return self._otherwise(inspect.getattr_static(value, attributes[0], None), f"{place}.{attributes[0]}")
            return [Edge(value, kind=BUILDS)] if reference.is_called and not reference.attributes else []
        if place != name:
            return self._otherwise(value, place)
        if (shared := _shared(name, value)) or _is_registry(value):
            return [Edge(each, name, hit=self.hit_of(each), kind=SHARED) for each in shared]
        return [self.edge(value, name, name)]

    def _imported(self, space: dict[str, Any], level: int, module: str, name: str) -> list[Edge]:
        with contextlib.suppress(ImportError):
            full = importlib.util.resolve_name("." * level + (module or ""), space.get("__package__") or "")
            if full in sys.modules and is_followed_module(full):
                return self._otherwise(vars(sys.modules[full]).get(name), f"an import of {full} where it runs")
        return []

    def _otherwise(self, value: Any, place: str) -> list[Edge]:
        """A value that isn't reached by a global name: one of a library is named by its module and name alone."""
        if any(value is each for each in self.rules.named.values() if each is not None):
            return [Edge(value, "", place, self.rules.hit("", value))]
        is_followed_one = is_followed_module(getattr(value, "__module__", None) or "")
        return [self.edge(value, place, is_fixed=True)] if is_followed_one else []


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
