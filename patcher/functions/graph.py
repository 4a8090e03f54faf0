"""Which functions are replaced, and which refer to them, by bytecode, closures and defaults: a graph of objects.

A function can be replaced for one model where code finds it by a global name, in a closure, as a default or as a
member of a class: `Rebinder` copies what is around it. Any other edge (into a table, an object, a class that isn't a
module, an attribute of an imported module) has a description of what it goes `through`, for the error if it leads to a
replaced function. Registries of transformers, which all models share (`ALL_ATTENTION_FUNCTIONS`), aren't followed.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from patcher.compat.attributes import parts_of
from patcher.compat.modeling_code import is_architecture_module, is_modeling_module, is_module_class, registered
from patcher.source.alike import own_members, without_kernel
from patcher.spec.like import Like, find_like, reference

#: Function mappings in a form that can be hashed and pickled, the innermost first.
Layers = tuple[tuple[tuple[str, Callable[..., Any]], ...], ...]

#: Packages whose functions don't call those of a model.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "accelerate", "peft", "patcher", "kernels"} - {"__main__"}
#: Objects whose contents are searched although their class is of a library.
_CONTAINERS = (
    *(dict, list, tuple, set, frozenset, CellType),
    *(MethodType, property, functools.partial, functools.partialmethod),
)
#: What `lazy import` binds until a name is used, from Python 3.15 on.
_LAZY = getattr(types, "LazyImportType", ())
#: Kinds of edges: to an entry of a table that all models share, and to a module class that code instantiates.
SHARED, BUILDS = "shared", "builds"


# --- which functions are replaced ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hit:
    """A function and its replacement.

    Attributes:
        keys: (index of the mapping, key) of all keys that match: the first one decides.
        callers: the names of the classes of a model that call the function, directly or through others.
    """

    keys: tuple[tuple[int, str], ...]
    original: Any
    replacement: Any
    callers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return reference(self.original)


class FunctionRules:
    """Function mappings. The innermost wins; within a mapping `module:name`, then a bare name, then `like(...)`.

    >>> FunctionRules(((("apply_rotary_pos_emb", print),),)).hit("apply_rotary_pos_emb", max).replacement
    <built-in function print>
    """

    def __init__(self, layers: Layers) -> None:
        self.mappings = [dict(layer) for layer in layers]
        keys = [key for mapping in self.mappings for key in mapping]
        self.has_likes = any(isinstance(key, Like) for key in keys)
        #: `module:name` -> the function, None if the module isn't imported, so that no code can have it
        self.named = {key: _function_at(key) for key in keys if ":" in key and not isinstance(key, Like)}
        self.replacements = {id(function): function for mapping in self.mappings for function in mapping.values()}

    def hit(self, name: str, value: Any) -> Hit | None:
        """Return the replacement of a function that code finds by a name, None if it isn't replaced."""
        if isinstance(value, type) or not callable(value):
            return None
        exact = [key for key, function in self.named.items() if function is value]
        keys = [
            (index, key)
            for index, mapping in enumerate(self.mappings)
            for key in (
                *exact,
                *dict.fromkeys((name, getattr(value, "__name__", None))),
                find_like(value, mapping) if self.has_likes else None,
            )
            if key in mapping
        ]
        replacement = self.mappings[keys[0][0]][keys[0][1]] if keys else value
        return Hit(tuple(keys), value, replacement) if replacement is not value else None


def _function_at(key: str) -> Any:
    """Return what `module:name` is bound to, None if it isn't or the module isn't imported."""
    module, _, name = key.partition(":")
    return without_kernel(_global_value(vars(sys.modules[module]), name)) if module in sys.modules else None


def _global_value(namespace: dict[str, Any], name: str) -> Any:
    """Return a value of a namespace, None without one. What is imported lazily is imported, as by its first use."""
    value = namespace.get(name)
    if isinstance(value, _LAZY):
        value = namespace[name] = value.resolve()
    return value


