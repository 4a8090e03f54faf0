"""Models that processes share: among how many, and the plans by the names of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel


class Sizes(NamedTuple):
    """Among how many processes a load shares what: tensors, experts, batches, stages of a pipeline."""

    tensors: int
    experts: int
    batches: int
    stages: int


def sizes(config: Any) -> Sizes:
    """What a `DistributedConfig` asks for, or a mapping that says one, or None."""

    def size(name: str) -> int:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return int(value) if value else 1

    return Sizes(size("tp_size"), size("ep_size"), size("fsdp_size") * size("dp_replicate_size"), size("pp_size"))


def in_plan(name: str) -> str:
    """What plans call a module or parameter: with `*` for the numbers in its name."""
    return str(tensor_parallel.replace_layer_number_by_wildcard(name))  # type: ignore[attr-defined]


def set_plans(model: PreTrainedModel, tensors: dict[str, str], experts: dict[str, str] | None) -> None:
    """Give a model its plans."""
    model._tp_plan = tensors
    if experts is not None:
        model._ep_plan = experts


def unsplit_class(module: nn.Module) -> type[Any]:
    """The class of a module, without what `fully_shard` has made of it."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else cls
