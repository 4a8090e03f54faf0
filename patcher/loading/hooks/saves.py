"""What stands at the places where transformers saves: a model, its config, files of weights, an upload."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import distributed, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.checkpoints.weight_files import VARIANT
from patcher.compat.hooks import Stock, not_called
from patcher.compat.models import has_adapters, is_saved_as_offloaded
from patcher.compat.parallel import gathers_for_saving
from patcher.conversions.either_layout import modules_with_layouts
from patcher.conversions.fused_weights import fused_modules
from patcher.conversions.selection import converts
from patcher.conversions.sharded import gathered_on_first
from patcher.errors import InvalidPatcherError
from patcher.fusions.config import names_fusions, with_fusion_names
from patcher.loading.adapters.saving import stock_configs
from patcher.loading.layout_on_disk import check_upload, check_variant, remove_others
from patcher.loading.offloaded_weights import OffloadedWeights
from patcher.loading.parallel.dealt_experts import counting_all_experts, with_all_experts
from patcher.loading.record import record_of
from patcher.loading.saving import SavePlan, plan_saving, saved_state_dict

#: What this thread is saving, and how.
SAVING: ContextVar[SavePlan | None] = ContextVar("patcher_saving", default=None)
#: Its weights, if it is saved shard by shard because some of them are on the disk.
OFFLOADED: ContextVar[OffloadedWeights | None] = ContextVar("patcher_offloaded", default=None)
#: The names of the files of weights that the save in this thread has written so far.
_WRITTEN: ContextVar[set[str] | None] = ContextVar("patcher_written", default=None)
#: Whether transformers has asked for the original weights of what it saves.
_GIVEN_BACK: ContextVar[bool] = ContextVar("patcher_given_back", default=False)


def save_pretrained(stock: Stock, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    arguments = inspect.signature(stock).bind(self, *args, **kwargs)
    arguments.apply_defaults()
    given = arguments.arguments
    plan, record = None, record_of(self)
    if given["distributed_checkpoint"] and (
        fused_modules(self) or (record is not None and any(map(converts, record.patchers)))
    ):
        name = type(self) if record is None else record.model_class
        raise InvalidPatcherError(
            "distributed_checkpoint=True writes the parameters as they lie in memory, and those of a patched model "
            f"don't lie as in the checkpoint of {name.__name__}. Leave it out."
        )
    is_gathered = False
    if record is not None or names_fusions(self.config) or modules_with_layouts(self):
        plan = plan_saving(self, given["state_dict"], given["save_original_format"])
        if not gathers_for_saving(self) and not has_adapters(self):
            state_dict = self.state_dict() if given["state_dict"] is None else given["state_dict"]
            if is_gathered := any(isinstance(value, DTensor) for value in state_dict.values()):
                given["state_dict"] = gathered_on_first(state_dict)
    in_layout = plan is not None and bool(plan.fusions)
    check_variant(given["variant"], in_layout=in_layout)
    if in_layout:
        given["variant"] = VARIANT
    written: set[str] = set()
    with ExitStack() as stack:
        for variable, value in ((SAVING, plan), (OFFLOADED, None), (_WRITTEN, written), (_GIVEN_BACK, False)):
            stack.callback(variable.reset, variable.set(value))  # type: ignore[arg-type]
        stack.enter_context(counting_all_experts(self))
        if has_adapters(self):
            stack.enter_context(stock_configs(self))
        result = stock(*arguments.args, **arguments.kwargs)
    remove_others(given["save_directory"], written)
    if is_gathered:  # as transformers waits for what it has gathered itself
        distributed.barrier()
    return result


def gather(stock: Stock, self: Any, model_to_save: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather what the processes of a model share; also experts, which transformers knows as parts of one tensor."""
    return stock(self, model_to_save, with_all_experts(model_to_save, state_dict), *args, **kwargs)


def weights_to_save(stock: Stock, state_dict: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """What transformers makes shards of: of offloaded models it reads one shard after the other, and reverses that."""
    found, plan = stock(state_dict, model, *args, **kwargs), SAVING.get()
    if plan is None or plan.model is not model:
        return found
    if not plan.original_format:
        return plan.in_runtime_layout(found)
    if has_adapters(model) or not is_saved_as_offloaded(model):
        return found
    weights = OffloadedWeights(plan, found)
    OFFLOADED.set(weights)
    return weights.in_stock_layout


def read_offloaded_weight(stock: Stock, model: Any, param_name: str, *args: Any, **kwargs: Any) -> Any:
    weights = OFFLOADED.get()

    def read(name: str) -> Any:
        return stock(model, name, *args, **kwargs)

    return read(param_name) if weights is None else weights.read(param_name, read)


def write_weights(stock: Stock, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    plan = SAVING.get()
    if plan is not None and plan.original_format and not has_adapters(plan.model) and not _GIVEN_BACK.get():
        raise not_called("give back")
    result = stock(tensors, filename, *args, **kwargs)
    if (written := _WRITTEN.get()) is not None:
        written.add(Path(filename).name)
    return result


def upload(stock: Stock, self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(stock).bind(self, working_dir, repo_id, *args, **kwargs).arguments
    check_upload(_WRITTEN.get() or (), repo_id, {"token": given.get("token")})
    return stock(self, working_dir, repo_id, *args, **kwargs)


def save_config(stock: Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    plan = SAVING.get()
    if plan is None or plan.model.config is not self:
        return stock(self, *args, **kwargs)
    record = plan.record
    if record is not None:
        self.architectures = [record.model_class.__name__]
    # Names stand in the file if the weights beside it lie so: a config that was read from elsewhere may say otherwise.
    before = self.__dict__.get("fusion_config")
    after = with_fusion_names(before, plan.fusions)
    if after == (before or {}):
        return stock(self, *args, **kwargs)
    self.fusion_config = after
    try:
        if not after:
            del self.fusion_config
        return stock(self, *args, **kwargs)
    finally:
        if before is None:
            del self.fusion_config
        else:
            self.fusion_config = before


def revert(stock: Stock, model: nn.Module, state_dict: dict[str, Any]) -> Any:
    plan, offloaded = SAVING.get(), OFFLOADED.get()
    if plan is not None and plan.model is model:
        _GIVEN_BACK.set(True)
    if offloaded is not None and offloaded.plan.model is model:
        return offloaded.original(state_dict)
    if record_of(model) is None and not modules_with_layouts(model):
        return stock(model, state_dict)
    if plan is not None and plan.model is model:
        return plan.saved_state_dict(state_dict)
    return saved_state_dict(model, state_dict)  # type: ignore[arg-type]
