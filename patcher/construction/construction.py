"""The construction of one outermost model: the replacements that are built, and what they replace.

It is the only mutable object of a load, and private to its thread. It belongs to a load, to `from_config`, to a
skeleton, or in an `applied()` block to the `__init__` of a model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.attributes import left_behind
from patcher.compat.modeling_code import is_modeling_module
from patcher.compat.models import (
    inherit_loading_attributes,
    mark_original_class,
    named_modules,
    renamed_parameters,
    stock_class,
)
from patcher.construction.class_rules import ClassRules, Match
from patcher.construction.in_force import Block, InForce, Outcome, construction_around, entered, entering, tell_blocks
from patcher.construction.meta_init import MetaInit, without_value
from patcher.errors import PatchConstructionError, PatcherError, calling_frame
from patcher.expressions import cut
from patcher.patterns import inside
from patcher.source.reading import signature_of


@dataclass(frozen=True, eq=False)
class Built:
    """A replacement that was built, with what it takes to build it again."""

    module: nn.Module
    match: Match
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: whether no other replacement has built it
    outermost: bool
    #: name of a parameter -> its index in the order of registration
    numbers: Mapping[str, int]

    @property
    def replacement(self) -> type[nn.Module]:
        return self.match.replacement


#: (path in the model, replacement)
Placed = tuple[tuple[str, Built], ...]


@dataclass(eq=False, repr=False)
class Construction:
    """The state of a construction.

    Args:
        rules: the mappings in force.
        by_hand: whether no checkpoint is read: the model is finished when its modules are constructed.
        is_skeleton: whether the model is built for names and shapes only, without fusions and checks.
    """

    rules: ClassRules
    _: KW_ONLY
    by_hand: bool = False
    is_skeleton: bool = False
    #: the model whose gate was entered first, if any: not a part that it constructs before it calls super().__init__
    outermost: PreTrainedModel | None = field(init=False, default=None)
    #: the outermost model, once `PreTrainedModel.__init__` has begun, and whether it has called `post_init`
    root: PreTrainedModel | None = field(init=False, default=None)
    is_constructed: bool = field(init=False, default=False)
    built: list[Built] = field(init=False, default_factory=list)
    outcome: Outcome = field(init=False, default_factory=Outcome)
    #: its modules when mappings were applied
    modules: dict[str, nn.Module] = field(init=False, default_factory=dict)
    #: the `Resolution` of the model
    resolution: Any = field(init=False, default=None)
    #: the functions that are replaced in it
    functions: Any = field(init=False, default=None)
    #: id -> module and constructor arguments, if modules may be built again
    arguments: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] | None = field(init=False, default=None)
    #: callbacks at the end of the model's `__init__`, which may go on after `post_init`
    at_end: list[Callable[[], None]] = field(init=False, default_factory=list)
    #: of the replacement that is being built
    meta_init: MetaInit | None = field(init=False, default=None)
    _building: list[nn.Module] = field(init=False, default_factory=list)
    _recorded: dict[type[nn.Module], Match] = field(init=False, default_factory=dict)

    def build_replacement(
        self, cls: type[nn.Module], name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> nn.Module | None:
        """Build the replacement of `cls`, for a gate or stand-in; None if the class itself is to be built.

        Args:
            name: the name to which modeling code has bound the class, "" for its own.
            module: the uninitialized object of `cls`, if there is one yet.
        """
        if module is not None and self.arguments is not None:
            self.arguments[id(module)] = (module, args, kwargs)
        # A replacement may wrap an object of the class that it replaces: inside of it, only modules that modeling code
        # builds are replaced.
        is_inside = bool(self._building) and not is_modeling_module(calling_module(2))
        if is_inside or any(module is outer for outer in self._building):
            return None
        match = self.rules.match(cls, name)
        if match is None:
            return None
        if match.replacement is cls:  # an inner patcher restores the class
            self._record(match)
            return None
        module = cls.__new__(cls) if module is None else module
        self.build(module, match, args, kwargs)
        return module

    def end(self) -> None:
        """Run the callbacks, once."""
        while self.at_end:
            self.at_end.pop(0)()

    def _record(self, match: Match) -> None:
        """Add the keys of a match to the outcome."""
        if self._recorded.get(match.original) is not match:
            self._recorded[match.original] = match
            self.outcome |= Outcome(frozenset(self.rules.matched(match)))

    def build(self, module: nn.Module, match: Match, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Initialize an object of the original class as one of the replacement.

        Raises:
            PatchConstructionError: if it can't be built, or would be the model without being a `PreTrainedModel`.
        """
        original, replacement = match.original, match.replacement
        is_model = issubclass(original, PreTrainedModel) and not issubclass(replacement, PreTrainedModel)
        if is_model and not self._building and self.root is None:
            raise PatchConstructionError(
                f"{replacement.__qualname__} is to be the model itself in place of {original.__qualname__}, and "
                "isn't a PreTrainedModel, so it could neither be loaded nor saved: derive it from "
                f"{original.__qualname__} or from PreTrainedModel, and call super().__init__(config)."
            )
        if self._recorded.get(original) is not match:
            _check_parameters(original, replacement)
        mark_original_class(module, original)
        is_outermost, meta_init = not self._building, MetaInit()
        numbers: Mapping[str, int] = {}
        if self._construct(meta_init, module, match, args, kwargs):
            if meta_init.to_meta and not self.is_skeleton:
                meta_init.check_values(module)
            numbers = meta_init.numbers(module)  # before a quantizer replaces parameters
        mark_original_class(module, original)  # again: `__init__` may have cleared `__dict__`
        if match.field == "class_mapping":  # other fields have been recorded already
            self._record(match)
        self.built.append(Built(module, match, args, kwargs, is_outermost, numbers))

    def build_again(self, built: Built, meta_init: MetaInit) -> nn.Module:
        """Build a replacement once more, for the initial values of its new weights."""
        module = built.match.original.__new__(built.match.original)
        self._construct(meta_init, module, built.match, built.args, built.kwargs)
        return module

    def _construct(self, meta_init: MetaInit, module: nn.Module, match: Match, args: Any, kwargs: Any) -> bool:
        """Initialize an object as one of the replacement; return whether `meta_init` was used and not an outer one.

        Raises:
            PatchConstructionError: if the replacement raises, or its objects have another layout in memory.
        """
        original, replacement, outer = match.original, match.replacement, self.meta_init
        inner = self.meta_init = outer or meta_init
        self._building.append(module)
        try:
            with nullcontext() if outer is not None else inner.in_force():
                _initialize(module, original, replacement, args, kwargs)
        except PatcherError:
            raise
        except Exception as error:
            if any(error is wanting for wanting in inner.wanting):
                raise without_value(replacement, f"something ({type(error).__name__}: {error})") from error
            advice = ": take them all, or accept **kwargs" if isinstance(error, TypeError) else ""
            arguments = [*map(_short_repr, args), *(f"{key}={_short_repr(value)}" for key, value in kwargs.items())]
            raise PatchConstructionError(
                f"{replacement.__qualname__} could not be built in place of {original.__qualname__}"
                f"{_where()}: {type(error).__name__}: {error}\n"
                f"It was called as {replacement.__qualname__}({', '.join(arguments)}). A replacement is constructed "
                f"with the arguments of {original.__qualname__}.__init__{advice}."
            ) from error
        finally:
            self._building.pop()
            self.meta_init = outer
        return outer is None


