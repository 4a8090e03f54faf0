"""What transformers is asked to split over processes, and what a split model holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

#: The sizes of a `DistributedConfig` that decide how a parameter is split. A size of 1 splits nothing.
_DATA_PARALLEL = ("fsdp_size", "dp_replicate_size")
_OTHERS = ("tp_size", "ep_size", "pp_size")


def other_parallelism(options: Mapping[str, Any]) -> list[str]:
    """What a load is asked for besides data parallelism that splits the model over processes, as it is written."""
    asked = [name for name in ("tp_plan", "tp_size", "device_mesh") if _is_asked(options.get(name))]
    config = options.get("distributed_config")
    if config is None:
        return asked
    if not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        return [*asked, "distributed_config"]
    sizes = config if isinstance(config, Mapping) else vars(config)
    found = [name for name in _OTHERS if (sizes.get(name) or 1) > 1]
    if sizes.get("tp_plan") and not sizes.get("tp_size"):
        found.append("tp_plan")
    if sizes.get("enable_expert_parallel"):
        found.append("enable_expert_parallel")
    return [*asked, *(f"distributed_config of {name}" for name in found)]


def gathers_for_saving(model: Any) -> bool:
    """Whether transformers itself puts the pieces of a model together when it saves that: it has split it."""
    config = getattr(model.config, "distributed_config", None)
    return config is not None and any((getattr(config, name, None) or 1) > 1 for name in (*_DATA_PARALLEL, *_OTHERS))


def unsplit_class(module: nn.Module) -> type[Any]:
    """The class of a module, without what `fully_shard` has made of it."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else cls


def unsplit_config(config: PretrainedConfig) -> PretrainedConfig:
    """A config that says nothing of how a model was split."""
    if getattr(config, "distributed_config", None) is None:
        return config
    found = copy.copy(config)
    del found.distributed_config
    return found


def _is_asked(value: Any) -> bool:
    return value is not None and value != 1
