"""Modules of another model in the place of those that they replace, with what these hold beyond their config.

Three modules decide on each attribute: the one that is replaced, the same as its config constructs it (the base), and
the new one. What is as in the base is up to the new one. What was changed since goes to the new one, if that has it as
the base does; anything else is refused, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher.compat.models import ORIGINAL, named_modules, named_parameters
from patcher.errors import InvalidPatcherError
from patcher.layouts.carried import carriers
from patcher.layouts.either_layout import carry
from patcher.loading.record import RECORD
from patcher.loading.stock_view import carriers_in
from patcher.loading.unfusing import HOOKS
from patcher.patterns import inside

#: What torch, transformers and this package keep on a module, and look after themselves.
_KEPT = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", ORIGINAL, RECORD} | {
    "_is_hf_initialized",
    "_weight_conversions",
    "_no_split_modules",
    "hf_device_map",
}
_MISSING: Any = object()


@dataclass(frozen=True)
class Transplant:
    """Modules of `source` on their way into `model`.

    Attributes:
        base: a model constructed as `model` was, on the same weights.
        converted: names of parameters, and the names of what conversions make of these.
        new: the names of parameters that are made of nothing in `model`.
    """

    model: PreTrainedModel
    base: PreTrainedModel
    source: PreTrainedModel
    converted: Iterable[tuple[list[str], list[str]]] = ()
    new: frozenset[str] = frozenset()

    def run(self, paths: Iterable[str]) -> PreTrainedModel:
        """The model with the modules at these paths in place.

        Raises:
            InvalidPatcherError: something that a module holds would be lost.
        """
        outermost = outermost_of(paths)
        check_as_constructed(self.model, self.base, outermost)
        trains, configs, owners = self._trains(), dict(self._configs()), _owners(self.model)
        places: dict[nn.Module, list[str]] = {}
        for path, module in named_modules(self.model):
            places.setdefault(module, []).append(path)
        result, placed = self.model, set()
        for path in outermost:
            old, new = result.get_submodule(path), self.source.get_submodule(path)
            if old in placed:  # one module at several paths
                continue
            placed.add(new)
            olds, news = dict(named_modules(old, path)), dict(named_modules(new, path))
            for name, module in named_modules(self.base.get_submodule(path), path):
                _move_attributes(name, olds[name], module, news.get(name))
            for name, module in news.items():
                module.training = olds.get(name, old).training
                held = vars(module).items()
                module.__dict__.update({key: configs[id(each)] for key, each in held if id(each) in configs})
            self._move_settings(path, old, new, trains)
            self._tie(path, old, news, owners)
            if not path:
                return new  # type: ignore[return-value]
            for other in places[old]:
                parent, _, name = other.rpartition(".")
                if (at := result.get_submodule(parent)._modules).get(name) is old:
                    at[name] = new
        for path, module, carried in carriers(self.source):
            if (around := result.get_submodule(path)) is not module:  # it is of several modules at once
                carry(around, carried)
        return result

    def _move_settings(self, path: str, old: nn.Module, new: nn.Module, trains: Mapping[str, bool]) -> None:
        """Have parameters lie where those of the old module do, and be trained if those are."""
        device = next((each.device for each in old.parameters()), None)
        flags = {each.requires_grad for each in old.parameters()}
        for name, parameter in named_parameters(new, path):
            if name in trains:
                parameter.requires_grad_(trains[name])
            elif name not in self.new and flags:
                if len(flags) > 1:
                    what = f"is frozen in part, and what {name} is made of isn't known"
                    raise _cannot(path, what, "Freeze all of it or nothing.")
                parameter.requires_grad_(True in flags)
            if device is not None and parameter.device != device:
                parameter.data = parameter.data.to(device)

    def _tie(
        self, path: str, old: nn.Module, news: Mapping[str, nn.Module], owners: Mapping[int, set[nn.Module]]
    ) -> None:
        """Have the parameters of a new module shared as those of the old one are, inside of it and outside."""
        inner, made = set(old.modules()), {name for _, names in self.converted for name in names}
        first: dict[int, nn.Parameter | None] = {}
        source: dict[int, nn.Parameter] = {}
        for name, parameter in named_parameters(old, path):
            owner, _, last = name.rpartition(".")
            here = news[owner]._parameters.get(last) if owner in news else None
            is_outside = not owners[id(parameter)] <= inner
            shared = parameter if is_outside else first.setdefault(id(parameter), here)
            if shared is not here:
                if shared is None or here is None or shared.shape != here.shape or name in made:
                    raise _cannot(name, "is tied to another parameter", "Take the tie off, and tie the result.")
                news[owner]._parameters[last] = shared
            if here is not None and source.setdefault(id(here), parameter) is not parameter:
                raise _cannot(name, "is not tied as its config says", "Apply the patcher first.")

    def _configs(self) -> Iterable[tuple[int, PretrainedConfig]]:
        """Each config of the source, by its id, and that of the model, which its own modules look at."""
        own = dict(named_modules(self.model))
        for path, module in named_modules(self.source):
            if isinstance(module, PreTrainedModel) and isinstance(at := own.get(path), PreTrainedModel):
                yield from _matched(module.config, at.config)

    def _trains(self) -> dict[str, bool]:
        """Whether a parameter is trained, by its name in either layout."""
        own = {name: each.requires_grad for name, each in named_parameters(self.model)}
        found = dict(own)
        for before, after in self.converted:
            flags = {name: own[name] for name in before if name in own}
            if len(set(flags.values())) > 1:
                frozen = ", ".join(name for name, trains in flags.items() if not trains)
                raise _cannot(
                    frozen, f"is frozen, and others of {', '.join(flags)} aren't", "Freeze all of them or none."
                )
            found.update(dict.fromkeys(after, any(flags.values())) if flags else {})
        return found


def _cannot(name: str, what: str, instead: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"Patcher.apply: {name} {what}, and that would be lost, for a module there is replaced. {instead}"
    )


def check_as_constructed(model: nn.Module, base: nn.Module, paths: Iterable[str]) -> None:
    """Raise for parts, parameters and hooks that modules at these paths have not from the config of the model.

    Raises:
        InvalidPatcherError: it names the first of them.
    """
    first = "Apply the patcher first, and change the result."
    for path in paths:
        try:
            now, was = model.get_submodule(path), base.get_submodule(path)
        except AttributeError:
            raise _cannot(path, "was added to the model, or taken out of it", first) from None
        found, expected = dict(named_modules(now, path)), dict(named_modules(was, path))
        for name in sorted(expected.keys() | found.keys()):
            cls, is_now = type(expected.get(name)), type(found.get(name))
            if any(each.__name__ == "BaseTunerLayer" for each in is_now.__mro__):
                raise _cannot(name, "has an adapter", "Merge it or unload it, or apply the patcher first.")
            if cls is not is_now:
                raise _cannot(name, f"is a {is_now.__qualname__} (its config says {cls.__qualname__})", first)
            for hooks in HOOKS[:4]:
                if len(getattr(found[name], hooks)) > len(getattr(expected[name], hooks)):
                    raise _cannot(name, f"has hooks ({hooks})", "Take them off, and register them on the result.")
        own, shapes = ({name: tuple(each.shape) for name, each in named_parameters(at, path)} for at in (now, was))
        for name in sorted(shapes.keys() | own.keys()):
            if shapes.get(name) != own.get(name):
                raise _cannot(name, f"has the shape {own.get(name)} (its config says {shapes.get(name)})", first)


def _move_attributes(path: str, old: nn.Module, base: nn.Module, new: nn.Module | None) -> None:
    """Give a module the attributes and buffers that were changed on the one that it takes the place of."""
    for key in sorted(vars(old).keys() | vars(base).keys()):
        if key not in _KEPT and not key.endswith("_hooks") and not key.startswith("_patcher"):
            mine, theirs, here = (getattr(module, key, _MISSING) for module in (old, base, new))
            if isinstance(mine, PretrainedConfig) or _same(mine, theirs):
                continue
            is_method = isinstance(mine, MethodType) or callable(getattr(type(new), key, None))
            if new is None or is_method or not _same(theirs, here):
                raise _changed(path, key)
            if mine is _MISSING:  # a load sets what a construction doesn't
                new.__dict__.pop(key, None)
            else:
                new.__dict__[key] = mine
    for key in old._buffers.keys() & old._non_persistent_buffers_set:
        mine, theirs = old._buffers[key], base._buffers.get(key)
        if not _same(mine, theirs):
            if new is None or key not in new._buffers or not _same(theirs, new._buffers[key]):
                raise _changed(path, key)
            new._buffers[key] = mine


def _changed(path: str, key: str) -> InvalidPatcherError:
    what = "was changed since the model was constructed"
    return _cannot(inside(path) + key, what, "Apply the patcher first, and change the result.")


def outermost_of(paths: Iterable[str]) -> list[str]:
    """These paths but for those below another one."""
    found: list[str] = []
    for path in sorted(set(paths), key=lambda each: (each != "", each.count("."))):
        if not path.startswith(tuple(map(inside, found))):
            found.append(path)
    return found


def converted_names(model: nn.Module) -> list[tuple[list[str], list[str]]]:
    """The names in transformers, and those in the model, of all parameters that a module carries a layout of."""
    return [
        ([f"{inside(path)}{name}" for name in layout.stock], [f"{inside(path)}{name}" for name in layout.fused])
        for path, _, carried in carriers_in(model)
        for layout in carried.all
    ]


def replaced_paths(model: nn.Module) -> list[str]:
    """Where a model has modules that are replaced, or layers whose weights conversions have made."""
    paths = [path for path, module in named_modules(model) if ORIGINAL in vars(module)]
    return paths + [name.rpartition(".")[0] for _, own in converted_names(model) for name in own]


def _owners(model: nn.Module) -> dict[int, set[nn.Module]]:
    """The modules that have a parameter, by its id."""
    found: dict[int, set[nn.Module]] = {}
    for _, module in named_modules(model):
        for parameter in module._parameters.values():
            found.setdefault(id(parameter), set()).add(module)
    return found


def _matched(one: PretrainedConfig, other: PretrainedConfig) -> Iterable[tuple[int, PretrainedConfig]]:
    yield id(one), other
    for name, part in vars(one).items():
        if isinstance(part, PretrainedConfig) and isinstance(mine := vars(other).get(name), PretrainedConfig):
            yield from _matched(part, mine)


def _same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values of an attribute, each of a module of its own, are alike."""
    compares: Any = getattr(type(one), "__eq__")  # noqa: B009
    if one is other or isinstance(one, nn.Module):
        return one is other or isinstance(other, nn.Module)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.to(one.device))
    if isinstance(one, MethodType | FunctionType):
        return one.__code__ is other.__code__
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key], depth) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(*each, depth) for each in zip(one, other, strict=True))
    if compares is not object.__eq__:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)  # an array compares its items
    if depth > 5 or not hasattr(one, "__dict__"):
        return True
    return _same(vars(one), vars(other), depth + 1)
