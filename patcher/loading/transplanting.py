"""Modules that were built anew in the place of those that they replace, with what these hold beyond their config.

Three modules decide on each attribute: the one that is replaced, the same as its config constructs it (the base), and
the new one. What is as in the base is up to the new one. What was changed since goes to the new one, if that has it as
the base does; anything else is refused, by name. Parameters and persistent buffers are those of the model, the objects
themselves, but for what conversions make of them: so they stay tied, and frozen, and in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher.compat.models import ORIGINAL, named_modules, named_parameters, state_tensors
from patcher.errors import InvalidPatcherError
from patcher.layouts.transforms import by_itself
from patcher.loading.record import RECORD
from patcher.loading.unfusing import HOOKS
from patcher.patterns import compress, inside

#: What torch, transformers and this package keep on a module, and look after themselves.
_KEPT = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", ORIGINAL, RECORD} | {
    "_is_hf_initialized",
    "_no_split_modules",
}
_MISSING: Any = object()


class Weights:
    """The parameters and persistent buffers of new modules.

    Args:
        model: what they are taken from.
        made: the values of those that aren't those of the same name in the model.
        made_of: the names of these, and of what conversions make them of, where that is known.
    """

    def __init__(
        self, model: nn.Module, made: Mapping[str, torch.Tensor], made_of: Mapping[str, Iterable[str]]
    ) -> None:
        self.own, self.made, self.made_of = state_tensors(model), made, made_of
        self._at_place = {_place(each): each for each in self.own.values()}

    def give(self, path: str, old: nn.Module, news: Mapping[str, nn.Module]) -> None:
        """Give the modules at a path, and below it, theirs.

        Raises:
            InvalidPatcherError: nothing makes one of them, or it isn't known whether it is trained.
        """
        device = next((each.device for each in old.parameters()), None)
        for owner, module in news.items():
            for table in (module._parameters, module._buffers):
                for last, here in table.items():
                    name = inside(owner) + last
                    if here is None or last in module._non_persistent_buffers_set:
                        continue
                    if name in self.made:
                        table[last] = self._made(name, isinstance(here, nn.Parameter), path, old)
                    elif name in self.own and self.own[name].shape == here.shape:
                        table[last] = self.own[name]  # type: ignore[assignment]
                    elif here.is_meta:
                        raise InvalidPatcherError(
                            f"Patcher.apply finds no weights for {name}: nothing in the model makes it. Load the "
                            "model again with the patcher that it is to have."
                        )
                    elif device is not None:
                        here.data = here.data.to(device)

    def _made(self, name: str, is_parameter: bool, path: str, old: nn.Module) -> Any:
        value = self.made[name]
        if (same := self._at_place.get(_place(value))) is not None:  # it has another name only
            return same
        value = by_itself(value.detach().contiguous())
        return nn.Parameter(value, self._trains(name, path, old)) if is_parameter else value

    def _trains(self, name: str, path: str, old: nn.Module) -> bool:
        """Whether what is made of parameters is trained, as those are."""
        parts = {each: self.own[each] for each in self.made_of.get(name, ()) if each in self.own}
        flags = {each: part.requires_grad for each, part in (parts or dict(named_parameters(old, path))).items()}
        if len(set(flags.values())) > 1:
            frozen = compress([each for each, is_trained in flags.items() if not is_trained])
            what = f"is frozen, and others of {', '.join(compress(list(flags)))} aren't"
            raise _cannot(", ".join(frozen), what, "Freeze all of them or none.")
        return any(flags.values())


def _place(tensor: torch.Tensor) -> Any:
    """The memory that a tensor is, and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def transplant(
    model: PreTrainedModel, base: PreTrainedModel, source: PreTrainedModel, weights: Weights
) -> PreTrainedModel:
    """The model with modules of another one where one of the two has replacements, or weights that are converted.

    Args:
        base: a model constructed as `model` was, on the meta device.
        source: the model with the new modules, constructed in the same way with the same config.

    Raises:
        InvalidPatcherError: something that a module holds would be lost.
    """
    converted = [name.rpartition(".")[0] for name in weights.made_of]
    outermost = outermost_of([*replaced_paths(model), *replaced_paths(source), *converted])
    check_as_constructed(model, base, outermost)
    places: dict[nn.Module, list[str]] = {}
    owners: dict[int, set[tuple[nn.Module, str]]] = {}
    for path, module in named_modules(model):
        places.setdefault(module, []).append(path)
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), set()).add((module, name))
    placed = set[nn.Module]()
    for path in outermost:
        old, new = model.get_submodule(path), source.get_submodule(path)
        if old in placed:  # one module at several paths
            continue
        placed.add(new)
        olds, news = dict(named_modules(old, path)), dict(named_modules(new, path))
        for name, module in named_modules(base.get_submodule(path), path):
            _move_attributes(name, olds[name], module, news.get(name))
        for name, module in news.items():
            module.training = olds.get(name, old).training
        weights.give(path, old, news)
        for name, parameter in named_parameters(old, path):
            owner, _, last = name.rpartition(".")
            here = news[owner]._parameters.get(last) if owner in news else None
            if len(owners[id(parameter)]) > 1 and here is not parameter:
                raise _cannot(name, "is tied to another parameter", "Take the tie off, and tie the result.")
        if not path:
            return new  # type: ignore[return-value]
        for other in places[old]:
            parent, _, name = other.rpartition(".")
            if (at := model.get_submodule(parent)._modules).get(name) is old:
                at[name] = new
    return model


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
    for path in outermost_of(paths):
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
    for key in sorted(vars(old)):
        if key not in _KEPT and not key.endswith("_hooks") and not key.startswith("_patcher"):
            mine, theirs, here = (getattr(module, key, _MISSING) for module in (old, base, new))
            if isinstance(mine, PretrainedConfig) and new is not None and isinstance(here, PretrainedConfig):
                new.__dict__[key] = mine  # of which some modules make copies
            if isinstance(mine, PretrainedConfig) or _same(mine, theirs):
                continue
            is_method = isinstance(mine, MethodType) or callable(getattr(type(new), key, None))
            if new is None or is_method or not _same(theirs, here):
                raise _changed(path, key)
            new.__dict__[key] = mine
    for key in old._buffers.keys() & old._non_persistent_buffers_set:
        mine, theirs = old._buffers[key], base._buffers.get(key)
        if new is not None and key in new._buffers and _same(theirs, new._buffers[key]):
            new._buffers[key] = mine
        elif not _same(mine, theirs):
            raise _changed(path, key)


def _changed(path: str, key: str) -> InvalidPatcherError:
    what = "was changed since the model was constructed"
    return _cannot(inside(path) + key, what, "Apply the patcher first, and change the result.")


def replaced_paths(model: nn.Module) -> list[str]:
    return [path for path, module in named_modules(model) if ORIGINAL in vars(module)]


def outermost_of(paths: Iterable[str]) -> list[str]:
    """These paths but for those below another one."""
    found: list[str] = []
    for path in sorted(set(paths), key=lambda each: (each != "", each.count("."))):
        if not path.startswith(tuple(map(inside, found))):
            found.append(path)
    return found


def _same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values of an attribute, each of a module of its own, are alike."""
    compares: Any = getattr(type(one), "__eq__")  # noqa: B009
    if one is other or isinstance(one, nn.Module):
        return one is other or isinstance(other, nn.Module)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.is_meta or other.is_meta:
            return one.is_meta is other.is_meta and one.shape == other.shape
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
