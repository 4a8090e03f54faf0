"""Functions and classes with other globals: the same code and closures, in which some names mean something else.

Python looks global names up in the namespace that a function was made with. A copy of the function with a copy of that
namespace, in which one name is bound to a replacement, calls the replacement; nothing that others hold has changed.
Zero-argument `super()` stays right, for its `__class__` is in the closure, which the copy shares. Each copy has a code
object of its own: `torch.compile` keeps what it has compiled by code object, and would mix the two.

The copies see what the names of the module were bound to when they were made.
"""

from __future__ import annotations

import copyreg
import inspect
import threading
import weakref
from types import CellType, FunctionType, MethodType
from typing import Any

from patcher.compat.modeling_code import REBOUND, Rebound, unrebound
from patcher.construction.init_hooks import own_members
from patcher.errors import PatchConstructionError
from patcher.functions.calls import CallGraph, Use, closure_of, functions_in, is_followed, with_functions
from patcher.functions.references import references_of
from patcher.functions.rules import FunctionRules, Layers, named_object
from patcher.layouts.carried import RECIPE, PickledClass

lock = threading.RLock()
#: mappings -> what was made for them, as long as a class of it lives
_rebinders: weakref.WeakValueDictionary[Layers, Rebinder] = weakref.WeakValueDictionary()


