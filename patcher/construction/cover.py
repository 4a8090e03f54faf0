"""A patcher in force: gates and stand-ins for all that it names, of which nothing is left afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.modeling_code import (
    custom_modeling_modules,
    is_modeling_module,
    model_classes,
    module_subclasses,
)
from patcher.construction.bindings import Binding, gate, is_module_class, stand_in, unwrapped
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction
from patcher.construction.in_force import Block, blocks, entering
from patcher.construction.lock import process_lock
from patcher.construction.meta_init import unwatch_parameters, watch_parameters
from patcher.source.importing import Watcher


class Cover:
    """The gates and stand-ins that one set of class rules needs, and gates on all models where any may be built."""

    active: ClassVar[set[Cover]] = set()

    def __init__(self, rules: ClassRules, *, models: bool) -> None:
        self.rules = rules
        self.models = models
        self.all_classes = False
        #: classes with a gate, and the ids of modules that were looked into for stand-ins
        self._done: dict[Any, None] = {}
        self._bindings: list[Binding] = []
        self._custom: set[str] = set()
        #: classes that are named and can't have a gate
        self._foreign: set[type[nn.Module]] = set()
        with process_lock:
            Cover.active.add(self)
            if len(Cover.active) == 1:
                _watcher.begin()
                watch_parameters()

    def add_all(self) -> None:
        """Put gates on all classes of modeling code that are named, and on models, and stand-ins for the others."""
        for model_class in model_classes() if self.models else ():
            self.add(model_class)
        named = module_subclasses() if self.all_classes else self.rules.classes()
        if not all(is_modeling_module(cls.__module__) for cls in named):
            self._custom = custom_modeling_modules()
        for cls in named:
            self.add(cls)
        self._foreign = {cls for cls in named if cls not in self._done and self.rules.concerns(cls)}
        if self._foreign or any(entry.is_registry for entry in self.rules.entries):
            for name, module in list(sys.modules.items()):
                if is_modeling_module(name) and isinstance(module, ModuleType):
                    self.add_names(module)

    def add(self, cls: type[nn.Module]) -> None:
        """Put a gate on a class, if it is one of modeling code that is named."""
        if cls in self._done:
            return
        if not (self.models and issubclass(cls, PreTrainedModel)):
            if not (is_modeling_module(cls.__module__) or cls.__module__ in self._custom):
                return
            if not self.all_classes and not self.rules.may_concern(cls):
                return
        with process_lock:
            if self in Cover.active:  # or the block was left meanwhile, by another thread than the one that imports
                self._done[cls] = None
                self._bindings.append(gate(cls))

    def add_names(self, module: ModuleType) -> None:
        """Put stand-ins into the namespace of a modeling module, and into its tables."""
        if id(module) in self._done:
            return
        self._done[id(module)] = None
        namespace = vars(module)
        for name, value in list(namespace.items()):
            if isinstance(value, type):
                if not is_module_class(value) or not self.rules.concerns(unwrapped(value), name):
                    continue
                # Where the class's own name is what matched, its gate does all that is needed.
                if unwrapped(value) in self._foreign or not self.rules.concerns(unwrapped(value)):
                    self._stand_in(namespace, name)
            elif self._foreign and (isinstance(value, dict) or type(value) is list):
                for key, item in list(dict.items(value) if isinstance(value, dict) else enumerate(value)):
                    if self._holds_foreign(item):
                        self._stand_in(value, key)
            elif self._foreign and type(value) is tuple and self._holds_foreign(value):
                self._stand_in(namespace, name)

    def _holds_foreign(self, item: Any) -> bool:
        """Whether an entry is a class of others, or a tuple with one in it, `(nn.ReLU, {"inplace": True})`."""
        listed = item if type(item) is tuple else (item,)
        return any(isinstance(each, type) and unwrapped(each) in self._foreign for each in listed)

    def _stand_in(self, container: Any, key: Any) -> None:
        with process_lock:
            self._bindings.append(stand_in(container, key))

    def remove_all(self) -> None:
        with process_lock:
            Cover.active.discard(self)
            if not Cover.active:
                _watcher.end()
                unwatch_parameters()
            while self._bindings:
                self._bindings.pop().release()


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
        block.cover = Cover(rules, models=models)
        try:
            block.cover.add_all()
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


def cover_new_classes(*, all_classes: bool = False) -> None:
    """Put gates on classes that came into being after a block began, other than by an import.

    Args:
        all_classes: on all of modeling code, whether a mapping names them or not: constructor arguments are wanted.
    """
    for number, cover in enumerate(_covers()):
        cover.all_classes |= all_classes and number == 0
        cover.add_all()


def _covers() -> list[Cover]:
    """Those of the blocks around this code, the innermost first."""
    return [block.cover for block in blocks() if block.cover is not None]


def cover_new_model(cls: type[PreTrainedModel]) -> None:
    """Put gates on a class of models that has just been defined, while blocks last that any model may be built in."""
    with process_lock:
        for cover in Cover.active:
            if cover.models:
                cover.add(cls)


def _cover_module(module: ModuleType) -> None:
    """Put gates on the classes of a modeling module that is first imported while a mapping is in force."""
    with process_lock:
        for cover in Cover.active:
            for cls in filter(is_module_class, list(vars(module).values())):
                cover.add(cls)
            cover.add_names(module)


_watcher = Watcher("modeling code", is_modeling_module, _cover_module)


def _after_fork_in_child() -> None:
    # The child has one thread: what the others had put in place has no owner.
    for cover in Cover.active - set(_covers()):
        cover.remove_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
