"""What modules and parameters hold that no state dict has: attributes, what they refer to, hooks, compiled calls."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

#: What a module has before its `__init__` gives it anything.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))

#: What holds neither tensors nor functions, or whatever the process has.
_HOLDS_NONE = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_HOLDS_NONE += (logging.Logger, ModuleType, CodeType, GeneratorType, PretrainedConfig)  # type: ignore[assignment]


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a module that may hold something."""
    for name, value in vars(module).items():
        if name not in TORCH_ATTRIBUTES and not isinstance(value, _HOLDS_NONE):
            yield name, value


def parts_of(value: Any) -> list[Any]:
    """What an object refers to: elements, attributes, what a function closes over; not what its class does.

    >>> parts_of([1, "text", print])
    [<built-in function print>]

    As the garbage collector sees it, so that no method of a container of an unusual kind is called.
    """
    if isinstance(value, FunctionType):  # and not its globals
        found: list[Any] = [value.__closure__, value.__defaults__, value.__kwdefaults__]
    else:
        found = gc.get_referents(value)
    return [each for each in found if not isinstance(each, _HOLDS_NONE)]


def tensors_in(value: Any, is_known: Callable[[nn.Module], bool]) -> list[torch.Tensor]:
    """All tensors in a value, each once.

    Args:
        is_known: which modules are not looked into: those of the model have names for what they hold.
    """
    waiting, seen, found = [value], dict[int, Any](), list[torch.Tensor]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen[id(each)] = each  # held, so that no other object gets its id
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif not (isinstance(each, nn.Module) and is_known(each)):
            waiting += parts_of(each)
    return found


def share_storage(parameter: nn.Parameter, memo: dict[int, Any]) -> None:
    """Have a deep copy with this memo take another parameter on the same storage, and views of it for its views."""
    memo[id(parameter)] = new = nn.Parameter(parameter.detach(), parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    storage = parameter.untyped_storage()
    memo.setdefault("torch", {})[storage._cdata] = storage  # type: ignore[call-overload]


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a function runs when a parameter gets its gradient. No copy of a parameter has it."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has made something of a module itself."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