# --- what code refers to, read from its bytecode ---------------------------------------------------------------------


class Reference(NamedTuple):
    """A global name that code reads, the attributes read of it (`nn`, `softmax` in `torch.nn.softmax(x)`), and whether
    it is called itself."""

    name: str
    attributes: tuple[str, ...] = ()
    is_called: bool = False


@dataclass(frozen=True)
class References:
    """The global names and closure variables of a code object and of functions inside of it.

    Attributes:
        read, written: the global names that are read; bound or deleted.
        written_cells: the variables of outer functions that are bound or deleted.
        imported: (level, module, name) of each `from module import name`, and of each name that may be an attribute
            of a module imported by `import module`.
    """

    read: tuple[Reference, ...]
    written: frozenset[str]
    written_cells: frozenset[str]
    imported: tuple[tuple[int, str, str], ...]


@functools.lru_cache(maxsize=8192)
def references_of(code: CodeType) -> References:
    """Return what a code object refers to."""
    read: dict[Reference, None] = {}
    written: set[str] = set()
    cells: set[str] = set()
    imported: dict[tuple[int, str, str], None] = {}
    instructions = list(dis.get_instructions(code))
    level, module = 0, ""
    for index, instruction in enumerate(instructions):
        value = instruction.argval
        match instruction.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS":
                following = takewhile(lambda i: i.opname in ("LOAD_ATTR", "LOAD_METHOD"), instructions[index + 1 :])
                is_called = instruction.opname == "LOAD_GLOBAL" and bool((instruction.arg or 0) & 1)
                read[Reference(value, tuple(load.argval for load in following), is_called)] = None
            case "STORE_GLOBAL" | "DELETE_GLOBAL":
                written.add(value)
            case "STORE_DEREF" | "DELETE_DEREF":
                cells.add(value)
            case "IMPORT_NAME":
                level, module = int(instructions[index - 2].argval or 0), value
                if instructions[index - 1].argval is None:
                    imported |= dict.fromkeys((level, module, name) for name in _names_in(code))
            case "IMPORT_FROM":
                imported[level, module, value] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = references_of(constant)
            read |= dict.fromkeys(inner.read)
            written |= inner.written
            cells |= inner.written_cells  # variables of this function, or of one around it
            imported |= dict.fromkeys(inner.imported)
    return References(tuple(read), frozenset(written), frozenset(cells), tuple(imported))


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a code object and in those inside of it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


# --- the graph -------------------------------------------------------------------------------------------------------


