"""Functions and classes with other globals: the same code and closures, in which some names mean something else.

Python looks global names up in the namespace that a function was made with. A copy of the function with a copy of that
namespace, in which one name is bound to a replacement, calls the replacement; nothing that others hold has changed.
Zero-argument `super()` stays right, for its `__class__` is in the closure, which the copy shares. Each copy has a code
object of its own: `torch.compile` keeps what it has compiled by code object, and would mix the two.

The copies see what the names of the module were bound to when they were made.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from patcher.compat.modeling_code import REBOUND
from patcher.construction.gates import own_members, without_stand_ins
from patcher.errors import PatchConstructionError
from patcher.functions.graph import Edge, Graph, closure_of, is_followed, made_of
from patcher.functions.rules import FunctionRules, Layers
from patcher.layouts.carried import RECIPE, reduce_by_recipe

lock = threading.RLock()
#: mappings -> what was made for them last, as long as a class of it lives
rebinders: weakref.WeakValueDictionary[Layers, Rebinder] = weakref.WeakValueDictionary()


class Rebinder:
    """Makes the copies for some function mappings, each once."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.graph = Graph(FunctionRules(layers))
        self._functions: dict[int, FunctionType] = {}
        self._classes: dict[type, type] = {}
        #: id of a namespace -> its copy
        self._spaces: dict[int, dict[str, Any]] = {}

    def add(self, cls: type) -> list[Edge]:
        """Look at the functions of a class, and of those that it derives from, and at what these call."""
        roots = self.graph.members(cls)
        self.graph.add(roots)
        return roots

    def copy(self, value: Any) -> Any:
        """What takes the place of a function, or of what is made of some; itself, if nothing is replaced in it."""
        if (hit := self.graph.hit_of(value)) is not None:
            return hit.replacement
        if not self.graph.needs(value):
            return value
        if isinstance(value, FunctionType):
            return self._functions.get(id(value)) or self._copy_of(value)
        if (made := made_of(value)) is None:
            return value
        parts, make = made
        return make(*map(self.copy, parts))

    def _copy_of(self, function: FunctionType) -> FunctionType:
        found = self.graph.nodes[id(function)].edges
        named = {edge.name: edge for edge in found if edge.name and not edge.through and self.graph.changes(edge)}
        space = function.__globals__
        if named:  # what a load in another thread has put there for a while is taken out
            space = self._spaces.setdefault(id(space), without_stand_ins(space))
        held = closure_of(function)
        changed = {
            name for name, value in held.items() if self.graph.changes(Edge(value, hit=self.graph.hit_of(value)))
        }
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = tuple(CellType() if name in changed else cell for name, cell in cells)
        made = FunctionType(function.__code__.replace(), space, function.__name__, None, closure or None)
        self._functions[id(function)] = made  # first: functions may call each other in a circle
        for name, edge in named.items():
            space[name] = self.copy(function.__globals__[name]) if edge.hit is None else edge.hit.replacement
        for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
            if name in changed:
                cell.cell_contents = self.copy(held[name])
        made.__defaults__ = function.__defaults__ and tuple(map(self.copy, function.__defaults__))
        made.__kwdefaults__ = self._copies(function.__kwdefaults__ or {}) or None
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__", "__type_params__"):
            if hasattr(function, name):
                setattr(made, name, getattr(function, name))
        made.__dict__.update({**self._copies(vars(function)), REBOUND: function})
        return made

    def _copies(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.copy(value) for name, value in named.items()}

    def class_of(self, cls: type) -> Any:
        """A class whose functions call the replacements: one derived from it, or itself, if it calls none."""
        if cls in self._classes:
            return self._classes[cls]
        own = {name: new for name, value in own_members(cls).items() if (new := self.copy(value)) is not value}
        # A base that changes comes right before the one that it was made of: what `super()` finds, it finds there.
        bases = [made for base in cls.__bases__ if is_followed(base) and (made := self.class_of(base)) is not base]
        made = self._classes[cls] = cls if not own and not bases else self._derived(cls, bases, own)
        return made

    def _derived(self, cls: type, bases: list[type], own: dict[str, Any]) -> type:
        names = ("__module__", "__doc__", "__firstlineno__")
        body = {name: vars(cls)[name] for name in names if name in vars(cls)}
        body |= {"__qualname__": cls.__qualname__, **own, REBOUND: cls, _MADE_BY: self, "__new__": _new}
        body |= {RECIPE: (rebound, cls, self.layers), "__reduce_ex__": reduce_by_recipe}
        try:
            made: type = type(cls)(cls.__name__, (cls, *bases), body)
            return made
        except TypeError as error:
            raise PatchConstructionError(
                f"function_mapping: {cls.__qualname__} calls a function that is replaced, and no class can be derived "
                f"from it ({error}). Replace the class, with class_mapping."
            ) from error


_MADE_BY = "_patcher_rebound_by"


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The `__new__` of such a class, which is made for one model.

    What is made by calling it (`type(model)(config)`, `type(model).from_pretrained(...)`) is as it is without it.
    """
    original = vars(cls).get(REBOUND)
    return object.__new__(cls) if original is None else original(*args, **kwargs)


def rebound(cls: type, layers: Layers) -> Any:
    """A class whose functions call other functions, as a pickle asks for it."""
    with lock:
        rebinder = rebinders.setdefault(layers, Rebinder(layers))
        rebinder.add(cls)
        return rebinder.class_of(cls)