@contextmanager
def construction_here() -> Iterator[Construction | None]:
    """Yield the construction that this code is a part of, or a new one in an `applied()` block, or None."""
    construction = construction_around()
    if construction is None and (entries := entered()):
        construction = Construction(ClassRules(entries), by_hand=True)
        with entering(Block(construction=construction)):
            yield construction
            construction.end()
        tell_blocks(construction.outcome)
    else:
        yield construction


def calling_module(depth: int) -> str:
    """Return the name of the calling module: 1 is the caller of the function that calls this, 2 its caller."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def _check_parameters(original: type[nn.Module], replacement: type[nn.Module]) -> None:
    """Raise if `forward` has a parameter by its old name: an argument by the new name would be lost in `**kwargs`."""
    if not (renamed := renamed_parameters(original.forward)):
        return
    parameters = signature_of(replacement.forward).parameters
    for old, new in renamed.items():
        if old in parameters and new not in parameters:
            raise PatchConstructionError(
                f"{replacement.__qualname__}.forward has a parameter {old!r}, which is called {new!r} in "
                f"{original.__qualname__}.forward of transformers {transformers.__version__}, so that argument "
                f"would be ignored. Call it {new!r}; for older releases too, take "
                f"kwargs.get({new!r}, kwargs.get({old!r}))."
            )


def _initialize(
    module: nn.Module, original: type[nn.Module], replacement: type[nn.Module], args: Any, kwargs: Any
) -> None:
    if type(replacement).__call__ is not type.__call__ or replacement.__new__ is not original.__new__:
        raise PatchConstructionError(
            f"{replacement.__qualname__} has a __new__, or a metaclass with a __call__, which isn't called, as an "
            "existing object becomes one of the replacement. Move its code into __init__."
        )
    module.__class__ = replacement
    inherit_loading_attributes(module, original)
    returned = module.__init__(*args, **kwargs)  # type: ignore[misc]
    if returned is not None:  # as `type.__call__` checks; a generator hasn't even begun
        raise PatchConstructionError(
            f"{replacement.__qualname__}.__init__ returns an object of {type(returned).__name__}: it must return None"
            f"{', so it must not contain yield' if inspect.isgenerator(returned) else ''}."
        )
    if "_parameters" not in module.__dict__:
        raise PatchConstructionError(
            f"{replacement.__qualname__}.__init__ doesn't call super().__init__(), so there is no module to put into "
            "the model: call it first."
        )


def _short_repr(value: Any) -> str:
    return cut(repr(value)) if isinstance(value, bool | int | float | str | None) else f"<{type(value).__name__}>"


def _where() -> str:
    """Describe the line that constructs the object: the first one outside of this package."""
    frame = calling_frame(("patcher.",))
    owner, _, name = frame.f_code.co_qualname.rpartition(".")
    cls = f" of {owner.rpartition('.')[2]}" if owner and not owner.endswith("<locals>") else ""
    return f", in {name}{cls} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


# --- modules that are replaced by their paths ------------------------------------------------------------------------


def replace_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Replace the modules that module mappings name, from the outside in.

    Raises:
        PatchConflictError: if two patterns that match one path have different replacements.
        PatchConstructionError: if a replacement can't be built, or the arguments of the original aren't known.
    """
    if not any(entry.patcher.module_mapping for entry in construction.rules.entries):
        return
    used: dict[str, frozenset[tuple[InForce, str]]] = {}
    before = list(named_modules(model))
    # Not by attributes: a class that is still being initialized may have a method of the name of a module.
    places: list[tuple[str, dict[str, Any], str]] = [("", {"": model}, "")]
    for path, siblings, name in places:  # grows by the children of each module
        if path and path not in used:
            _replace(construction, model, path, siblings[name], used)
        children = siblings[name]._modules
        places += [(inside(path) + key, children, key) for key, child in children.items() if child is not None]
    check_left_behind(before, model, dict.fromkeys(used))


