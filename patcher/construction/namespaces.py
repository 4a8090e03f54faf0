"""Stand-ins for names of modeling code that are bound to classes of others: what gates can't do.

A gate sits on a class, so it can't tell `LayerNorm` in one modeling file from `torch.nn.LayerNorm`, which is not ours
to touch, and it can't know under which other name a file has bound the class. For those a stand-in takes the place of
the class in the namespace or table: called in a context where a mapping is in force it builds the replacement, and
anywhere else the class. Whoever reads such a name meanwhile has what passes for the class, and may subclass it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, ClassVar

from torch import nn

from patcher.compat.modeling_code import is_modeling_module
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import build_replacement, construction_here
from patcher.construction.in_force import entered
from patcher.construction.lock import process_lock


class Namespaces:
    """The stand-ins that class rules need. Rules that overlap share them; the last to leave puts everything back."""

    def __init__(self, rules: ClassRules) -> None:
        self.rules = rules
        self.mine: list[_Binding] = []
        self._seen: set[int] = set()
        self._foreign: set[type] = set()

    def add_all(self, others: Iterable[type[nn.Module]]) -> None:
        """Bind stand-ins in all modeling modules, for `others`: classes that are named and can't have a gate."""
        self._foreign = {cls for cls in others if self.rules.concerns(cls)}
        if not self._foreign and not any(entry.is_registry for entry in self.rules.entries):
            return
        for name, module in list(sys.modules.items()):
            if is_modeling_module(name) and isinstance(module, ModuleType):
                self.add(module)

    def add(self, module: ModuleType) -> None:
        """Bind stand-ins in the namespace of a modeling module, and in its tables."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        namespace = vars(module)
        for name, value in list(namespace.items()):
            if isinstance(value, type):
                if not _is_module_class(value) or not self.rules.concerns(_unwrapped(value), name):
                    continue
                # Where the class's own name is what matched, its gate does all that is needed.
                if _unwrapped(value) in self._foreign or not self.rules.concerns(_unwrapped(value)):
                    self._bind(namespace, name, value)
            elif not self._foreign:
                continue
            elif isinstance(value, dict) or type(value) is list:
                for key, item in list(dict.items(value) if isinstance(value, dict) else enumerate(value)):
                    if self._holds_foreign(item):
                        self._bind(value, key, item)
            elif type(value) is tuple and self._holds_foreign(value):
                self._bind(namespace, name, value)

    def _holds_foreign(self, item: Any) -> bool:
        """Whether an entry is a class of others, or a tuple with one in it, `(nn.ReLU, {"inplace": True})`."""
        listed = item if type(item) is tuple else (item,)
        return any(isinstance(each, type) and _unwrapped(each) in self._foreign for each in listed)

    def _bind(self, container: Any, key: Any, value: Any) -> None:
        with process_lock:
            self.mine.append(_Binding.of(container, key, value))

    def remove_all(self) -> None:
        with process_lock:
            while self.mine:
                self.mine.pop().release()


class _Binding:
    """A namespace or a table that holds a stand-in under one key, as long as it is needed."""

    made: ClassVar[dict[tuple[int, Any], _Binding]] = {}

    def __init__(self, container: Any, key: Any, value: Any) -> None:
        self.container, self.key, self.before = container, key, value
        self.users = 0
        if isinstance(value, tuple):
            self.after: Any = tuple(_stand_in(item, "") if _is_module_class(item) else item for item in value)
        else:
            self.after = _stand_in(value, key if isinstance(key, str) else "")
        _put(container, key, self.after)

    @classmethod
    def of(cls, container: Any, key: Any, value: Any) -> _Binding:
        """The binding of a key: the one that is there, or a new one."""
        place = id(container), key
        if place not in cls.made:
            cls.made[place] = cls(container, key, value)
        cls.made[place].users += 1
        return cls.made[place]

    def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            del self.made[id(self.container), self.key]
            if _entry(self.container, self.key) is self.after:  # otherwise somebody else has put something there
                _put(self.container, self.key, self.before)


# A table may be a dict of a kind of its own: one builds an object for each entry that is looked at (`ACT2FN`), others
# import a modeling file for it. How such a class reads and writes doesn't matter.


def _entry(table: Any, key: Any) -> Any:
    return dict.get(table, key) if isinstance(table, dict) else dict(enumerate(table)).get(key)


def _put(table: Any, key: Any, value: Any) -> None:
    if isinstance(table, dict):
        dict.__setitem__(table, key, value)
    else:
        table[key] = value


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _unwrapped(cls: type) -> Any:
    return cls.__dict__.get("_patcher_stands_for", cls)


def _stand_in(original: type[nn.Module], name: str) -> type[nn.Module]:
    """A class that passes for `original` and, called where it is replaced, builds the replacement."""
    meta: Any = type(original)

    class StandIn(meta):  # type: ignore[misc]
        def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any) -> Any:
            if "_patcher_stands_for" in body:
                return super().__new__(mcs, name, bases, body)
            return meta(name, tuple(_unwrapped(base) for base in bases), body, **kwargs)  # somebody subclasses it

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            with construction_here() as construction:
                module = None
                if construction is not None:
                    module = build_replacement(construction, original, name, None, args, kwargs)
                return original(*args, **kwargs) if module is None else module

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(_unwrapped(subclass), original)

        def __eq__(cls, other: object) -> bool:
            if other is cls or other is original:
                return True
            match = ClassRules(entered()).match_bound(original, name)
            return match is not None and match.replacement is other  # what it constructs here

        def __hash__(cls) -> int:
            return hash(original)

    body = {"_patcher_stands_for": original, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return StandIn(original.__name__, (original,), body)  # type: ignore[no-any-return]