class Rebinder:
    """Makes the copies for some function mappings, each once."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.rules = FunctionRules(map(dict, layers))
        self.graph = CallGraph(self.rules)
        self._functions: dict[int, FunctionType] = {}
        self._classes: dict[type, type] = {}
        #: id of a namespace -> the names that its functions bind
        self._written: dict[int, frozenset[str]] = {}
        #: class -> its members with functions in them, as they were
        self._members: dict[type, dict[str, Any]] = {}
        #: id of a namespace -> it, as it was, and the copy
        self._spaces: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}

    def is_current(self) -> bool:
        """Whether the names of the modules are bound to what they were when the copies were made."""
        return (
            all(named_object(key) is value for key, value in self.rules.named.items())
            and all(
                {*filter(_counts, space)} == {*filter(_counts, seen)}
                and all(_original(space[name]) is value for name, value in seen.items() if _counts(name))
                for space, seen, _ in self._spaces.values()
            )
            and all(_members(cls) == members for cls, members in self._members.items())
        )

    def add(self, cls: type) -> list[Use]:
        """Look at the functions of a class, and of those that it derives from, and at what these call."""
        bases = list(filter(is_followed, cls.__mro__))
        for base in bases:
            if base not in self._members:
                self._members[base] = _members(base)
        roots = [use for base in bases for use in self.graph.members(base)]
        self.graph.add(roots)
        return roots

    def function(self, function: FunctionType) -> FunctionType:
        """A function that calls the replacements; itself, if it calls none of what they replace."""
        if not self.graph.needs(function):
            return function
        made = self._functions.get(id(function))
        if made is not None:
            return made
        uses = self.graph.nodes[id(function)].uses
        named = {use.name: use for use in uses if use.name and not use.through and self.graph.changes(use)}
        space = self._space(function.__globals__) if named else function.__globals__
        held = closure_of(function)
        changed = {name for name, value in held.items() if any(map(self._changes, functions_in(value)))}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = tuple(CellType() if name in changed else cell for name, cell in cells)
        made = FunctionType(function.__code__.replace(), space, function.__name__, None, closure or None)
        self._functions[id(function)] = made  # first: functions may call each other in a circle
        for name, use in named.items():
            space[name] = self.copy(function.__globals__[name]) if use.hit is None else use.hit.replacement
        for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
            if name in changed:
                cell.cell_contents = self.copy(held[name])
        made.__defaults__ = _each(self.copy, function.__defaults__)
        if function.__kwdefaults__ is not None:
            made.__kwdefaults__ = {name: self.copy(value) for name, value in function.__kwdefaults__.items()}
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__", "__type_params__"):
            if hasattr(function, name):
                setattr(made, name, getattr(function, name))
        made.__dict__.update({name: self.copy(value) for name, value in vars(function).items()})
        made.__dict__[REBOUND] = function
        return made

    def _changes(self, function: FunctionType) -> bool:
        return self.graph.changes(Use(function, hit=self.graph.hit_of(function)))

    def copy(self, value: Any) -> Any:
        """What takes the place of a value that has functions in it; itself, if they call none of what is replaced."""
        return with_functions(value, self._copy)

    def _copy(self, function: FunctionType) -> Any:
        hit = self.graph.hit_of(function)
        return self.function(function) if hit is None else hit.replacement

    def _space(self, space: dict[str, Any]) -> dict[str, Any]:
        """The copy of a namespace. What a load in another thread has put into it for a while is taken out."""
        if id(space) not in self._spaces:
            seen = {name: _original(value) for name, value in space.items()}
            self._spaces[id(space)] = space, seen, dict(seen)
        return self._spaces[id(space)][2]

    def written_names(self, function: FunctionType) -> list[str]:
        """The global names that a function reads and that code of its module binds: a copy would not see it."""
        space = function.__globals__
        if id(space) not in self._written:
            functions = [value for value in space.values() if isinstance(value, FunctionType)]
            for value in space.values():
                if isinstance(value, type) and value.__module__ == space.get("__name__"):
                    functions += [each for member in own_members(value).values() for each in functions_in(member)]
            own = [each for each in map(inspect.unwrap, functions) if each.__globals__ is space]
            self._written[id(space)] = frozenset(name for each in own for name in references_of(each.__code__).written)
        found = references_of(function.__code__)
        return sorted(({each.name for each in found.read} | found.written) & self._written[id(space)])

    def attribute(self, value: Any) -> Any:
        """What takes the place of a function or method that a module keeps as an attribute."""
        if isinstance(value, MethodType):
            function = value.__func__
            made = self.function(function) if isinstance(function, FunctionType) else function
            return value if made is function else MethodType(made, value.__self__)
        return self.copy(value)

    def class_of(self, cls: type) -> Any:
        """A class whose functions call the replacements: one derived from it, or itself, if it calls none."""
        if cls in self._classes:
            return self._classes[cls]
        own = {name: new for name, value in own_members(cls).items() if (new := self.copy(value)) is not value}
        # A base that changes comes right before the one that it was made of: what `super()` finds, it finds there.
        bases = [made for base in cls.__bases__ if is_followed(base) and (made := self.class_of(base)) is not base]
        made = cls if not own and not bases else self._derived(cls, bases, own)
        self._classes[cls] = made
        return made

    def _derived(self, cls: type, bases: list[type], own: dict[str, Any]) -> type:
        names = ("__module__", "__qualname__", "__doc__", "__firstlineno__")
        body = {name: vars(cls)[name] for name in names if name in vars(cls)}
        body |= {"__qualname__": cls.__qualname__, **own, REBOUND: cls, _MADE_BY: self}
        body |= {RECIPE: (rebound, cls, self.layers), "__reduce_ex__": _reduced_object}
        try:
            made: type = _metaclass(type(cls))(cls.__name__, (cls, *bases), body)
            return made
        except TypeError as error:
            raise PatchConstructionError(
                f"function_mapping: {cls.__qualname__} calls a function that is replaced, and no class can be derived "
                f"from it ({error}). Replace the class, with class_mapping."
            ) from error


def rebinder_for(layers: Layers) -> Rebinder:
    """What makes the copies for some function mappings: the same as before, if the modules have not changed."""
    with lock:
        found = _rebinders.get(layers)
        if found is None or not found.is_current():
            found = _rebinders[layers] = Rebinder(layers)
        return found


_MADE_BY = "_patcher_rebound_by"
_metaclasses: dict[type, type] = {}


def _metaclass(around: type) -> Any:
    """The metaclass for classes derived from one with such a metaclass.

    They are pickled by what they were made of, for their name is that of another class.
    """
    with lock:
        if issubclass(around, Rebound):
            return around
        if around not in _metaclasses:
            made = Rebound if around is type else type("Rebound", (Rebound, around), {})
            copyreg.pickle(made, _reduced)
            _metaclasses[around] = made
        return _metaclasses[around]


def _reduced(cls: type) -> Any:
    make, *args = vars(cls).get(RECIPE, (None,))
    return cls.__qualname__ if make is None else (make, tuple(args))


def _reduced_object(self: Any, protocol: Any) -> Any:
    cls = next(cls for cls in type(self).__mro__ if RECIPE in vars(cls))
    original: Any = unrebound(cls)
    reduced = original.__reduce_ex__(self, protocol)
    if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    made, *args = reduced[1]
    return _new, (PickledClass.of(made), *args), *reduced[2:]


def _new(pickled: Any, *args: Any) -> Any:
    cls = PickledClass.read(pickled)
    return cls.__new__(cls, *args)


def rebound(cls: type, layers: Layers) -> Any:
    """A class whose functions call other functions, as a pickle asks for it."""
    with lock:
        rebinder = rebinder_for(layers)
        rebinder.add(cls)
        return rebinder.class_of(cls)


def _counts(name: str) -> bool:
    """Whether a name of a module is one that its code reads."""
    return not name.startswith("__")


def _members(cls: type) -> dict[str, Any]:
    """The members of a class that have functions in them."""
    members = own_members(cls)
    counted = (name for name in members if _counts(name) or name == "__init__")
    return {name: members[name] for name in counted if functions_in(members[name])}


def _original(value: Any) -> Any:
    """What a name is bound to where no load is under way."""
    if isinstance(value, type):
        return vars(value).get("_patcher_stands_for", value)
    return _each(_original, value) if type(value) is tuple and any(isinstance(each, type) for each in value) else value


def _each(change: Any, values: Any) -> Any:
    """What becomes of each value; the same tuple, if none of them changes."""
    if values is None:
        return None
    changed = tuple(map(change, values))
    return values if all(new is old for new, old in zip(changed, values, strict=True)) else changed
