"""The tensors that modules keep as plain attributes, so that no state dict has them.

Alone, in lists, tuples, sets and dicts, in objects, as parts of modules that are not registered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

#: What a module has before its `__init__` gives it anything.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))

_WITHOUT_TENSORS: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), type, range, slice)
_WITHOUT_TENSORS += (
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
    logging.Logger,
    ModuleType,
    BuiltinFunctionType,
    CodeType,
    GeneratorType,
    PretrainedConfig,
)


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a module that may hold tensors."""
    for name, value in vars(module).items():
        if name not in TORCH_ATTRIBUTES and not isinstance(value, _WITHOUT_TENSORS):
            yield name, value


def tensors_in(value: Any, is_known: Callable[[nn.Module], bool]) -> list[torch.Tensor]:
    """All tensors in a value, each once.

    Args:
        is_known: which modules are not looked into: those of the model have names for what they hold.
    """
    waiting, seen, found = [value], dict[int, Any](), list[torch.Tensor]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, _WITHOUT_TENSORS) or id(each) in seen:
            continue
        seen[id(each)] = each  # held, so that no other object gets its id
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, nn.Module) and is_known(each):
            continue
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, partial):
            waiting += [each.func, each.args, each.keywords]
        elif isinstance(each, MethodType):
            waiting.append(each.__self__)
        elif isinstance(each, FunctionType):
            waiting += _closure(each)
        else:
            waiting += [*getattr(each, "__dict__", {}).values(), *_slots(each)]
    return found


def _closure(function: FunctionType) -> list[Any]:
    held = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return held


def _slots(value: Any) -> list[Any]:
    names = (vars(cls).get("__slots__", ()) for cls in type(value).__mro__)
    slots = [name for each in names for name in ([each] if isinstance(each, str) else each)]
    return [getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)]
