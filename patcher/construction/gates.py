"""Gates and stand-ins: what is installed in modeling code while a mapping is in force.

A gate replaces the `__init__` of a class of modeling code: for an object of exactly that class, in a context where a
mapping names it, it initializes the object as one of the replacement. So it doesn't matter how modeling code reaches
the class (module attribute, alias, table, late import), and other threads can construct, pickle, subclass and compare
the class meanwhile.

A gate can't be put on a class of torch, which other code uses too, nor does it know the name to which a modeling file
has bound the class, which the registry matches. For these a stand-in replaces the class in the namespace or table:
called in such a context it builds the replacement, otherwise the class. To other code it passes for the class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.modeling_code import (
    STANDS_FOR,
    is_modeling_module,
    is_module_class,
    of_modeling_code,
    subclasses,
)
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction, construction_here
from patcher.construction.in_force import Block, entered, entering
from patcher.construction.lock import process_lock
from patcher.construction.meta_init import watch_parameters
from patcher.source.alike import IN_PLACE_OF
from patcher.source.importing import Watcher


class Bound(NamedTuple):
    """A rebound entry of a class, a namespace or a table."""

    container: Any
    key: Any
    before: Any
    after: Any


#: (id of the container, key) -> the entry; covers share them
bound: dict[tuple[int, Any], Bound] = {}

# The methods of dict are called on tables directly: some subclasses build an object (`ACT2FN`) or import a modeling
# file when an entry is read.


def _entry(container: Any, key: Any) -> Any:
    if isinstance(container, list):
        return container[key] if key < len(container) else None
    return dict.get(container, key) if isinstance(container, dict) else vars(container).get(key)


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict):
        dict.__setitem__(container, key, value)
    elif isinstance(container, list):
        container[key] = value
    elif value is None:
        delattr(container, key)
    else:
        setattr(container, key, value)


def _gate(cls: type[nn.Module], before: Any) -> Any:
    """Return the gate of a class with its own `__init__`, or None if it inherits that."""

    @functools.wraps(cls.__init__)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        with construction_here() if type(self) is cls else nullcontext() as construction:
            if construction is None or construction.build_replacement(cls, "", self, args, kwargs) is None:
                if construction is not None and construction.outermost is None and isinstance(self, PreTrainedModel):
                    construction.outermost = self
                init = super(cls, self).__init__ if before is None else before.__get__(self, cls)
                init(*args, **kwargs)
            if construction is not None and construction.root is self:
                construction.end()

    setattr(__init__, IN_PLACE_OF, before)
    return __init__


def without_stand_ins(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a namespace with the original classes."""
    return {name: _unwrapped(value) for name, value in namespace.items()}


def _unwrapped(value: Any) -> Any:
    """Return the class of a stand-in, also inside of a tuple; anything else as it is."""
    if issubclass(type(value), type):  # looked up on other objects, `__class__` may warn or raise
        return value.__dict__.get(STANDS_FOR, value)
    if type(value) is tuple and any(isinstance(item, type) and STANDS_FOR in vars(item) for item in value):
        return tuple(map(_unwrapped, value))
    return value