def check_left_behind(before: list[tuple[str, nn.Module]], model: nn.Module, taken: Mapping[str, Any]) -> None:
    """Raise if an attribute or hook refers to a module that isn't a part of the model any more.

    Args:
        before: the paths and modules of the model before some were replaced.
        taken: path of a replaced module -> the fusion that takes it, None for a module mapping.
    """
    attribute, place = left_behind(before, named_modules(model))
    if attribute:
        path = next(path for path in taken if inside(place).startswith(inside(path)))
        raise PatchConstructionError(
            f"{_subject(path, taken[path])}, and {attribute} refers to {place}, which isn't in the model any more. "
            f"{_advice(path, taken[path])}"
        )


def _replace(
    construction: Construction,
    model: nn.Module,
    path: str,
    module: nn.Module,
    used: dict[str, frozenset[tuple[InForce, str]]],
) -> None:
    """Replace the module at a path if mappings match all of its paths.

    Args:
        used: replaced path -> the keys that matched it, which don't apply inside of it.
    """

    def used_around(path: str) -> frozenset[tuple[InForce, str]]:
        return frozenset().union(*(keys for outer, keys in used.items() if path.startswith(f"{outer}.")))

    rules = construction.rules
    match = rules.match_path(path, stock_class(module), used_around(path))
    if match is None:
        return
    there = dict(named_modules(model))
    paths = [other for other, submodule in there.items() if submodule is module]
    for other in paths:
        other_match = rules.match_path(other, stock_class(module), used_around(other))
        if other_match is None or other_match.replacement is not match.replacement:
            member = match.entry, "module_mapping"
            problem = (
                f"module_mapping: {match.key!r} names {path}, which is {other} as well: a module at two paths is "
                f"replaced where both are named; add {other!r} with the same class"
            )
            outcome = Outcome(frozenset({(*member, match.key)}), {(*member, ((path, other),)): partial(str, problem)})
            construction.outcome |= outcome
            return
    if type(module) is not match.replacement:  # as in a part that was loaded separately
        module = rebuilt(construction, path, module, match)
    for other in paths:
        parent, _, name = other.rpartition(".")
        there[parent]._modules[name] = module
        keys = rules.keys_at(other, used_around(other))
        used[other] = used_around(other).union(keys)
        construction.outcome |= Outcome(frozenset((entry, "module_mapping", key) for entry, key in keys))