class Edge(NamedTuple):
    """A reference from a function, or an object that holds functions, to an object.

    Attributes:
        name: the name by which code finds the object, "" in a closure or a default.
        through: how it is found, if it can't be replaced there for one model.
        hit: its replacement.
        is_kept: whether it is found by a global name without being called there.
        table: the table of all models with which the object is passed: it runs if a config chooses no entry of that.
        kind: "" for an edge that is followed, `SHARED` or `BUILDS`.
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

    def hits(self, predicate: Callable[[Edge], bool] = lambda edge: True) -> list[Hit]:
        """Return the replaced functions that the object refers to."""
        return [edge.hit for edge in self.edges if edge.hit is not None and not edge.kind and predicate(edge)]


class Graph:
    """The objects that are reachable from added edges, and which of them lead to a replaced function.

    Args:
        modules: the ids of the modules of the model, each of which is changed by itself: no edges lead into them.
    """

    def __init__(self, rules: FunctionRules, modules: Container[int] = ()) -> None:
        self.rules = rules
        self.modules = modules
        self.nodes: dict[int, Node] = {}
        self._needing: set[int] | None = None
        self._written: dict[int, frozenset[str]] = {}

    def add(self, edges: Iterable[Edge]) -> None:
        """Add the objects that edges lead to, and all that these refer to."""
        pending = list(edges)
        while pending:
            edge = pending.pop()
            if edge.kind == BUILDS:
                pending += [member for member in self.members(edge.to) if id(member.to) not in self.nodes]
            elif id(edge.to) not in self.nodes and id(edge.to) not in self.rules.replacements:
                node = self.nodes[id(edge.to)] = Node(edge.to, self._edges_of(edge.to))
                self._needing = None
                pending += node.edges

    def needs(self, value: Any) -> bool:
        """Whether an object that was added leads to a replaced function."""
        if self._needing is None:
            referring: dict[int, list[int]] = {}
            for key, node in self.nodes.items():
                for edge in node.edges:
                    if edge.hit is None and not edge.kind:
                        referring.setdefault(id(edge.to), []).append(key)
            pending = [key for key, node in self.nodes.items() if node.hits()]
            self._needing = set()
            while pending:
                key = pending.pop()
                if key not in self._needing:
                    self._needing.add(key)
                    pending += referring.get(key, ())
        return id(value) in self._needing

    def changes(self, edge: Edge) -> bool:
        """Whether the object of an edge has to be replaced or copied."""
        return not edge.kind and (edge.hit is not None or self.needs(edge.to))

    def reached(
        self, edges: Iterable[Edge], predicate: Callable[[Edge], bool] = lambda edge: True, *, everything: bool = False
    ) -> Iterator[Node]:
        """Yield the nodes that are reached from edges by edges with a predicate, and that lead to a replaced function.

        Args:
            everything: whether to yield nodes that lead to none too.
        """
        pending, seen = [edge.to for edge in edges if edge.hit is None], set[int]()
        while pending:
            value = pending.pop()
            if id(value) in seen or id(value) not in self.nodes or not (everything or self.needs(value)):
                continue
            seen.add(id(value))
            node = self.nodes[id(value)]
            yield node
            followed = [edge for edge in node.edges if not edge.through and not edge.kind and edge.hit is None]
            pending += [edge.to for edge in followed if predicate(edge)]

    def members(self, cls: type) -> list[Edge]:
        """Return the edges to the members of a class and of its bases."""
        skipped = ("__dict__", "__weakref__", "__init_subclass__", "__class_getitem__")
        members = [item for base in filter(is_followed, cls.__mro__) for item in own_members(base).items()]
        unused = nn.Module, PretrainedConfig  # built before, or by code that names them
        used = [
            (name, value)
            for name, value in members
            if name not in skipped and not (isinstance(value, type) and issubclass(value, unused))
        ]
        return [self.edge(value, name, name) for name, value in used]

    def hit_of(self, function: Any) -> Hit | None:
        """Return the replacement of a function object; a method of the same name has none."""
        if not isinstance(function, FunctionType) or "." in function.__qualname__.replace("<locals>.", ""):
            return None
        return self.rules.hit(function.__name__, function)

    def edge(self, to: Any, place: str, name: str = "", *, is_fixed: bool = False) -> Edge:
        """Return the edge to an object, that goes through `place` if the object is fixed there or can't be copied."""
        is_copyable = isinstance(to, FunctionType) or decompose(to) is not None
        through = place if is_copyable else f"{place}, a {type(to).__name__}"
        return Edge(to, name, through if is_fixed or not is_copyable else "", self.hit_of(to))

    def _edges_of(self, value: Any) -> list[Edge]:
        if isinstance(value, FunctionType):
            return self._edges_of_function(value)
        decomposed = decompose(value)
        parts = decomposed[0] if decomposed else () if id(value) in self.modules else _contents(value)
        return [Edge(part, hit=self.hit_of(part)) for part in parts]

    def _edges_of_function(self, function: FunctionType) -> list[Edge]:
        references, namespace = references_of(function.__code__), function.__globals__
        closure = {name: value for name, value in closure_of(function).items() if not isinstance(value, type)}
        is_library = not is_followed_module(namespace.get("__name__", ""))
        global_refs = () if is_library else references.read
        known = (ref for ref in global_refs if ref.name in namespace)
        read = [(ref, without_kernel(_global_value(namespace, ref.name))) for ref in known]
        called = {id(value) for ref, value in read if ref.is_called}
        # A function that is passed on is passed to a table of all models, if the code has one.
        tables = [value for value in (*(value for _, value in read), *closure.values()) if _is_registry(value)]
        edges: list[Edge] = []
        for ref, value in read:
            is_kept = id(value) not in called
            edges += [edge._replace(is_kept=is_kept and edge.to is value) for edge in self._read(value, ref)]
        for imported in () if is_library else references.imported:
            edges += self._imported(namespace, *imported)
        for name, value in closure.items():
            edge = self.edge(value, f"its variable {name!r}")
            changes = f"its variable {name!r}, which changes" if name in references.written_cells else ""
            edges.append(edge._replace(through=edge.through or changes))
        if tables:
            edges = [
                edge._replace(table=tables[0])
                if isinstance(edge.to, FunctionType) and not edge.kind and id(edge.to) not in called
                else edge
                for edge in edges
            ]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        edges += [self.edge(value, "a default") for value in defaults if not isinstance(value, type)]
        used = {*(() if is_library else references.written), *(ref.name for ref in global_refs)}
        for name in sorted(used & self._written_in(namespace) if used else ()):
            through = f"a function that uses the global {name!r}, which changes"
            edges = [edge if edge.kind else edge._replace(through=edge.through or through) for edge in edges]
        wrapped = vars(function).get("__wrapped__")
        objects = [part for edge in edges for part in (edge.to, *(decompose(edge.to) or ((),))[0])]
        if isinstance(wrapped, FunctionType) and not any(wrapped is part for part in objects):
            edges.append(self.edge(wrapped, "its decorator", is_fixed=True))
        return edges

    def _written_in(self, namespace: dict[str, Any]) -> frozenset[str]:
        """Return the global names that functions of a module bind, which a copy of the namespace would not see."""
        if id(namespace) not in self._written:
            # Only by types: other objects may warn, raise or import whatever is looked up on them, `__class__` too.
            values = list(namespace.values())
            for cls in [value for value in values if issubclass(type(value), type)]:
                if getattr(cls, "__module__", "") == namespace.get("__name__"):
                    values += own_members(cls).values()
            members = [value for value in values if callable(value) or type(value) is classmethod]
            functions = [inspect.unwrap(getattr(value, "__func__", value)) for value in members]
            self._written[id(namespace)] = frozenset(
                name
                for function in functions
                if isinstance(function, FunctionType) and function.__globals__ is namespace
                for name in references_of(function.__code__).written
            )
        return self._written[id(namespace)]

    def _read(self, value: Any, ref: Reference) -> list[Edge]:
        """Return the edges for a global name that is bound to a value."""
        name, place, attributes = ref.name, ref.name, list(ref.attributes)
        while attributes and (
            isinstance(value, ModuleType) or (isinstance(value, FunctionType) and attributes[0] in vars(value))
        ):
            place = f"{place}.{attributes[0]}"
            value = _global_value(vars(value), attributes.pop(0))
        if place == name and (hit := self.rules.hit(name, value)) is not None:
            return [Edge(value, name, hit=hit)]
        if is_module_class(value):
            if attributes:
                return self._indirect(inspect.getattr_static(value, attributes[0], None), f"{place}.{attributes[0]}")
            return [Edge(value, kind=BUILDS)] if ref.is_called and not ref.attributes else []
        if place != name:
            return self._indirect(value, place)
        if (shared := _shared(name, value)) or _is_registry(value):
            return [Edge(function, name, hit=self.hit_of(function), kind=SHARED) for function in shared]
        return [self.edge(value, name, name)]

    def _imported(self, namespace: dict[str, Any], level: int, module: str, name: str) -> list[Edge]:
        with contextlib.suppress(ImportError):
            full = importlib.util.resolve_name("." * level + (module or ""), namespace.get("__package__") or "")
            if full in sys.modules and is_followed_module(full) and name in vars(sys.modules[full]):
                return self._indirect(
                    _global_value(vars(sys.modules[full]), name), f"an import of {full} where it runs"
                )
        return []

    def _indirect(self, value: Any, place: str) -> list[Edge]:
        """Return the edge to an object that isn't found by a global name; one of a library needs a `module:name`."""
        if any(value is function for function in self.rules.named.values() if function is not None):
            return [Edge(value, "", place, self.rules.hit("", value))]
        is_of_model = is_followed_module(getattr(value, "__module__", None) or "")
        return [self.edge(value, place, is_fixed=True)] if is_of_model else []