def _stand_in(name: str, original: Any) -> Any:
    """Make a class that passes for `original` and builds the replacement when called.

    Args:
        name: the name to which the class is bound.
        original: the class, or a tuple in which to replace the module classes.
    """
    if isinstance(original, tuple):
        return tuple(_stand_in("", item) if is_module_class(item) else item for item in original)
    meta: Any = type(original)

    class StandIn(meta):  # type: ignore[misc]
        def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any) -> Any:
            if STANDS_FOR in body:
                return super().__new__(mcs, name, bases, body)
            return meta(name, tuple(map(_unwrapped, bases)), body, **kwargs)  # a subclass is one of the original

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            with construction_here() as construction:
                module = construction and construction.build_replacement(original, name, None, args, kwargs)
                return original(*args, **kwargs) if module is None else module

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(_unwrapped(subclass), original)

        def __eq__(cls, other: object) -> bool:
            match = ClassRules(entered()).match(original, name)
            return other is cls or other is original or (match is not None and match.replacement is other)

        def __hash__(cls) -> int:
            return hash(original)

    body = {STANDS_FOR: original, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return StandIn(original.__name__, (original,), body)


class Cover:
    """The gates and stand-ins for some class rules, and gates on the models that may be constructed."""

    active: ClassVar[set[Cover]] = set()
    #: torch's hook on the registration of parameters, while covers are active
    hook: ClassVar[Any] = None

    def __init__(self, rules: ClassRules, models: type[PreTrainedModel] | None) -> None:
        self.rules = rules
        self.models = models
        self.all_classes = False
        self._places: set[tuple[int, Any]] = set()
        #: the ids of modules whose stand-ins are installed
        self._seen: set[int] = set()
        #: replaced classes outside of modeling code
        self._foreign: set[type[nn.Module]] = set()
        with process_lock:
            Cover.active.add(self)
            if len(Cover.active) == 1:
                _watcher.begin()
                Cover.hook = watch_parameters()

    def add_all(self) -> None:
        """Install gates on replaced classes of modeling code and on models, and stand-ins for other classes."""
        classes = subclasses(nn.Module) if self.all_classes else self.rules.classes()
        with_gate = of_modeling_code(classes)
        models = (self.models, *subclasses(self.models)) if self.models is not None else ()
        for cls in (*with_gate, *(model for model in models if model is not PreTrainedModel)):
            self._bind(cls, "__init__", functools.partial(_gate, cls))
        self._foreign = {cls for cls in classes if cls not in with_gate and self.rules.concerns(cls)}
        # Not list(): it allocates pairs, and a garbage collection in between may run code that imports.
        for name, module in sys.modules.copy().items() if self._foreign or self.rules.has_registry else ():
            if is_modeling_module(name) and isinstance(module, ModuleType):
                self._add_names(module)

    def add_module(self, module: ModuleType) -> None:
        """Do the same for a modeling module that has just been imported."""
        for cls in of_modeling_code(filter(is_module_class, list(vars(module).values()))):
            is_model = self.models is not None and issubclass(cls, self.models)
            if is_model or self.all_classes or self.rules.concerns(cls):
                self._bind(cls, "__init__", functools.partial(_gate, cls))
        self._add_names(module)

    def _add_names(self, module: ModuleType) -> None:
        """Install stand-ins in the namespace of a modeling module and in its tables."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        namespace = vars(module)
        for name, value in list(namespace.items()):
            # A class that matches by its own name has a gate.
            is_renamed = is_module_class(value) and not self.rules.concerns(_unwrapped(value))
            if self._holds_foreign(value) or (is_renamed and self.rules.concerns(_unwrapped(value), name)):
                self._bind(namespace, name, functools.partial(_stand_in, name))
            elif self._foreign and (isinstance(value, dict) or type(value) is list):
                for key, item in list(dict.items(value) if isinstance(value, dict) else enumerate(value)):
                    if self._holds_foreign(item):
                        self._bind(value, key, functools.partial(_stand_in, ""))

    def _holds_foreign(self, item: Any) -> bool:
        """Whether an entry is such a class, or a tuple with one, as `(nn.ReLU, {"inplace": True})`."""
        values = item if type(item) is tuple else (item,)
        return any(isinstance(value, type) and _unwrapped(value) in self._foreign for value in values)

    def _bind(self, container: Any, key: Any, after: Callable[[Any], Any]) -> None:
        """Rebind an entry to `after` of its value."""
        place = id(container), key
        with process_lock:
            # Another thread than the one that imports may have left the block.
            if place not in self._places and self in Cover.active:
                self._places.add(place)
                if place not in bound:
                    before = _entry(container, key)
                    bound[place] = Bound(container, key, before, after(before))
                    _put(container, key, bound[place].after)

    def remove_all(self) -> None:
        with process_lock:
            Cover.active.discard(self)
            if not Cover.active:
                _watcher.end()
                Cover.hook.remove()
            for place in self._places.difference(*(other._places for other in Cover.active)):
                entry = bound.pop(place, None)  # None if an interrupt came before it was bound
                # What other code has put there meanwhile stays.
                if entry is not None and _entry(entry.container, entry.key) is entry.after:
                    _put(entry.container, entry.key, entry.before)


@contextmanager
def in_force(block: Block, rules: ClassRules, *, models: type[PreTrainedModel] | None = None) -> Iterator[None]:
    """Put a block in force, with gates and stand-ins for its rules until it is left.

    Args:
        models: a class; it and its subclasses may be constructed inside, by the load of a patched model or by hand.
    """
    with entering(block):
        if not rules.entries:
            yield
            return
        cover = Cover(rules, models)
        try:
            cover.add_all()
            yield
        finally:
            cover.remove_all()


@contextmanager
def building(construction: Construction, model: type[PreTrainedModel] | None = None) -> Iterator[None]:
    """Build a construction inside the block, with exactly its patchers in force.

    Args:
        model: the class whose `__init__` ends the construction, before a load goes on; otherwise the block does.
    """
    rules = construction.rules
    with in_force(Block(rules.entries, only=True, construction=construction), rules, models=model):
        yield
        construction.end()


def cover_new_classes(rules: ClassRules | None = None) -> None:
    """Install gates on classes that were created since a block began, other than by an import.

    Args:
        rules: of a construction that records constructor arguments, for which all classes of modeling code get gates.
    """
    for cover in list(Cover.active):
        cover.all_classes |= rules is not None and cover.rules.entries == rules.entries
        cover.add_all()


def _cover_module(module: ModuleType) -> None:
    with process_lock:
        for cover in Cover.active:
            cover.add_module(module)


_watcher = Watcher("modeling code", is_modeling_module, _cover_module)
