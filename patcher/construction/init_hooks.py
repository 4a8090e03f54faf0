"""The gates: how the classes of modeling code come to be built as others, and how that is undone exactly.

No name is rebound. While a class mapping is in force somewhere, the `__init__` of each class that it names is a gate:
when it is called for an object of exactly that class, in a context where the mapping is in force, the object becomes
one of the replacement and is initialised as such. So it doesn't matter where modeling code finds the class (a module
attribute, an alias, a table, a function that imports it late), and for every other thread the class is what it always
was: it can be pickled, subclassed and compared meanwhile.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.modeling_code import (
    custom_modeling_modules,
    is_modeling_module,
    model_classes,
    module_subclasses,
)
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import (
    Construction,
    build_replacement,
    construction_here,
)
from patcher.construction.in_force import Block, blocks, entering
from patcher.construction.lock import process_lock
from patcher.construction.meta_init import unwatch_parameters, watch_parameters
from patcher.construction.namespaces import Namespaces
from patcher.source.alike import IN_PLACE_OF
from patcher.source.importing import Watcher


class _Gate:
    """The `__init__` of one class, as long as something in force names it; whoever needs it shares it."""

    installed: dict[type[nn.Module], _Gate] = {}  # noqa: RUF012 - the registry of this class

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls = cls
        self.users = 0
        self.before = before = cls.__dict__.get("__init__")

        @functools.wraps(cls.__init__)
        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            with construction_here() if type(self) is cls else nullcontext() as construction:
                built = construction and build_replacement(construction, cls, cls.__name__, self, args, kwargs)
                if built is not None:
                    return
                if before is None:
                    super(cls, self).__init__(*args, **kwargs)
                else:
                    before(self, *args, **kwargs)

        setattr(__init__, IN_PLACE_OF, before)
        self.function = cls.__init__ = __init__  # type: ignore[method-assign]

    def remove(self) -> None:
        # Somebody who has replaced `__init__` meanwhile keeps theirs; what they wrapped goes on passing through.
        if self.cls.__dict__.get("__init__") is self.function:
            if self.before is None:
                del self.cls.__init__
            else:
                self.cls.__init__ = self.before  # type: ignore[method-assign]


def own_members(cls: type) -> dict[str, Any]:
    """The members of a class itself, without a gate that it has for a while."""
    with process_lock:
        members, gate = dict(vars(cls)), _Gate.installed.get(cls)
        if gate is not None and members.get("__init__") is gate.function:
            members["__init__"] = gate.before
            if gate.before is None:
                del members["__init__"]
    return members


class _Cover:
    """The gates and stand-ins that one set of class rules needs, and gates on all models where any may be built."""

    active: set[_Cover] = set()  # noqa: RUF012 - all that are in place in this process

    def __init__(self, rules: ClassRules, *, models: bool) -> None:
        self.rules = rules
        self.models = models
        self.gated: set[type[nn.Module]] = set()
        self.all_classes = False
        self.namespaces = Namespaces(rules)
        self._custom: set[str] = set()
        with process_lock:
            _Cover.active.add(self)
            if len(_Cover.active) == 1:
                _watcher.begin()
                watch_parameters()

    def add_all(self) -> list[type[nn.Module]]:
        """Put gates on all classes of modeling code that are named, and on models.

        Returns:
            The other classes that are named.
        """
        for model_class in model_classes() if self.models else ():
            self.add(model_class)
        known = module_subclasses() if self.all_classes else self.rules.classes()
        named = [cls for cls in dict.fromkeys(known) if cls not in self.gated]
        of_transformers = all(is_modeling_module(cls.__module__) for cls in named)
        self._custom = set() if of_transformers else custom_modeling_modules()
        for cls in named:
            self.add(cls)
        return [cls for cls in named if cls not in self.gated]

    def add(self, cls: type[nn.Module]) -> None:
        if cls in self.gated:
            return
        if not (self.models and issubclass(cls, PreTrainedModel)):
            if not (is_modeling_module(cls.__module__) or cls.__module__ in self._custom):
                return
            if not self.all_classes and not self.rules.may_concern(cls):
                return
        with process_lock:
            if self not in _Cover.active:
                return  # the block was left meanwhile, by another thread than the one that imports
            gate = _Gate.installed.get(cls)
            if gate is None:
                gate = _Gate.installed[cls] = _Gate(cls)
            gate.users += 1
            self.gated.add(cls)

    def remove_all(self) -> None:
        with process_lock:
            _Cover.active.discard(self)
            if not _Cover.active:
                _watcher.end()
                unwatch_parameters()
            self.namespaces.remove_all()
            while self.gated:
                gate = _Gate.installed[self.gated.pop()]
                gate.users -= 1
                if gate.users == 0:
                    del _Gate.installed[gate.cls]
                    gate.remove()


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
        block.cover = _Cover(rules, models=models)
        try:
            block.cover.namespaces.add_all(block.cover.add_all())
            yield
        finally:
            block.cover.remove_all()


@contextmanager
def building(construction: Construction) -> Iterator[None]:
    """Let what is built inside the block be a part of a construction, with exactly its patchers in force."""
    rules = construction.rules
    with in_force(Block(rules.entries, only=True, construction=construction), rules):
        yield
        construction.end()


def _covers() -> list[_Cover]:
    """Those of the blocks around this code, the innermost first."""
    return [block.cover for block in blocks() if block.cover is not None]


def cover_new_classes(*, all_classes: bool = False) -> None:
    """Put gates on classes that came into being after a block began, other than by an import.

    Args:
        all_classes: on all of modeling code, whether a mapping names them or not: constructor arguments are wanted.
    """
    for number, cover in enumerate(_covers()):
        cover.all_classes |= all_classes and number == 0
        cover.add_all()


def cover_new_model(cls: type[PreTrainedModel]) -> None:
    """Put gates on a class of models that has just been defined, while blocks last that any model may be built in."""
    with process_lock:
        for cover in _Cover.active:
            if cover.models:
                cover.add(cls)


def _after_fork_in_child() -> None:
    # The child has one thread: what the others had put in place has no owner.
    for cover in _Cover.active - set(_covers()):
        cover.remove_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _cover_module(module: ModuleType) -> None:
    """Put gates on the classes of a modeling module that is first imported while a mapping is in force."""
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, nn.Module)]
    with process_lock:
        for cover in _Cover.active:
            for cls in classes:
                cover.add(cls)
            cover.namespaces.add(module)


_watcher = Watcher("modeling code", is_modeling_module, _cover_module)
