"""Put newly constructed modules into a model, with whatever the modules that they replace have beyond their config.

Three modules decide on each attribute: the replaced one, the same as its config constructs it (the base), and the new
one. If it is as in the base, the new module keeps its own. If it was changed since, it is moved to the new module if
that has it as the base does; otherwise it is refused, by name. Parameters and persistent buffers are the objects of
the model, except for those that are converted: so they stay tied and frozen, and in the same memory.
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

#: The attributes that torch and transformers keep on every module.
_COMMON = {*vars(nn.Module()), "_is_hf_initialized", "_no_split_modules"}
_MISSING: Any = object()
#: The advice for a module that isn't as its config says.
_PATCH_FIRST = "Apply the patcher first, and change the result."


class Weights:
    """The parameters and persistent buffers of new modules.

    Args:
        model: the model whose tensors they take.
        converted: the values of those that aren't tensors of the same name in the model.
        origins: the names of these, and of the parameters from which they are converted, if known.
    """

    def __init__(
        self, model: nn.Module, converted: Mapping[str, torch.Tensor], origins: Mapping[str, Iterable[str]]
    ) -> None:
        self.state, self.converted, self.origins = state_tensors(model), converted, origins
        self._by_memory = {_memory(tensor): tensor for tensor in self.state.values()}

    def assign(self, path: str, module: nn.Module, old: nn.Module) -> None:
        """Assign the tensors of one module, which is the replacement of `old` or a part of it."""
        device = next((parameter.device for parameter in old.parameters()), None)
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                name = inside(path) + key
                if tensor is None or key in module._non_persistent_buffers_set:
                    continue
                if name in self.converted:
                    table[key] = self._converted(name, isinstance(tensor, nn.Parameter), old)
                elif name in self.state and self.state[name].shape == tensor.shape:
                    table[key] = self.state[name]  # type: ignore[assignment]
                elif tensor.is_meta:
                    raise InvalidPatcherError(
                        f"Patcher.apply finds no weights for {name}: nothing in the model makes it. Load the model "
                        "again with the patcher that it is to have."
                    )
                elif device is not None:
                    tensor.data = tensor.data.to(device)

    def _converted(self, name: str, is_parameter: bool, old: nn.Module) -> Any:
        value = self.converted[name]
        if (same := self._by_memory.get(_memory(value))) is not None:  # it was only renamed
            return same
        value = by_itself(value.detach().contiguous())
        return nn.Parameter(value, self._requires_grad(name, old)) if is_parameter else value

    def _requires_grad(self, name: str, old: nn.Module) -> bool:
        """Whether a converted parameter is trained: as those from which it is converted."""
        parts = {part: self.state[part] for part in self.origins.get(name, ()) if part in self.state}
        flags = {part: value.requires_grad for part, value in (parts or dict(named_parameters(old))).items()}
        if len(set(flags.values())) > 1:
            frozen = compress([part for part, is_trained in flags.items() if not is_trained])
            what = f"is frozen, and others of {', '.join(compress(list(flags)))} aren't"
            raise _refusal(", ".join(frozen), what, "Freeze all of them or none.")
        return any(flags.values())


def _memory(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that are the same memory in the same form."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def move_attributes(model: PreTrainedModel, base: PreTrainedModel, source: PreTrainedModel) -> None:
    """Move changed attributes of a model's modules to those of `source` that will replace them, or raise.

    The three models are constructed with the same config; `base` is like `model`, on the meta device.
    """
    for path in _outermost(model, source):
        try:
            old, base_module = model.get_submodule(path), base.get_submodule(path)
        except AttributeError:
            raise _refusal(path, "was added to the model, or taken out of it", _PATCH_FIRST) from None
        olds, expected, news = (
            dict(named_modules(module, path)) for module in (old, base_module, source.get_submodule(path))
        )
        for name in sorted(expected.keys() | olds.keys()):
            _check_as_constructed(name, olds.get(name), expected.get(name))
        for name, module in expected.items():
            _move(name, olds[name], module, news.get(name))
        for name, module in news.items():
            module.training = olds.get(name, old).training


def transplant(model: PreTrainedModel, source: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """Replace modules of a model by those of `source`, after `move_attributes`, and return the model."""
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
            weights.assign(name, module, old)
        for place in places.pop(old):
            parent, _, key = place.rpartition(".")
            if not place:
                result = new  # type: ignore[assignment]
            elif (children := model.get_submodule(parent)._modules).get(key) is old:
                children[key] = new
    prefixes = tuple(map(inside, outermost))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in weights.origins if not name.startswith(prefixes)):
        weights.assign(path, model.get_submodule(path), model.get_submodule(path))
    after = dict(named_parameters(result))
    for name, parameter in before:
        if len(owners[id(parameter)]) > 1 and after.get(name) is not parameter:
            raise _refusal(name, "is tied to another parameter", "Take the tie off, and tie the result.")
    return result


def _outermost(*models: nn.Module) -> list[str]:
    """Return the paths of modules that are patched in one of the models, without those below another one."""
    paths = [path for model in models for path, module in named_modules(model) if ORIGINAL in vars(module)]
    outermost: list[str] = []
    for path in sorted(paths, key=lambda path: (path != "", path.count("."))):
        if path not in outermost and not path.startswith(tuple(map(inside, outermost))):
            outermost.append(path)
    return outermost


def _refusal(name: str, what: str, advice: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"Patcher.apply: {name} {what}, and that would be lost, for a module there is replaced. {advice}"
    )


def _check_as_constructed(name: str, module: nn.Module | None, base: nn.Module | None) -> None:
    """Raise for submodules, parameters and hooks that a model doesn't have from its config."""
    cls, expected_cls = type(module), type(base)
    if any(parent.__name__ == "BaseTunerLayer" for parent in cls.__mro__):
        raise _refusal(name, "has an adapter", "Merge it or unload it, or apply the patcher first.")
    if module is None or base is None or expected_cls is not cls:
        what = f"is a {cls.__qualname__} (its config says {expected_cls.__qualname__})"
        raise _refusal(name, what, _PATCH_FIRST)
    for hooks in HOOKS[:4]:
        if len(getattr(module, hooks)) > len(getattr(base, hooks)):
            raise _refusal(name, f"has hooks ({hooks})", "Take them off, and register them on the result.")
    for key in sorted(base._parameters.keys() | module._parameters.keys()):
        parameters = [getattr(item, key, None) for item in (module, base)]
        shape, expected = (None if parameter is None else tuple(parameter.shape) for parameter in parameters)
        if shape != expected:
            what = f"has the shape {shape} (its config says {expected})"
            raise _refusal(inside(name) + key, what, _PATCH_FIRST)


