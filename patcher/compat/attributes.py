"""What modules and parameters have besides their state dict: attributes, hooks, compiled calls."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

#: The attributes of a bare module.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = sorted(name for name in TORCH_ATTRIBUTES if name.endswith("_hooks"))

#: Types of objects that refer to no tensors and functions, or to everything in the process. Configs are first: a check
#: for another type would call `__getattribute__` of theirs.
_LEAVES: tuple[type, ...] = (PretrainedConfig, GenerationConfig, bool, int, float, complex, str, bytes, type(None))
_LEAVES += (range, slice, torch.dtype, torch.device, torch.Size, logging.Logger, ModuleType, CodeType, GeneratorType)


def attributes(module: nn.Module, *, hooks: bool = False) -> list[tuple[str, Any]]:
    """Return the plain attributes of a module that may refer to tensors or functions, and its hooks if wanted.

    Without those of this package, which refer to no tensors and modules.
    """
    values = vars(module)
    names = [name for name in values if name not in TORCH_ATTRIBUTES and not name.startswith("_patcher")]
    names += [name for name in _HOOKS if values[name]] if hooks else []
    return [(name, value) for name in names if not isinstance(value := values[name], _LEAVES)]


def parts_of(value: Any) -> list[Any]:
    """Return what an object refers to: elements, attributes, closures and defaults of a function.

    >>> parts_of([1, "text", print])
    [<built-in function print>]

    The garbage collector is asked, so that no method of an unusual container is called.
    """
    if isinstance(value, FunctionType):  # without its globals
        parts: list[Any] = [value.__closure__, value.__defaults__, value.__kwdefaults__]
    else:
        parts = gc.get_referents(value)
        if isinstance(value, dict):  # since Python 3.13 the `__dict__` of an object refers to none of its attributes
            parts += dict.values(value)
    return [part for part in parts if not isinstance(part, _LEAVES)]


def tensors_in(value: Any, is_known: Callable[[nn.Module], bool]) -> list[torch.Tensor]:
    """Return all tensors that an object refers to, except those of known modules."""
    return [item for item in objects_in(value, is_known).values() if isinstance(item, torch.Tensor)]


def objects_in(value: Any, is_known: Callable[[nn.Module], bool]) -> dict[int, Any]:
    """Return the objects that an object refers to, and itself, by id; without what is in tensors and known modules."""
    pending, seen = [value], dict[int, Any]()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen[id(value)] = value  # keeps the id in use
        if not isinstance(value, torch.Tensor) and not (isinstance(value, nn.Module) and is_known(value)):
            pending += parts_of(value)
    return seen


def left_behind(before: Iterable[tuple[str, Any]], after: Iterable[tuple[str, nn.Module]]) -> tuple[str, str]:
    """Return the name of an attribute or hook that refers to an object of before, and of that; "" if none does.

    Args:
        before: the modules, and parameters, that a model had.
        after: the modules that it has.
    """
    after = list(after)
    present = {id(module) for _, module in after}
    gone = {id(item): name or "the model" for name, item in before if id(item) not in present}
    if not gone:
        return "", ""
    held = [(path, name, value) for path, module in after for name, value in attributes(module, hooks=True)]
    if not gone.keys().isdisjoint(objects_in([value for *_, value in held], lambda module: True)):
        for path, name, value in held:
            for item in gone.keys() & objects_in(value, lambda module: True):
                return f"{path}.{name}".lstrip("."), gone[item]
    return "", ""


def share_storage(parameter: nn.Parameter, memo: dict[int, Any]) -> None:
    """Make a deep copy with this memo share the storage of a parameter, also with views of it."""
    memo[id(parameter)] = new = nn.Parameter(parameter.detach(), parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    storage = parameter.untyped_storage()
    memo.setdefault("torch", {})[storage._cdata] = storage  # type: ignore[call-overload]


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has gradient hooks, which a copy of it would lack."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_compiled(module: nn.Module) -> bool:
    """Whether a module itself was compiled by `torch.compile`."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
