"""What takes the place of something in this process for a while: gates of classes, and stand-ins for names of theirs.

A gate is the `__init__` of a class of modeling code: called for an object of exactly that class, in a context where a
mapping names it, it makes the object one of the replacement. So it doesn't matter where modeling code finds the class
(a module attribute, an alias, a table, a function that imports it late), and for every other thread the class is what
it always was: it can be pickled, subclassed and compared meanwhile.

A gate can't tell `LayerNorm` in one modeling file from `torch.nn.LayerNorm`, which is not ours to touch, nor know
under which other name a file has bound a class. For those a stand-in takes the place of the class in the namespace or
table: called in such a context it builds the replacement, and anywhere else the class. Whoever reads the name
meanwhile has what passes for the class, and may subclass it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from torch import nn

from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import construction_here
from patcher.construction.in_force import entered
from patcher.construction.lock import process_lock
from patcher.source.alike import IN_PLACE_OF

_STANDS_FOR = "_patcher_stands_for"


class Binding:
    """A place that holds something else as long as it is needed there: whoever needs it shares it.

    Args:
        container: a class, a namespace, or a table.
        after: makes of what is there what is to be there.
    """

    made: ClassVar[dict[tuple[int, Any], Binding]] = {}

    def __init__(self, container: Any, key: Any, after: Callable[[Any], Any]) -> None:
        self.container, self.key = container, key
        self.users = 0
        self.before = _entry(container, key)
        self.after = after(self.before)
        _put(container, key, self.after)

    @classmethod
    def of(cls, container: Any, key: Any, after: Callable[[Any], Any]) -> Binding:
        """The binding of a key, with one user more: the one that is there, or a new one."""
        place = id(container), key
        if place not in cls.made:
            cls.made[place] = cls(container, key, after)
        cls.made[place].users += 1
        return cls.made[place]

    def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            del self.made[id(self.container), self.key]
            # Somebody who has put something else there meanwhile keeps it; what they wrapped goes on passing through.
            if _entry(self.container, self.key) is self.after:
                _put(self.container, self.key, self.before)


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


def gate(cls: type[nn.Module]) -> Binding:
    """Put a gate on a class."""

    def make(before: Any) -> Any:
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

    return Binding.of(cls, "__init__", make)


def own_members(cls: type) -> dict[str, Any]:
    """The members of a class itself, without a gate that it has for a while."""
    with process_lock:
        members, binding = dict(vars(cls)), Binding.made.get((id(cls), "__init__"))
        if binding is not None and members.get("__init__") is binding.after:
            members["__init__"] = binding.before
            if binding.before is None:
                del members["__init__"]
    return members


def stand_in(container: Any, key: Any) -> Binding:
    """Put stand-ins for the classes of modules where a namespace or a table has one, or a tuple with some."""
    name = key if isinstance(key, str) else ""

    def make(before: Any) -> Any:
        if isinstance(before, tuple):
            return tuple(_stand_in(each, "") if is_module_class(each) else each for each in before)
        return _stand_in(before, name)

    return Binding.of(container, key, make)


def is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def unwrapped(value: Any) -> Any:
    """What a name is bound to where nothing stands in for it."""
    if isinstance(value, type):
        return value.__dict__.get(_STANDS_FOR, value)
    if type(value) is tuple and any(isinstance(each, type) and _STANDS_FOR in vars(each) for each in value):
        return tuple(map(unwrapped, value))
    return value


def without_stand_ins(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a namespace as it is where no load is under way."""
    return {name: unwrapped(value) for name, value in namespace.items()}


def _stand_in(original: type[nn.Module], name: str) -> type[nn.Module]:
    """A class that passes for `original` and, called where it is replaced, builds the replacement."""
    meta: Any = type(original)

    class StandIn(meta):  # type: ignore[misc]
        def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any) -> Any:
            if _STANDS_FOR in body:
                return super().__new__(mcs, name, bases, body)
            return meta(name, tuple(unwrapped(base) for base in bases), body, **kwargs)  # somebody subclasses it

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            with construction_here() as construction:
                module = construction and construction.replaced(original, name, None, args, kwargs)
                return original(*args, **kwargs) if module is None else module

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(unwrapped(subclass), original)

        def __eq__(cls, other: object) -> bool:
            if other is cls or other is original:
                return True
            match = ClassRules(entered()).match(original, name)
            return match is not None and match.replacement is other  # what it constructs here

        def __hash__(cls) -> int:
            return hash(original)

    body = {_STANDS_FOR: original, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return StandIn(original.__name__, (original,), body)  # type: ignore[no-any-return]
