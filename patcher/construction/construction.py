"""One construction: what is built, from the outermost model down, and what it was built in place of.

The only mutable object of a load, made where the outermost model begins and private to the thread that builds it. It
ends with what made it: a load, `from_config`, a skeleton, or in an `applied()` block the gate that the `__init__` of a
model passes through.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.modeling_code import is_modeling_module
from patcher.compat.models import mark_original_class, renamed_parameters
from patcher.construction.class_rules import ClassRules, Match
from patcher.construction.in_force import (
    Block,
    InForce,
    Outcome,
    construction_around,
    entered,
    entering,
    tell_blocks,
)
from patcher.construction.meta_init import MetaInit, check_values
from patcher.errors import PatchConstructionError


@dataclass(frozen=True, eq=False)
class Built:
    """One replacement that was built, and how: enough to build it again."""

    module: nn.Module
    original: type[nn.Module]
    replacement: type[nn.Module]
    entry: InForce
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: not a part of another replacement
    outermost: bool
    #: the names of its parameters, and the how-manieth each was that it registered
    numbers: Mapping[str, int]


#: replacements, each with the path at which the model has it
Placed = tuple[tuple[str, Built], ...]


@dataclass(eq=False, repr=False)
class Construction:
    """What happens while one model is built.

    Args:
        rules: what is in force.
        by_hand: no checkpoint is read: the model is finished when its modules are constructed.
        is_skeleton: built for its names and shapes only: no fusions, nothing is judged.
    """

    rules: ClassRules
    _: KW_ONLY
    by_hand: bool = False
    is_skeleton: bool = False
    built: list[Built] = field(init=False, default_factory=list)
    #: the rules by which they were built, `class_mapping[key]`, each with the names of the classes that it matched
    rules_matched: dict[str, dict[str, None]] = field(init=False, default_factory=dict)
    outcome: Outcome = field(init=False, default_factory=Outcome)
    #: whether the model has called `post_init`
    is_constructed: bool = field(init=False, default=False)
    #: what the patchers in force do to the model once its modules are constructed
    resolution: Any = field(init=False, default=None)
    #: whether constructed modules may be built again: then the constructor arguments of all of them are kept
    keeps_arguments: bool = field(init=False, default=False)
    arguments: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(init=False, default_factory=dict)
    #: the functions that are replaced in the model
    functions: Any = field(init=False, default=None)
    #: what is left to do when the model, whose `__init__` may go on after `post_init`, is built by hand
    at_end: Callable[[], None] | None = field(init=False, default=None)
    #: where the parameters of the replacement go that is built now
    meta_init: MetaInit | None = field(init=False, default=None)
    _root: weakref.ref[PreTrainedModel] | None = field(init=False, default=None)
    _building: list[nn.Module] = field(init=False, default_factory=list)
    _noted: dict[type[nn.Module], Match] = field(init=False, default_factory=dict)
    _checked: set[tuple[type[nn.Module], type[nn.Module]]] = field(init=False, default_factory=set)

    @property
    def root(self) -> PreTrainedModel | None:
        """The outermost model, as soon as its `__init__` has begun."""
        return None if self._root is None else self._root()

    @root.setter
    def root(self, model: PreTrainedModel) -> None:
        self._root = weakref.ref(model)

    @property
    def outermost_built(self) -> list[Built]:
        """The replacements that aren't part of another one."""
        return [built for built in self.built if built.outermost]

    def note(self, cls: type[nn.Module], match: Match) -> None:
        """Remember which keys have had an effect."""
        if self._noted.get(cls) is not match:
            self._noted[cls] = match
            self.outcome |= Outcome(frozenset(self.rules.matched(cls, match)))

    def decides(self, module: nn.Module | None, depth: int) -> bool:
        """Whether what is about to be built may be replaced.

        Inside of a replacement's own code a class is what its name says: only what modeling code builds there is
        replaced. Otherwise a replacement could not wrap an object of the class that it replaces.
        """
        if any(module is each for each in self._building):
            return False
        return not self._building or is_modeling_module(calling_module(depth + 1))

    def build(
        self, module: nn.Module, original: type[nn.Module], match: Match, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Make an object of `original` one of its replacement.

        Raises:
            PatchConstructionError: it can't be built, or what is to be the model itself would be none.
        """
        is_model = issubclass(original, PreTrainedModel) and not issubclass(match.replacement, PreTrainedModel)
        if is_model and not self._building and self.root is None:
            raise PatchConstructionError(
                f"{match.replacement.__qualname__} is to be the model itself in place of {original.__qualname__}, and "
                "isn't a PreTrainedModel, so it could neither be loaded nor saved: derive it from "
                f"{original.__qualname__} or from PreTrainedModel, and call super().__init__(config)."
            )
        if (original, match.replacement) not in self._checked:
            self._checked.add((original, match.replacement))
            check_parameters(original, match.replacement)
        mark_original_class(module, original)
        is_outermost = not self._building
        numbers = self._construct(module, original, match.replacement, args, kwargs)
        mark_original_class(module, original)  # again: `__init__` may have started from an empty `__dict__`
        if match.field != "module_mapping":  # which says itself what it has matched
            self.note(original, match)
        built = Built(module, original, match.replacement, match.entry, args, kwargs, is_outermost, numbers)
        self.built.append(built)
        self.rules_matched.setdefault(f"{match.field}[{match.key!r}]", {})[original.__name__] = None

    def build_in_place_of(
        self, module: nn.Module, original: type[nn.Module], match: Match, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> nn.Module:
        """What takes the place of a constructed module of `original`, built with the arguments that made that one.

        Raises:
            PatchConstructionError: it can't be built.
        """
        new = original.__new__(original)
        self.build(new, original, match, args, kwargs)
        new.train(module.training)
        return new

    def build_again(self, built: Built, meta_init: MetaInit) -> nn.Module:
        """Build a replacement once more, for the values that its `__init__` gives to new weights."""
        module = built.original.__new__(built.original)
        self._building.append(module)
        try:
            self._initialise(meta_init, module, built.original, built.replacement, built.args, built.kwargs)
        finally:
            self._building.pop()
        return module

    def _construct(
        self, module: nn.Module, original: type[nn.Module], replacement: type[nn.Module], args: Any, kwargs: Any
    ) -> Mapping[str, int]:
        """Initialise a replacement.

        Returns:
            The numbers of its parameters: now, for a quantizer may put others in their places.
        """
        self._building.append(module)
        try:
            if self.meta_init is not None:
                self.meta_init.construct(module, original, replacement, args, kwargs)
                return {}
            meta_init = MetaInit()
            self._initialise(meta_init, module, original, replacement, args, kwargs)
            if meta_init.to_meta and not self.is_skeleton:
                check_values(module, meta_init)
            return meta_init.numbers(module)
        finally:
            self._building.pop()

    def _initialise(self, meta_init: MetaInit, *what: Any) -> None:
        self.meta_init = meta_init
        try:
            with meta_init.in_force():
                meta_init.construct(*what)
        finally:
            self.meta_init = None

    def end(self) -> None:
        """Do what is left to do."""
        if self.at_end is not None:
            self.at_end()


def check_parameters(original: type[nn.Module], replacement: type[nn.Module]) -> None:
    """Raise where a replacement has a parameter under the name that it had in older releases of transformers.

    What is given under the new name would be lost in its `**kwargs`, a cache for one.

    Raises:
        PatchConstructionError: with both names.
    """
    if not (renamed := renamed_parameters(original.forward)):
        return
    known = inspect.signature(replacement.forward).parameters
    for old, new in renamed.items():
        if old in known and new not in known:
            raise PatchConstructionError(
                f"{replacement.__qualname__}.forward has a parameter {old!r}, which is called {new!r} in "
                f"{original.__qualname__}.forward of transformers {transformers.__version__}, so what is given would "
                f"be ignored. Call it {new!r}; for older releases too, take kwargs.get({new!r}, kwargs.get({old!r}))."
            )


def calling_module(depth: int) -> str:
    """The name of the module whose code calls: 1 is the caller of the function that asks, 2 is who called that."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


@contextmanager
def construction_here() -> Iterator[Construction | None]:
    """The construction that this code is a part of; in a block, one for what is built here, with its parts."""
    construction = construction_around()
    if construction is None and (entries := entered()):
        construction = Construction(ClassRules(entries), by_hand=True)
        with entering(Block(construction=construction)):
            yield construction
            construction.end()
        tell_blocks(construction.outcome)
    else:
        yield construction


def build_replacement(
    construction: Construction,
    cls: type[nn.Module],
    name: str,
    module: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> nn.Module | None:
    """Build what is in force in place of `cls`, where modeling code has bound it to `name`; None if stock is to be.

    To be called by what replaces the constructor: its caller constructs the object.

    Args:
        module: the bare object of `cls`, if there is one yet.
    """
    if module is not None and construction.keeps_arguments:
        construction.arguments[id(module)] = (module, args, kwargs)
    if not construction.decides(module, 2):
        return None
    rules = construction.rules
    match = rules.match(cls) if name == cls.__name__ else rules.match_bound(cls, name)
    if match is not None and match.replacement is not cls:
        module = cls.__new__(cls) if module is None else module
        construction.build(module, cls, match, args, kwargs)
        return module
    if match is not None:  # the class itself, whatever the outer patchers say
        construction.note(cls, match)
    return None
