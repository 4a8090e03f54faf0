"""Models that processes share: what a load asks for, the plans by the names of modules, what a shared model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel

#: Styles that give each process an equal share of the outputs, and keep it there.
OUTPUTS = ("colwise", "packed_colwise")
#: Styles that give each process an equal share of the inputs; the results are summed.
INPUTS = ("rowwise", "packed_rowwise")
#: Styles that give each process a share of the outputs, which are gathered then.
GATHERED = ("colwise_gather_output", "colwise_rep")
#: The style of a module of experts whose results are summed.
SUMMED_EXPERTS = "moe_tp_experts"


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


def deals_experts_by_plan(config: Any) -> bool:
    """Whether experts are dealt to processes by a plan that takes the place of that of tensor parallelism.

    So did releases before 5.19.
    """
    return bool(getattr(config, "enable_expert_parallel", False)) and not hasattr(config, "ep_size")


def tensor_plan(model: PreTrainedModel, config: Any) -> dict[str, str]:
    """Module or parameter, with `*` for numbers -> how it is shared, as a load goes by it."""
    asked = config.tp_plan
    if not isinstance(asked, dict):
        return dict(model.tp_plan or {})
    return dict(asked) if replaces_plan(config) else {**model.tp_plan, **asked}


def replaces_plan(config: Any) -> bool:
    """Whether a plan takes the place of that of the model: one without rules; before 5.19 every one that is given."""
    return not config.tp_plan or not hasattr(config, "ep_size")


def expert_plan(model: PreTrainedModel, config: Any) -> dict[str, str]:
    """The same for experts that are dealt to processes."""
    return {**(getattr(model, "ep_plan", None) or {}), **(getattr(config, "ep_plan", None) or {})}


def set_plans(model: PreTrainedModel, tensors: dict[str, str], experts: dict[str, str] | None) -> None:
    """Give a model its plans."""
    model._tp_plan = tensors
    if experts is not None:
        model._ep_plan = experts


def gathers_for_saving(model: Any) -> bool:
    """Whether transformers itself puts the pieces of a model together when it saves that: it has split it."""
    config = getattr(model.config, "distributed_config", None)
    return config is not None and max(sizes(config)) > 1


def is_written_here(is_main_process: bool) -> bool:
    """Whether this process writes the files of a save."""
    return is_main_process and (not distributed.is_initialized() or distributed.get_rank() == 0)


def unsplit_class(module: nn.Module) -> type[Any]:
    """The class of a module, without what `fully_shard` has made of it."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else cls
