"""The seam where transformers saves a model: the files are those of the stock model.

transformers writes its state dict unconverted, and is given the finished checkpoint at the last place before it is
split into shards. So gathering, ties and quantizers are left to transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import PreTrainedModel

from patcher.checkpoints.headers import VARIANT
from patcher.compat.models import has_adapters, named_as, stock_class
from patcher.compat.seams import Stock, not_called, seam
from patcher.errors import InvalidPatcherError
from patcher.fusions.config import names_fusions, with_fusion_names
from patcher.layouts.carried import carriers, fused_modules
from patcher.layouts.transforms import converts
from patcher.loading.integration import integrations
from patcher.loading.layout_on_disk import check_save_options, remove_stale_weights, remove_weights
from patcher.loading.new_weights import metadata_with_new_weights, new_weights, sort_metadata
from patcher.loading.record import joined_record
from patcher.loading.saving import OffloadedCheckpoint, SavePlan, plan_saving


@dataclass(eq=False)
class _Save:
    """The save in this thread."""

    plan: SavePlan
    #: name in the checkpoint -> parameter, of the weights that a patcher has declared as new
    new: Mapping[str, str]
    #: whether transformers was given the checkpoint
    is_used: bool = False


_SAVE: ContextVar[_Save | None] = ContextVar("patcher_save", default=None)


@seam(
    "transformers.modeling_utils:PreTrainedModel.save_pretrained",
    *("save_directory", "is_main_process", "state_dict", "push_to_hub", "variant"),
    *("save_original_format", "distributed_checkpoint"),
)
def save_pretrained(stock: Stock, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(stock).bind(self, *args, **kwargs)
    bound.apply_defaults()
    arguments, record = bound.arguments, joined_record(self)
    if has_adapters(self):  # then transformers saves only these
        return stock(self, *args, **kwargs)
    if arguments["distributed_checkpoint"] and (
        fused_modules(self) or (record is not None and any(map(converts, record.patchers)))
    ):
        raise InvalidPatcherError(
            "distributed_checkpoint=True writes the parameters as they are in memory, and those of a patched model "
            f"aren't those of a checkpoint of {stock_class(self).__name__}. Leave it out."
        )
    save = None
    if record is not None or names_fusions(self.config) or carriers(self):
        plan = plan_saving(self, arguments["state_dict"], arguments["save_original_format"])
        new = new_weights(self, plan if plan.original_format else None, declared=False)
        save = _Save(plan, new if plan.original_format else dict.fromkeys(new.values(), ""))
        arguments["save_original_format"] = False
    in_layout = save is not None and bool(save.plan.fusions)
    check_save_options(arguments["variant"], is_pushed=bool(arguments["push_to_hub"]), in_layout=in_layout)
    if in_layout:
        arguments["variant"] = VARIANT
    with ExitStack() as stack:
        stack.callback(_SAVE.reset, _SAVE.set(save))
        for integration in integrations():
            stack.enter_context(integration.on_saved(self, arguments))
        if save is not None:
            stack.enter_context(_config_of_plan(save.plan))
            arguments["self"] = named_as(self, stock_class(self))
        result = stock(*bound.args, **bound.kwargs)
    folder = Path(arguments["save_directory"])
    is_writer = arguments["is_main_process"] and (not distributed.is_initialized() or distributed.get_rank() == 0)
    # transformers only logs an error if the folder is a file.
    if arguments["distributed_checkpoint"] or not folder.is_dir() or not is_writer:
        return result
    if save is not None and not save.is_used:
        remove_weights(folder)
        raise not_called("remove_tied_weights_from_state_dict")
    remove_stale_weights(folder, in_layout=in_layout)
    return result


@seam("transformers.modeling_utils:remove_tied_weights_from_state_dict", "state_dict", "model")
def weights_to_save(stock: Stock, state_dict: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the finished checkpoint, which transformers writes to files."""
    result, save = stock(state_dict, model, *args, **kwargs), _SAVE.get()
    if save is None or vars(save.plan.model) is not vars(model):
        return result
    save.is_used = True
    if not save.plan.original_format:
        return save.plan.in_runtime_layout(result)
    if {"cpu", "disk"} & set(getattr(model, "hf_device_map", {}).values()):  # it is saved shard by shard
        return OffloadedCheckpoint(save.plan, result)
    return save.plan.saved_state_dict(result)


@seam("transformers.modeling_utils:safe_save_file", "tensors", "filename", "metadata")
def write_file(stock: Stock, tensors: Any, filename: Any, metadata: Any = None) -> Any:
    """Name the new weights of a file in its metadata."""
    save = _SAVE.get()
    if save is None or not save.new.keys() & tensors.keys():
        return stock(tensors, filename, metadata=metadata)
    stock(tensors, filename, metadata=metadata_with_new_weights(metadata, save.new, tensors, save.plan.model))
    sort_metadata(filename)
    return None


@contextmanager
def _config_of_plan(plan: SavePlan) -> Iterator[None]:
    """Name the fusions of a plan in the config during a save: a config from elsewhere may name others."""
    config: Any = plan.model.config
    before = config.__dict__.get("fusion_config")
    after = with_fusion_names(before, plan.fusions)
    if after == (before or {}):
        yield
        return

    def assign(value: Any) -> None:
        if value is not None:
            config.fusion_config = value
        else:
            config.__dict__.pop("fusion_config", None)

    assign(after or None)
    try:
        yield
    finally:
        assign(before)