def _move(path: str, old: nn.Module, base: nn.Module, new: nn.Module | None) -> None:
    """Move the changed attributes and buffers of a module to the one that replaces it."""
    for key in sorted({*vars(old), *vars(base), *old._non_persistent_buffers_set} - _COMMON):
        value, base_value, new_value = (getattr(module, key, _MISSING) for module in (old, base, new))
        if isinstance(value, PretrainedConfig):
            if new is not None and isinstance(new_value, PretrainedConfig):
                new.__dict__[key] = value  # some modules copy the config of the model
        elif not key.startswith("_patcher"):
            is_method = isinstance(value, MethodType) or callable(getattr(type(new), key, None))
            is_changed = not _equal(value, base_value)
            fits = new is not None and not is_method and _equal(base_value, new_value)
            if is_changed and not fits:
                raise _refusal(inside(path) + key, "was changed since the model was constructed", _PATCH_FIRST)
            if new is None or not fits:
                continue
            if key in new._buffers:
                new._buffers[key] = value
            elif is_changed and value is _MISSING:
                new.__dict__.pop(key, None)
            elif is_changed:
                new.__dict__[key] = value


def _equal(first: Any, second: Any, depth: int = 0) -> bool:
    """Whether the values of an attribute of two modules are equal."""
    equals: Any = getattr(type(first), "__eq__")  # noqa: B009
    if first is second or isinstance(first, nn.Module):
        return first is second or isinstance(second, nn.Module)
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        if first.is_meta or second.is_meta:
            return first.is_meta is second.is_meta and first.shape == second.shape
        return (
            first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second.to(first.device))
        )
    if isinstance(first, MethodType | FunctionType):
        return first.__code__ is second.__code__
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key], depth) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(_equal(*pair, depth) for pair in zip(first, second, strict=True))
    if equals is not object.__eq__:
        equal = first == second
        return bool(equal.all() if hasattr(equal, "all") else equal)  # arrays compare item by item
    if depth > 5 or not hasattr(first, "__dict__"):
        return True
    return _equal(vars(first), vars(second), depth + 1)