def decompose(value: Any) -> tuple[tuple[Any, ...], Callable[..., Any]] | None:
    """Return the functions that an object wraps, and what makes such an object of others; None if it wraps none."""
    parts: tuple[Any, ...]
    build: Callable[..., Any]
    if isinstance(value, FunctionType | type):
        return None
    if (function := without_kernel(value)) is not value:  # a kernel isn't made for the copy
        parts, build = (function,), lambda copied: copied
    elif isinstance(value, staticmethod | classmethod):
        parts, build = (value.__func__,), type(value)
    else:
        return None
    is_known = all(isinstance(part, FunctionType) or decompose(part) is not None for part in parts)
    return (parts, build) if is_known else None


def _contents(value: Any) -> list[Any]:
    """Return the objects in an object that may be functions or hold some."""
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, nn.Module):  # that a model runs without having it as a part
        return [*_contents_of_class(type(value)), vars(value)]
    if isinstance(value, type):
        return [] if issubclass(value, nn.Module | torch.Tensor) else _contents_of_class(value)
    if type(value) in (tuple, dict) and all(without_kernel(part) is not part for part in _elements(value)):
        return []  # what `kernels` keeps of a class for `use_kernels=True`, and doesn't call
    if isinstance(value, _CONTAINERS) or is_followed(type(value)):
        return parts_of(value)
    return [part for part in getattr(value, "__dict__", {}).values() if isinstance(part, FunctionType)]


