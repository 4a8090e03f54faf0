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
from patcher.layouts.layouts import by_itself
from patcher.loading.unfusing import HOOKS
from patcher.patterns import compress, inside

#: What torch and transformers keep on a module, and look after themselves.
_KEPT = {*vars(nn.Module()), "_is_hf_initialized", "_no_split_modules"}
_MISSING: Any = object()
#: What to do where a module isn't as its config says.
_FIRST = "Apply the patcher first, and change the result."


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

    def give(self, path: str, module: nn.Module, old: nn.Module) -> None:
        """Give a module its own; the others in what takes the place of `old` are given theirs one by one."""
        device = next((each.device for each in old.parameters()), None)
        for table in (module._parameters, module._buffers):
            for key, here in table.items():
                name = inside(path) + key
                if here is None or key in module._non_persistent_buffers_set:
                    continue
                if name in self.made:
                    table[key] = self._made(name, isinstance(here, nn.Parameter), old)
                elif name in self.own and self.own[name].shape == here.shape:
                    table[key] = self.own[name]  # type: ignore[assignment]
                elif here.is_meta:
                    raise InvalidPatcherError(
                        f"Patcher.apply finds no weights for {name}: nothing in the model makes it. Load the model "
                        "again with the patcher that it is to have."
                    )
                elif device is not None:
                    here.data = here.data.to(device)

    def _made(self, name: str, is_parameter: bool, old: nn.Module) -> Any:
        value = self.made[name]
        if (same := self._at_place.get(_place(value))) is not None:  # it has another name only
            return same
        value = by_itself(value.detach().contiguous())
        return nn.Parameter(value, self._trains(name, old)) if is_parameter else value

    def _trains(self, name: str, old: nn.Module) -> bool:
        """Whether what is made of parameters is trained, as those are."""
        parts = {each: self.own[each] for each in self.made_of.get(name, ()) if each in self.own}
        flags = {each: part.requires_grad for each, part in (parts or dict(named_parameters(old))).items()}
        if len(set(flags.values())) > 1:
            frozen = compress([each for each, is_trained in flags.items() if not is_trained])
            what = f"is frozen, and others of {', '.join(compress(list(flags)))} aren't"
            raise _cannot(", ".join(frozen), what, "Freeze all of them or none.")
        return any(flags.values())


def _place(tensor: torch.Tensor) -> Any:
    """The memory that a tensor is, and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def move_attributes(model: PreTrainedModel, base: PreTrainedModel, source: PreTrainedModel) -> None:
    """Give modules of `source` what those of a model hold whose places they are to take, or raise for what can't be.

    Args:
        base: a model constructed as `model` was, on the meta device.
        source: the model with the new modules, constructed in the same way with the same config.
    """
    for path in _outermost(model, source):
        try:
            old, was = model.get_submodule(path), base.get_submodule(path)
        except AttributeError:
            raise _cannot(path, "was added to the model, or taken out of it", _FIRST) from None
        olds, expected, news = (dict(named_modules(each, path)) for each in (old, was, source.get_submodule(path)))
        for name in sorted(expected.keys() | olds.keys()):
            _check_as_constructed(name, olds.get(name), expected.get(name))
        for name, module in expected.items():
            _move_held(name, olds[name], module, news.get(name))
        for name, module in news.items():
            module.training = olds.get(name, old).training


def transplant(model: PreTrainedModel, source: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """The model with modules of `source` in the place of its own, after `move_attributes`."""
    places: dict[nn.Module, list[str]] = {}
    owners: dict[int, set[tuple[nn.Module, str]]] = {}
    for path, module in named_modules(model):
        places.setdefault(module, []).append(path)
        for key, parameter in module._parameters.items():
            owners.setdefault(id(parameter), set()).add((module, key))
    before, result, outermost = list(named_parameters(model)), model, _outermost(model, source)
    for path in outermost:
        old, new = model.get_submodule(path), source.get_submodule(path)
        if old not in places:  # one module at several paths
            continue
        for name, module in named_modules(new, path):
            weights.give(name, module, old)
        for place in places.pop(old):
            parent, _, key = place.rpartition(".")
            if not place:
                result = new  # type: ignore[assignment]
            elif (held := model.get_submodule(parent)._modules).get(key) is old:
                held[key] = new
    within = tuple(map(inside, outermost))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in weights.made_of if not name.startswith(within)):
        weights.give(path, model.get_submodule(path), model.get_submodule(path))
    now = dict(named_parameters(result))
    for name, parameter in before:
        if len(owners[id(parameter)]) > 1 and now.get(name) is not parameter:
            raise _cannot(name, "is tied to another parameter", "Take the tie off, and tie the result.")
    return result


def _outermost(*models: nn.Module) -> list[str]:
    """The paths of the modules of one of these that are replaced, but for those below another one."""
    paths = [path for each in models for path, module in named_modules(each) if ORIGINAL in vars(module)]
    found: list[str] = []
    for path in sorted(paths, key=lambda each: (each != "", each.count("."))):
        if path not in found and not path.startswith(tuple(map(inside, found))):
            found.append(path)
    return found


def _cannot(name: str, what: str, instead: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"Patcher.apply: {name} {what}, and that would be lost, for a module there is replaced. {instead}"
    )


def _check_as_constructed(name: str, module: nn.Module | None, base: nn.Module | None) -> None:
    """Raise for a part, a parameter or a hook that a model has not from its config."""
    cls, is_now = type(base), type(module)
    if any(each.__name__ == "BaseTunerLayer" for each in is_now.__mro__):
        raise _cannot(name, "has an adapter", "Merge it or unload it, or apply the patcher first.")
    if module is None or base is None or cls is not is_now:
        raise _cannot(name, f"is a {is_now.__qualname__} (its config says {cls.__qualname__})", _FIRST)
    for hooks in HOOKS[:4]:
        if len(getattr(module, hooks)) > len(getattr(base, hooks)):
            raise _cannot(name, f"has hooks ({hooks})", "Take them off, and register them on the result.")
    for key in sorted(base._parameters.keys() | module._parameters.keys()):
        found = [getattr(each, key, None) for each in (module, base)]
        own, expected = (None if each is None else tuple(each.shape) for each in found)
        if own != expected:
            raise _cannot(inside(name) + key, f"has the shape {own} (its config says {expected})", _FIRST)


def _move_held(path: str, old: nn.Module, base: nn.Module, new: nn.Module | None) -> None:
    """Give a module the attributes and buffers that were changed on the one that it takes the place of."""
    for key in sorted({*vars(old), *vars(base), *old._non_persistent_buffers_set} - _KEPT):
        mine, theirs, here = (getattr(module, key, _MISSING) for module in (old, base, new))
        if isinstance(mine, PretrainedConfig):
            if new is not None and isinstance(here, PretrainedConfig):
                new.__dict__[key] = mine  # some modules make a copy of that of the model
        elif not key.startswith("_patcher"):
            is_method = isinstance(mine, MethodType) or callable(getattr(type(new), key, None))
            is_changed = not _same(mine, theirs)
            fits = new is not None and not is_method and _same(theirs, here)
            if is_changed and not fits:
                raise _cannot(inside(path) + key, "was changed since the model was constructed", _FIRST)
            if new is None or not fits:
                continue
            if key in new._buffers:
                new._buffers[key] = mine
            elif is_changed and mine is _MISSING:
                new.__dict__.pop(key, None)
            elif is_changed:
                new.__dict__[key] = mine


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
