"""What takes the place of something in this process while a mapping is in force: gates, and stand-ins for names.

A gate is the `__init__` of a class of modeling code: called for an object of exactly that class, in a context where a
mapping names it, it makes the object one of the replacement. So it doesn't matter where modeling code finds the class
(a module attribute, an alias, a table, a function that imports it late), and for every other thread the class is what
it always was: it can be pickled, subclassed and compared meanwhile.

A gate can't tell `LayerNorm` in one modeling file from `torch.nn.LayerNorm`, which is not ours to touch, nor know
under which other name a file has bound a class, which the registry goes by. There a stand-in takes the place of the
class, in the namespace or table: called in such a context it builds the replacement, and anywhere else the class.
Whoever reads the name meanwhile has what passes for the class, and may subclass it.
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

from patcher.compat.modeling_code import STANDS_FOR, is_modeling_module, of_modeling_code, subclasses
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction, construction_here
from patcher.construction.in_force import Block, entered, entering
from patcher.construction.lock import process_lock
from patcher.construction.meta_init import watch_parameters
from patcher.source.alike import IN_PLACE_OF
from patcher.source.importing import Watcher


class Bound(NamedTuple):
    """A place, in a class, a namespace or a table, that holds something else as long as a cover needs it there."""

    container: Any
    key: Any
    before: Any
    after: Any


#: the places, by the id of the container and the key; covers share them
bound: dict[tuple[int, Any], Bound] = {}

# A table may be a dict of a kind of its own: one builds an object for each entry that is looked at (`ACT2FN`), others
# import a modeling file for it. How such a class reads and writes doesn't matter.


def _entry(container: Any, key: Any) -> Any:
    """What is in a place, None if nothing is."""
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
    """The `__init__` of a class with a gate."""

    @functools.wraps(cls.__init__)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        with construction_here() if type(self) is cls else nullcontext() as construction:
            if construction is not None and construction.replaced(cls, "", self, args, kwargs) is not None:
                return
            if before is None:
                super(cls, self).__init__(*args, **kwargs)
            else:
                before(self, *args, **kwargs)

    setattr(__init__, IN_PLACE_OF, before)
    return __init__


def own_members(cls: type) -> dict[str, Any]:
    """The members of a class itself, without a gate that it has for a while."""
    with process_lock:
        members, gate = dict(vars(cls)), bound.get((id(cls), "__init__"))
        if gate is not None and members.get("__init__") is gate.after:
            del members["__init__"]
            if gate.before is not None:
                members["__init__"] = gate.before
    return members


def without_stand_ins(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a namespace as it is where no load is under way."""
    return {name: _unwrapped(value) for name, value in namespace.items()}


def _unwrapped(value: Any) -> Any:
    """What a name is bound to where nothing stands in for it."""
    if isinstance(value, type):
        return value.__dict__.get(STANDS_FOR, value)
    if type(value) is tuple and any(isinstance(each, type) and STANDS_FOR in vars(each) for each in value):
        return tuple(map(_unwrapped, value))
    return value


def _stand_in(name: str, original: Any) -> Any:
    """A class that passes for `original` and, called where it is replaced, builds the replacement.

    Args:
        name: the name to which the class is bound.
        original: or a tuple, of which classes of modules get stand-ins.
    """
    if isinstance(original, tuple):
        return tuple(_stand_in("", each) if _is_module_class(each) else each for each in original)
    meta: Any = type(original)

    class StandIn(meta):  # type: ignore[misc]
        def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any) -> Any:
            if STANDS_FOR in body:
                return super().__new__(mcs, name, bases, body)
            return meta(name, tuple(_unwrapped(base) for base in bases), body, **kwargs)  # somebody subclasses it

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            with construction_here() as construction:
                module = construction and construction.replaced(original, name, None, args, kwargs)
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


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


