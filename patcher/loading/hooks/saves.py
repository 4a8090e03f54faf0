"""The seam where transformers saves a model: what is written is the checkpoint as the stock model would save it.

transformers writes what it is given as it is, and is given the finished checkpoint at the last place before
it cuts shards: so gathering, ties and quantizers are its own, and so are the files.
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
from patcher.loading.record import record_of
from patcher.loading.saving import OffloadedCheckpoint, SavePlan, plan_saving


@dataclass(eq=False)
class _Save:
    """What this thread is saving, and whether transformers has taken it."""

    plan: SavePlan
    #: name in the checkpoint -> parameter, of what a patcher has declared as new
    new: Mapping[str, str]
    is_taken: bool = False


_SAVE: ContextVar[_Save | None] = ContextVar("patcher_save", default=None)


@seam(
    "transformers.modeling_utils:PreTrainedModel.save_pretrained",
    *("save_directory", "is_main_process", "state_dict", "push_to_hub", "variant"),
    *("save_original_format", "distributed_checkpoint"),
)
def save_pretrained(stock: Stock, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    arguments = inspect.signature(stock).bind(self, *args, **kwargs)
    arguments.apply_defaults()
    given, record = arguments.arguments, record_of(self)
    if has_adapters(self):  # of which transformers then saves nothing else
        return stock(self, *args, **kwargs)
    if given["distributed_checkpoint"] and (
        fused_modules(self) or (record is not None and any(map(converts, record.patchers)))
    ):
        raise InvalidPatcherError(
            "distributed_checkpoint=True writes the parameters as they lie in memory, and those of a patched model "
            f"don't lie as in the checkpoint of {stock_class(self).__name__}. Leave it out."
        )
    save = None
    if record is not None or names_fusions(self.config) or carriers(self):
        plan = plan_saving(self, given["state_dict"], given["save_original_format"])
        new = new_weights(self, plan if plan.original_format else None)
        save = _Save(plan, new if plan.original_format else dict.fromkeys(new.values(), ""))
        given["save_original_format"] = False
    in_layout = save is not None and bool(save.plan.fusions)
    check_save_options(given["variant"], is_pushed=bool(given["push_to_hub"]), in_layout=in_layout)
    if in_layout:
        given["variant"] = VARIANT
    with ExitStack() as stack:
        stack.callback(_SAVE.reset, _SAVE.set(save))
        for each in integrations():
            stack.enter_context(each.on_saved(self, given))
        if save is not None:
            stack.enter_context(_named_config(save.plan))
            given["self"] = named_as(self, stock_class(self))
        result = stock(*arguments.args, **arguments.kwargs)
    is_folder = Path(given["save_directory"]).is_dir()  # transformers only logs that it isn't
    is_writer = given["is_main_process"] and (not distributed.is_initialized() or distributed.get_rank() == 0)
    if given["distributed_checkpoint"] or not is_folder or not is_writer:
        return result
    if save is not None and not save.is_taken:
        remove_weights(given["save_directory"])
        raise not_called("remove_tied_weights_from_state_dict")
    remove_stale_weights(given["save_directory"], in_layout=in_layout)
    return result


@seam("transformers.modeling_utils:remove_tied_weights_from_state_dict", "state_dict", "model")
def weights_to_save(stock: Stock, state_dict: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The finished checkpoint, of which transformers makes files."""
    found, save = stock(state_dict, model, *args, **kwargs), _SAVE.get()
    if save is None or vars(save.plan.model) is not vars(model):
        return found
    save.is_taken = True
    if not save.plan.original_format:
        return save.plan.in_runtime_layout(found)
    if {"cpu", "disk"} & set(getattr(model, "hf_device_map", {}).values()):  # it is saved shard by shard
        return OffloadedCheckpoint(save.plan, found)
    return save.plan.saved_state_dict(found)


@seam("transformers.modeling_utils:safe_save_file", "tensors", "filename", "metadata")
def write_file(stock: Stock, tensors: Any, filename: Any, metadata: Any = None) -> Any:
    """Name the new weights in the file that has them."""
    save = _SAVE.get()
    if save is None or not save.new.keys() & tensors.keys():
        return stock(tensors, filename, metadata=metadata)
    stock(tensors, filename, metadata=metadata_with_new_weights(metadata, save.new, tensors, save.plan.model))
    sort_metadata(filename)
    return None


@contextmanager
def _named_config(plan: SavePlan) -> Iterator[None]:
    """Have a config name fusions if the weights beside it lie so: one from elsewhere may say otherwise."""
    config: Any = plan.model.config
    before = config.__dict__.get("fusion_config")
    after = with_fusion_names(before, plan.fusions)
    if after == (before or {}):
        yield
        return
    if after:
        config.fusion_config = after
    elif before is not None:
        del config.fusion_config
    try:
        yield
    finally:
        if before is not None:
            config.fusion_config = before
        else:
            del config.fusion_config
