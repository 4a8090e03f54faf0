"""Gates: how what constructs a class gets its replacement, while a mapping is in force.

A gate is the `__init__` of a class: called for an object of exactly that class, in a context where a mapping names it,
it makes the object one of the replacement. So it doesn't matter where modeling code finds the class (a module
attribute, an alias, a table, `torch.nn`, a function that imports it late), and for every other thread the class is
what it always was: it can be constructed, pickled, subclassed and compared meanwhile.

Of a class that isn't of modeling code, `torch.nn.LayerNorm`, only what modeling code constructs itself is replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.modeling_code import is_modeling_module, model_classes, module_subclasses, of_modeling_code
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction, construction_here
from patcher.construction.in_force import Block, entering
from patcher.construction.lock import process_lock
from patcher.construction.meta_init import watch_parameters
from patcher.source.alike import IN_PLACE_OF
from patcher.source.importing import Watcher


class Gate(NamedTuple):
    """What a class has as its own `__init__` for a while, and what it had before, None for nothing."""

    before: Any
    after: Any


#: class -> its gate; covers share them
gates: dict[type, Gate] = {}


def _gate(cls: type[nn.Module], *, is_foreign: bool) -> Gate:
    before = vars(cls).get("__init__")

    @functools.wraps(cls.__init__)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        with construction_here() if type(self) is cls else nullcontext() as construction:
            if construction is not None and construction.replaced(self, args, kwargs, is_foreign=is_foreign):
                return
            if before is None:
                super(cls, self).__init__(*args, **kwargs)
            else:
                before(self, *args, **kwargs)

    setattr(__init__, IN_PLACE_OF, before)
    return Gate(before, __init__)


def own_members(cls: type) -> dict[str, Any]:
    """The members of a class itself, without a gate that it has for a while."""
    with process_lock:
        members, gate = dict(vars(cls)), gates.get(cls)
        if gate is not None and members.get("__init__") is gate.after:
            del members["__init__"]
            if gate.before is not None:
                members["__init__"] = gate.before
    return members


class Cover:
    """The gates that one set of class rules needs: on the classes that it names, and on models where any may be built.

    Args:
        models: whether any model may be built, by hand.
    """

    active: ClassVar[set[Cover]] = set()
    #: that of torch on the registration of parameters, while there are some
    hook: ClassVar[Any] = None

    def __init__(self, rules: ClassRules, *, models: bool) -> None:
        self.rules = rules
        self.models = models
        self.all_classes = False
        self._classes: set[type] = set()
        with process_lock:
            Cover.active.add(self)
            if len(Cover.active) == 1:
                _watcher.begin()
                Cover.hook = watch_parameters()

    def add_all(self) -> None:
        """Put gates on all classes that are concerned."""
        self._add(filter(self.rules.concerns, self.rules.classes()))
        self._add(of_modeling_code(module_subclasses()) if self.all_classes else ())
        self._add(model_classes() if self.models else ())
        for name, module in list(sys.modules.items()) if self.rules.has_registry else ():
            if is_modeling_module(name) and isinstance(module, ModuleType):
                self.add_module(module)

    def add_module(self, module: ModuleType) -> None:
        """The same for what a modeling module has, which may just have been imported."""
        named = [(name, each) for name, each in list(vars(module).items()) if _is_module_class(each)]
        self._add(of_modeling_code(each for _, each in named) if self.all_classes else ())
        self._add(each for _, each in named if self.models and issubclass(each, PreTrainedModel))
        self._add(each for name, each in named if self.rules.concerns(each, (name,)))

    def _add(self, classes: Iterable[type[nn.Module]]) -> None:
        new = [cls for cls in classes if cls not in self._classes]
        ours = of_modeling_code(new)
        with process_lock:
            # Otherwise the block was left meanwhile, by another thread than the one that imports.
            for cls in new if self in Cover.active else ():
                self._classes.add(cls)
                if cls not in gates:
                    gates[cls] = _gate(cls, is_foreign=cls not in ours)
                    cls.__init__ = gates[cls].after  # type: ignore[method-assign]

    def remove_all(self) -> None:
        with process_lock:
            Cover.active.discard(self)
            if not Cover.active:
                _watcher.end()
                Cover.hook.remove()
            for cls in self._classes.difference(*(other._classes for other in Cover.active)):
                gate = gates.pop(cls, None)  # none, if an interrupt came before it was there
                # Somebody who has put something else there keeps it; what they wrapped goes on passing through.
                if gate is not None and vars(cls).get("__init__") is gate.after:
                    if gate.before is None:
                        del cls.__init__  # type: ignore[misc]
                    else:
                        cls.__init__ = gate.before  # type: ignore[misc]


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


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