def rebuilt(construction: Construction, path: str, module: nn.Module, match: Match) -> nn.Module:
    """Build the replacement or fused class of a constructed module with that module's arguments.

    Raises:
        PatchConstructionError: if it can't be built, or the arguments aren't known.
    """
    cls = stock_class(module)
    if recorded := (construction.arguments or {}).get(id(module)):
        _, args, kwargs = recorded
    elif cls.__module__.startswith("torch."):
        args, kwargs = _attributes(path, module, match)
    else:
        by = "a copy of another module" if is_modeling_module(cls.__module__) else f"built by code in {cls.__module__}"
        raise PatchConstructionError(
            f"{_subject(path, match.fusion)}, but the constructor arguments of the {cls.__qualname__} there aren't "
            f"known: it is {by}. {_advice(path, match.fusion)}"
        )
    new = match.original.__new__(match.original)
    construction.build(new, match, args, kwargs)
    new.train(module.training)
    return new


def _attributes(path: str, module: nn.Module, match: Match) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return constructor arguments of a module of torch, from its attributes of the same names.

    Defaults are left out if the replacement doesn't take them.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    accepted = signature_of(match.replacement).parameters
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    accepts_all &= match.replacement.__init__ is not nn.Module.__init__  # which refuses what its signature accepts
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name in ("device", "dtype") or name.startswith("_"):
            continue
        value = getattr(module, name, parameter)
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_variadic or value is parameter or isinstance(value, nn.Module) or inspect.ismethod(value):
            raise PatchConstructionError(
                f"{_subject(path, match.fusion)}, a {type(module).__qualname__} of torch, whose constructor takes "
                f"{parameter}, and that isn't among its attributes. {_advice(path, match.fusion)}"
            )
        if name == "bias" and not isinstance(value, bool):  # the attribute is the parameter
            value = value is not None
        if parameter.default is parameter.empty:
            args.append(value)
        elif accepts_all or name in accepted or value != parameter.default:
            kwargs[name] = value
    for weight in module.parameters(recurse=False):
        if weight.dtype != torch.get_default_dtype():
            kwargs["dtype"] = weight.dtype
    return tuple(args), kwargs


def _subject(path: str, fusion: Any) -> str:
    return f"{fusion!r} takes {path}" if fusion is not None else f"module_mapping names {path}"


def _advice(path: str, fusion: Any) -> str:
    if fusion is not None:
        return "Leave it out of the fusion: its modules=... say which it takes."
    if not (parent := path.rpartition(".")[0]):
        return "Give the class of the model another in a class_mapping, one that builds it."
    return f"Replace what is around it, {parent!r}, by a class that builds it."
