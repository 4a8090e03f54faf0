"""Tensors that are split over processes: gathered, and distributed like another one.

Both are collective: every process of the mesh has to call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from patcher.compat.models import DisableTorchFunction, named_modules
from patcher.errors import InvalidPatcherError, PatchConflictError
from patcher.expressions import cut


class Copied(DTensor):
    """Rows gathered from several processes, read-only: writing to them wouldn't write to a parameter."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise PatchConflictError(
                "These rows were put together of what several processes have, so they can't be written. Write to the "
                "parameter that holds them, or load the model without fusions."
            )
        with DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        is_same = name == "detach" or func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
        if is_same and type(result) is DTensor:
            result.__class__ = cls
        return result


def reshard_modules(model: nn.Module) -> None:
    """Reshard the modules of FSDP2: the last forward may have left them unsharded."""
    for _, module in named_modules(model):
        if isinstance(module, FSDPModule):
            module.reshard()


def check_module(model: Any) -> None:
    """Raise for what isn't a module, such as the name of a repo."""
    if not isinstance(model, nn.Module):
        raise InvalidPatcherError(
            f"The model must be an nn.Module, found {cut(repr(model))} ({type(model).__name__})."
        )


def check_not_flat(model: nn.Module) -> None:
    """Raise for a model whose parameters FSDP1 has flattened: their names and shapes are lost."""
    check_module(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise InvalidPatcherError(
            "FullyShardedDataParallel flattens parameters, so those of transformers can't be separated. Use "
            "torch.distributed.fsdp.fully_shard instead."
        )


def full_tensor(value: Any) -> Any:
    """Gather a DTensor; return any other value as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def distribute_like(value: torch.Tensor, other: Any) -> torch.Tensor:
    """Distribute a tensor as another one of its shape, with the values of the first process of each mesh."""
    if not isinstance(other, DTensor) or isinstance(value, DTensor):
        return value
    device = value.device if other.device.type == "meta" else other.device
    return distribute_tensor(value.detach().to(device), other.device_mesh, other.placements)


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the shard of a DTensor in this process; any other tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def to_meta(value: torch.Tensor) -> torch.Tensor:
    """Return a full tensor on the meta device; a tensor of a quantizer's own type as it is."""
    if type(local_tensor(value)) not in (torch.Tensor, nn.Parameter):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def gather_on_rank_zero(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Gather a state dict, and what shares memory in it, on the CPU of the first process; the others return {}."""
    is_first = distributed.get_rank() == 0
    gathered: dict[Any, torch.Tensor] = {}
    result: dict[str, Any] = {}
    for key, value in state_dict.items():
        if not isinstance(value, DTensor):
            result[key] = value
            continue
        local = value.to_local()
        place = (local.data_ptr(), value.shape, value.dtype) if local.numel() else key
        if place not in gathered:
            tensor = value.full_tensor()
            gathered[place] = tensor.cpu() if is_first else tensor.new_empty(0)
        result[key] = gathered[place]
    return result if is_first else {}
