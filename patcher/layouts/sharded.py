"""Tensors that are split over processes: whole, and as another one is split.

Both are collective: every process of the mesh has to ask, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from patcher.compat.models import DisableTorchFunction, named_modules
from patcher.errors import PatchConflictError


class ReadOnly:
    """A tensor that was put together: writing to it wouldn't write to a parameter."""

    __slots__ = ()
    #: what it is, for the message
    origin: ClassVar[str]

    @classmethod
    def of(cls, value: Any) -> Any:
        """The tensor, as one that can't be written to."""
        return value.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise PatchConflictError(
                f"{cls.origin}, so they can't be written. Write to the parameter that holds them, or load the model "
                "without fusions."
            )
        is_same = name == "detach" or func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
        with DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, tuple | list):
                return type(result)(cls.of(each) if cls.is_view(each, args) else each for each in result)
            return cls.of(result) if is_same or cls.is_view(result, args) else result

    @classmethod
    def is_view(cls, result: Any, args: tuple[Any, ...]) -> bool:
        """Whether what was made shares the memory of what it was made of, as far as it is known."""
        return False


class Copied(ReadOnly, DTensor):
    """Put together of what processes have."""

    __slots__ = ()
    origin = "These rows were put together of what several processes have"

    @classmethod
    def of(cls, value: Any) -> Any:
        if type(value) is DTensor:
            value.__class__ = cls
        return value


class Whole(ReadOnly, torch.Tensor):
    """Put together of the parts of a packed layer."""

    origin = "These rows were put together of the parts of a packed layer"

    @classmethod
    def is_view(cls, result: Any, args: tuple[Any, ...]) -> bool:
        tensors = [each for each in (result, *args[:1]) if isinstance(each, torch.Tensor) and not each.is_meta]
        return len(tensors) == 2 and len({each.untyped_storage().data_ptr() for each in tensors}) == 1


def reshard_modules(model: nn.Module) -> None:
    """Have modules hold pieces that `fully_shard` has split: the last forward may have left them whole."""
    for _, module in named_modules(model):
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: Any) -> Any:
    """All of a tensor, if it is split; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def distribute_like(value: torch.Tensor, other: Any) -> torch.Tensor:
    """A whole tensor, split as another one of its shape is; the values are those of the first process of each mesh."""
    if not isinstance(other, DTensor) or isinstance(value, DTensor):
        return value
    device = value.device if other.device.type == "meta" else other.device
    return distribute_tensor(value.detach().to(device), other.device_mesh, other.placements)


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor, if it is split; a tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def on_meta(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device, whole if it is split; one of a type that a quantizer has made as it is."""
    if type(local_tensor(value)) not in (torch.Tensor, nn.Parameter):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def gather_on_rank_zero(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with whole tensors in the memory of the CPU in the first process, and nothing in the others.

    What shares its memory does so afterwards.
    """
    is_first = distributed.get_rank() == 0
    known: dict[Any, torch.Tensor] = {}
    result: dict[str, Any] = {}
    for key, value in state_dict.items():
        if not isinstance(value, DTensor):
            result[key] = value
            continue
        local = value.to_local()
        place = (local.data_ptr(), value.shape, value.dtype) if local.numel() else key
        if place not in known:
            made = value.full_tensor()
            known[place] = made.cpu() if is_first else made.new_empty(0)
        result[key] = known[place]
    return result if is_first else {}
