"""Weight transforms as values: transformers gives them no equality of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, WeightTransform

from patcher.compat.conversions import source_patterns, target_patterns, transform_settings
from patcher.layouts.layouts import Layout


def identity(transform: WeightTransform) -> tuple[Any, ...]:
    """What two transforms that do the same have in common: weight transforms have no equality of their own."""
    return (type(transform), _frozen(transform_settings(transform)))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted(((str(key), _frozen(item)) for key, item in value.items()), key=lambda pair: pair[0]))
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_frozen(item) for item in value)
    if isinstance(value, ConversionOps):
        return (type(value), _frozen(vars(value)))
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().cpu().flatten().tolist().__repr__())
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def conversions_of(cls: type) -> tuple[WeightTransform, ...]:
    """What a replacement class brings: its attribute `conversion_mapping`, as layout classes of transformers do."""
    given = getattr(cls, "conversion_mapping", ())
    return (given,) if isinstance(given, WeightTransform) else tuple(given)


def describe(transform: WeightTransform | Layout) -> str:
    """One line: `q_proj, k_proj, v_proj -> qkv_proj [Concatenate(dim=0)]`."""
    if isinstance(transform, Layout):
        return str(transform)
    arrow = f"{', '.join(source_patterns(transform))} -> {', '.join(target_patterns(transform))}"
    operations = getattr(transform, "operations", None)
    return f"{arrow} [{', '.join(map(repr, operations))}]" if operations else f"{arrow} [rename]"


def is_concatenation(transform: Any) -> bool:
    """Whether the transform does nothing but concatenate, so that each tensor keeps its shape."""
    operations = getattr(transform, "operations", ())
    return bool(operations) and all(isinstance(operation, Concatenate) for operation in operations)


def has_known_operations(transform: WeightTransform) -> bool:
    """Whether all its operations are of transformers or this package: these depend on no values."""
    return all(
        type(operation).__module__.startswith(("transformers.", "patcher."))
        for operation in getattr(transform, "operations", ())
    )


def single(value: Any) -> Any:
    """The tensor, of one that transformers may have handed on in a list."""
    return value[0] if isinstance(value, list) else value


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else lies in the storage of a tensor; on the meta device nothing lies anywhere."""
    return tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a storage of its own, in the same memory.

    Pieces of one tensor share its storage, and what shares a storage is saved into one shard.
    """
    if is_alone(tensor):
        return tensor
    try:
        return torch.utils.dlpack.from_dlpack(tensor.detach())
    except (BufferError, RuntimeError, TypeError):  # a device or a type that can't be exchanged
        return tensor.clone()
