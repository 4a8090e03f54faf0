"""A copy of a model on the same weights: what `Patcher.apply` changes, so that the given model stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.copies import has_gradient_hooks, is_compiled, share_storage
from patcher.compat.models import named_modules, named_parameters
from patcher.compat.recorders import forget_recorded
from patcher.errors import InvalidPatcherError
from patcher.patterns import inside


def cannot(what: str, instead: str) -> InvalidPatcherError:
    return InvalidPatcherError(f"Patcher.apply can't take {what}. {instead}")


def check_can_be_copied(model: Any) -> None:
    """Raise for what a copy would lack, or would share with the given model although the two must not.

    Raises:
        InvalidPatcherError: it names what it is and where, and what to do instead.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidPatcherError(
            f"Patcher.apply takes a model of transformers, found {type(model).__name__}; "
            "take the model out of its wrapper."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise cannot("a quantized model: its weights can't be restored", "Load it again with patcher=...")
    for name, parameter in named_parameters(model):
        if isinstance(parameter, DTensor):
            raise cannot(
                f"a model that is split over processes ({name})",
                "Save it with save_pretrained, and load that with patcher=...",
            )
        if parameter.is_meta:
            raise cannot("a model whose weights are offloaded", "Load it again with patcher=..., device_map=...")
        if has_gradient_hooks(parameter):
            raise cannot(f"a hook on the gradient of {name}: a copy has other gradients", "Register it on the result.")
    own = {id(parameter): name for name, parameter in named_parameters(model)}
    own |= {id(module): path or "the model" for path, module in named_modules(model)}
    for path, module in named_modules(model):
        if hasattr(module, "_hf_hook"):
            raise cannot(
                f"a model that accelerate has spread over devices ({own[id(module)]})",
                "Load it again with patcher=..., device_map=...",
            )
        if is_compiled(module):
            raise cannot(f"what is compiled ({own[id(module)]})", "Compile the result instead.")
        for name, value in vars(module).items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if held := next((own[id(held)] for held in _closed_over(each) if id(held) in own), None):
                    raise cannot(
                        f"{inside(path)}{name}: a function has {held} in its closure, and a copy would go on using "
                        "that of the given model",
                        "Bind it to its module with types.MethodType(function, module), or apply the patcher first.",
                    )


def _closed_over(value: Any, depth: int = 0) -> Iterator[Any]:
    """What a function holds in its closure, as do functions in that. A copy of a function has the same closure."""
    value = getattr(value, "__func__", value.func if isinstance(value, partial) else value)
    if isinstance(value, FunctionType) and depth < 5:
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                held = cell.cell_contents
                yield getattr(held, "__self__", held)
                yield from _closed_over(held, depth + 1)


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with parameters of its own on the same storage, and buffers of its own.

    Raises:
        InvalidPatcherError: something that the model holds can't be copied.
    """
    memo: dict[int, Any] = {}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    for each in [*model.parameters(), *attributes]:
        if type(each) is nn.Parameter and id(each) not in memo:
            share_storage(each, memo)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise cannot(
            f"a model that can't be copied ({type(error).__name__}: {error})",
            "Take off what was added to it, or load it again with patcher=...",
        ) from error
    for _, module in named_modules(copied):
        forget_recorded(module)  # the hooks are installed anew, on what the modules are then
    return copied