def _contents_of_class(cls: type) -> list[Any]:
    return [member for base in filter(is_followed, cls.__mro__) for member in own_members(base).values()]


def _elements(value: Any) -> Iterable[Any]:
    """Return the elements of a plain container; a subclass of dict may import a file for each entry."""
    return value.values() if type(value) is dict else value if isinstance(value, list | tuple | set) else ()


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return the closure variables of a function that have a value, without `__class__`."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            variables[name] = cell.cell_contents
    variables.pop("__class__", None)
    return variables


def is_followed_module(name: str) -> bool:
    """Whether functions of a module may call those of a model: those of libraries don't."""
    return name.partition(".")[0] not in _LIBRARIES


def is_followed(value: type | FunctionType) -> bool:
    """Whether a class or function is of a modeling file or a user's own, and not what transformers has for all."""
    name = value.__module__
    return is_architecture_module(name) or (is_followed_module(name) and not is_modeling_module(name))


def _is_of_all_models(module: str) -> bool:
    return is_modeling_module(module) and not is_architecture_module(module)


def _is_registry(value: Any) -> bool:
    """Whether a value is a registry class's object of transformers, such as `ALL_ATTENTION_FUNCTIONS`."""
    return isinstance(value, Mapping) and type(value) is not dict and _is_of_all_models(type(value).__module__)


def _shared(name: str, value: Any) -> list[Any]:
    """Return the functions of a table outside of modeling files, which all models share."""
    if _is_registry(value):
        return registered(value)
    functions = [element for element in _elements(value) if isinstance(element, FunctionType)]
    modules = sys.modules.copy() if functions else {}  # not a list of pairs: see `Cover.add_all`
    homes = (home for home, module in modules.items() if getattr(module, "__dict__", {}).get(name) is value)
    return functions if any(map(_is_of_all_models, homes)) else []
