"""Copies of functions and classes with other globals.

A function looks up global names in its `__globals__`. A copy of the function with a copy of that namespace, in which
a name is bound to a replacement, calls the replacement, and the original is unchanged. Zero-argument `super()` works,
since its `__class__` is in the closure, which the copy shares. Each copy has its own code object, as `torch.compile`
caches by code object. Copies don't see what is bound in the module later.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Container, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import nn

from patcher.compat.modeling_code import REBOUND
from patcher.construction.gates import without_stand_ins
from patcher.errors import PatchConstructionError
from patcher.functions.graph import Edge, FunctionRules, Graph, Hit, Layers, closure_of, decompose, is_followed
from patcher.layouts.carried import RECIPE, reduce_by_recipe
from patcher.source.alike import own_members

lock = threading.RLock()
#: mappings -> their latest rebinder, as long as a class of it lives
rebinders: weakref.WeakValueDictionary[Layers, Rebinder] = weakref.WeakValueDictionary()


class Rebinder:
    """Copies functions and classes for some function mappings, each once.

    Args:
        modules: the ids of the modules of the model.
    """

    def __init__(self, layers: Layers, modules: Container[int] = ()) -> None:
        self.layers = layers
        self.graph = Graph(FunctionRules(layers), modules)
        self._functions: dict[int, FunctionType] = {}
        self._classes: dict[type, type] = {}
        #: id of a namespace -> its copy
        self._namespaces: dict[int, dict[str, Any]] = {}

    def add(self, cls: type) -> list[Edge]:
        """Add the functions of a class and of its bases to the graph, and what these call."""
        roots = self.graph.members(cls)
        self.graph.add(roots)
        return roots

    def references(self) -> Iterator[tuple[FunctionType, str, Hit]]:
        """Yield the functions that find a replaced one by a global name, that name, and the replaced one."""
        for node in map(self.graph.nodes.__getitem__, self._functions):
            yield from ((node.value, edge.name, edge.hit) for edge in node.edges if edge.name and edge.hit is not None)

    def copy(self, value: Any) -> Any:
        """Return the replacement or copy of a function or wrapper; itself, if it calls no replaced function."""
        if (hit := self.graph.hit_of(value)) is not None:
            return hit.replacement
        if not self.graph.needs(value):
            return value
        if isinstance(value, FunctionType):
            return self._functions.get(id(value)) or self._copy_of(value)
        decomposed = decompose(value)
        if decomposed is None:
            return value
        parts, build = decomposed
        return build(*map(self.copy, parts))

    def _copy_of(self, function: FunctionType) -> FunctionType:
        edges = self.graph.nodes[id(function)].edges
        by_name = {edge.name: edge for edge in edges if edge.name and not edge.through and self.graph.changes(edge)}
        namespace = function.__globals__
        if by_name:  # without the stand-ins of a load in another thread
            namespace = self._namespaces.setdefault(id(namespace), without_stand_ins(namespace))
            # By it torch.compile would look up what is in the module, and mix it up with stock's in one graph.
            namespace.pop("__name__", None)
        variables = closure_of(function)
        changed = {
            name for name, value in variables.items() if self.graph.changes(Edge(value, hit=self.graph.hit_of(value)))
        }
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = tuple(CellType() if name in changed else cell for name, cell in cells)
        copied = FunctionType(function.__code__.replace(), namespace, function.__name__, None, closure or None)
        self._functions[id(function)] = copied  # before those that it calls, which may call it
        for name, edge in by_name.items():
            namespace[name] = self.copy(function.__globals__[name]) if edge.hit is None else edge.hit.replacement
        for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
            if name in changed:
                cell.cell_contents = self.copy(variables[name])
        copied.__defaults__ = function.__defaults__ and tuple(map(self.copy, function.__defaults__))
        copied.__kwdefaults__ = self._copies(function.__kwdefaults__ or {}) or None
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(copied, name, getattr(function, name))
        copied.__dict__.update({**self._copies(vars(function)), REBOUND: function})
        return copied

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.copy(value) for name, value in values.items()}

    def class_of(self, cls: type) -> Any:
        """Return a subclass whose functions call the replacements; the class itself if it calls none."""
        if cls not in self._classes:
            members = {name: new for name, old in own_members(cls).items() if (new := self.copy(old)) is not old}
            # A copied base comes right before its original in the MRO, so `super()` finds it first.
            bases = [new for base in filter(is_followed, cls.__bases__) if (new := self.class_of(base)) is not base]
            self._classes[cls] = self._derive(cls, bases, members) if members or bases else cls
        return self._classes[cls]

    def _derive(self, cls: type, bases: list[type], members: dict[str, Any]) -> Any:
        names = ("__module__", "__doc__", "__firstlineno__")
        body = {name: vars(cls)[name] for name in names if name in vars(cls)}
        body |= {"__qualname__": cls.__qualname__, **members, REBOUND: cls, _REBINDER: self, "__new__": _new}
        body |= {RECIPE: (rebound, cls, self.layers), "__reduce_ex__": reduce_by_recipe}
        try:
            new = type(cls)(cls.__name__, (cls, *bases), body)
            for name, value in members.items():  # which an `__init_subclass__` may have set to the originals
                setattr(new, name, value)
            return new
        except TypeError as error:
            raise PatchConstructionError(
                f"function_mapping: {cls.__qualname__} calls a function that is replaced, and no class can be derived "
                f"from it ({error}). Replace the class, with class_mapping."
            ) from error


_REBINDER = "_patcher_rebound_by"


def rebinder_of(module: nn.Module) -> Rebinder | None:
    """Return what made the class of a module, or the one that it is derived from, if it calls replaced functions."""
    return getattr(type(module), _REBINDER, None)


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Construct the original class, in `type(model)(config)` or `type(model).from_pretrained(...)`."""
    original = vars(cls).get(REBOUND)
    return object.__new__(cls) if original is None else original(*args, **kwargs)


def rebound(cls: type, layers: Layers) -> Any:
    """Return the copy of a class for function mappings, for unpickling."""
    with lock:
        rebinder = rebinders.setdefault(layers, Rebinder(layers))
        rebinder.add(cls)
        return rebinder.class_of(cls)