class Cover:
    """The gates and stand-ins that one set of class rules needs, and gates on all models where any may be built."""

    active: ClassVar[set[Cover]] = set()
    #: that of torch on the registration of parameters, while there are some
    hook: ClassVar[Any] = None

    def __init__(self, rules: ClassRules, *, models: bool) -> None:
        self.rules = rules
        self.models = models
        self.all_classes = False
        self._places: set[tuple[int, Any]] = set()
        #: the ids of modules that were looked into for stand-ins
        self._seen: set[int] = set()
        #: classes that are named and can't have a gate
        self._foreign: set[type[nn.Module]] = set()
        with process_lock:
            Cover.active.add(self)
            if len(Cover.active) == 1:
                _watcher.begin()
                Cover.hook = watch_parameters()

    def add_all(self) -> None:
        """Put gates on all classes of modeling code that are named, and on models, and stand-ins for the others."""
        named = subclasses(nn.Module) if self.all_classes else self.rules.classes()
        ours = of_modeling_code(named)
        for cls in (*ours, *(subclasses(PreTrainedModel) if self.models else ())):
            self._bind(cls, "__init__", functools.partial(_gate, cls))
        self._foreign = {cls for cls in named if cls not in ours and self.rules.concerns(cls)}
        for name, module in list(sys.modules.items()) if self._foreign or self.rules.has_registry else ():
            if is_modeling_module(name) and isinstance(module, ModuleType):
                self._add_names(module)

    def add_module(self, module: ModuleType) -> None:
        """The same for a modeling module that has just been imported."""
        classes = of_modeling_code(filter(_is_module_class, list(vars(module).values())))
        for cls in classes:
            is_model = self.models and issubclass(cls, PreTrainedModel)
            if is_model or self.all_classes or self.rules.concerns(cls):
                self._bind(cls, "__init__", functools.partial(_gate, cls))
        self._add_names(module)

    def _add_names(self, module: ModuleType) -> None:
        """Put stand-ins into the namespace of a modeling module, and into its tables."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        namespace = vars(module)
        for name, value in list(namespace.items()):
            # Where the class's own name is what matched, its gate does all that is needed.
            is_renamed = _is_module_class(value) and not self.rules.concerns(_unwrapped(value))
            if self._holds_foreign(value) or (is_renamed and self.rules.concerns(_unwrapped(value), name)):
                self._bind(namespace, name, functools.partial(_stand_in, name))
            elif self._foreign and (isinstance(value, dict) or type(value) is list):
                for key, item in list(dict.items(value) if isinstance(value, dict) else enumerate(value)):
                    if self._holds_foreign(item):
                        self._bind(value, key, functools.partial(_stand_in, ""))

    def _holds_foreign(self, item: Any) -> bool:
        """Whether an entry is a class of others, or a tuple with one in it, `(nn.ReLU, {"inplace": True})`."""
        listed = item if type(item) is tuple else (item,)
        return any(isinstance(each, type) and _unwrapped(each) in self._foreign for each in listed)

    def _bind(self, container: Any, key: Any, after: Callable[[Any], Any]) -> None:
        """Put into a place what is made of what is there."""
        place = id(container), key
        with process_lock:
            # Otherwise the block was left meanwhile, by another thread than the one that imports.
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
                found = bound.pop(place, None)  # none, if an interrupt came before it was there
                # Somebody who has put something else there keeps it; what they wrapped goes on passing through.
                if found is not None and _entry(found.container, found.key) is found.after:
                    _put(found.container, found.key, found.before)


@contextmanager
def in_force(block: Block, rules: ClassRules, *, models: bool = False) -> Iterator[None]:
    """Put a block in force, and gates on the classes that its rules name. On exit nothing of it is left anywhere.

    Args:
        rules: what is in force with it.
        models: any model may be built inside, by hand.
    """
    with entering(block):
        if not rules.entries:
            yield
            return
        cover = Cover(rules, models=models)
        try:
            cover.add_all()
            yield
        finally:
            cover.remove_all()


@contextmanager
def building(construction: Construction) -> Iterator[None]:
    """Let what is built inside the block be a part of a construction, with exactly its patchers in force."""
    rules = construction.rules
    with in_force(Block(rules.entries, only=True, construction=construction), rules):
        yield
        construction.end()


def cover_new_classes(rules: ClassRules | None = None) -> None:
    """Put gates on classes that came into being after a block began, other than by an import.

    Args:
        rules: those of a construction that wants constructor arguments: of all classes of modeling code, named or not.
    """
    for cover in list(Cover.active):
        cover.all_classes |= rules is not None and cover.rules.entries == rules.entries
        cover.add_all()


def _cover_module(module: ModuleType) -> None:
    """Put gates on the classes of a modeling module that is first imported while a mapping is in force."""
    with process_lock:
        for cover in Cover.active:
            cover.add_module(module)


_watcher = Watcher("modeling code", is_modeling_module, _cover_module)
