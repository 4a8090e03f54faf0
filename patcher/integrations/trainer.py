"""`Trainer` when it resumes a run: the shards of a model, the state of its optimizer.

A model in one file goes through `load_state_dict`, which needs none of this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import ModelView, state_tensors, ties
from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import PatchedWeightsError
from patcher.layouts.carried import in_original_layout
from patcher.loading.integration import Integration, register
from patcher.loading.record import record_of
from patcher.loading.saving import saved_state_dict
from patcher.loading.state_dicts import carriers_in, stock_parameter_names, stock_view
from patcher.patterns import compress, in_state_dict

#: The file with the names of an optimizer's parameters, beside its state, which is stored by position only.
PARAMETERS_FILE = "patcher_optimizer.json"


@seam("transformers.trainer_utils:load_sharded_checkpoint", "model", "folder", "strict", follow=True)
def load_shards(stock: Stock, model: Any, folder: Any, strict: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Load shards and report missing keys by layout: transformers compares with the names of the model only.

    Raises:
        RuntimeError: if strict=True and keys are missing or unexpected, after the others have been loaded.
    """
    if not isinstance(model, PreTrainedModel) or (record_of(model) is None and not carriers_in(model)):
        return stock(model, folder, strict, *args, **kwargs)
    layouts = _layouts_of_names(model)
    known = dict.fromkeys(name for names in layouts for name in names)
    keys = stock(ModelView(model, state_dict=lambda: known), folder, False, *args, **kwargs)
    absent = set(keys.missing_keys)
    missing = min(([name for name in names if name in absent] for names in layouts), key=len)
    if strict and (missing or keys.unexpected_keys):
        lines = [
            f"{head} key(s): {', '.join(compress(names))}."
            for head, names in (("Missing", missing), ("Unexpected", keys.unexpected_keys))
            if names
        ]
        raise RuntimeError("\n".join((f"Error(s) in loading state_dict for {type(model).__name__}", *lines)))
    return type(keys)(missing, keys.unexpected_keys)


def _layouts_of_names(model: PreTrainedModel) -> list[list[str]]:
    """Return the names that shards may have: of the checkpoint, of the patched model, of the stock model."""
    tensors = state_tensors(model)
    layouts = [[*tensors], [*stock_view(model).tensors]]
    with suppress(PatchedWeightsError):  # weights that can't be restored, so no checkpoint has them
        layouts.insert(0, [*saved_state_dict(model, {name: value.to("meta") for name, value in tensors.items()})])
    tied = ties(model)
    return [[name for name in names if name not in tied] for names in layouts]


@seam("transformers.trainer:Trainer._save_optimizer_and_scheduler", "output_dir")
def save_optimizer(stock: Stock, self: Any, output_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the parameters of a patched model's optimizer beside its state."""
    result = stock(self, output_dir, *args, **kwargs)
    if self.args.should_save:
        file = Path(output_dir, PARAMETERS_FILE)
        if _is_patched(self.model):
            file.write_text(json.dumps({"parameters": _trained(self.model)}, indent=2), encoding="utf-8")
        else:
            file.unlink(missing_ok=True)  # a stale file of another run
    return result


@seam("transformers.trainer:Trainer._load_optimizer_and_scheduler", "checkpoint")
def load_optimizer(stock: Stock, self: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse the state of an optimizer whose parameters had another layout.

    torch compares only how many parameters there are, and some of its kernels don't compare shapes.

    Raises:
        PatchedWeightsError: if the run had another patcher, or none.
    """
    if checkpoint is not None:
        _check_parameters(self.model, Path(checkpoint))
    return stock(self, checkpoint, *args, **kwargs)


@seam("transformers.trainer:Trainer._load_from_checkpoint", "resume_from_checkpoint")
def load_weights(stock: Stock, self: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the weights in the layout of transformers, in which `Trainer` has saved them.

    The parameters are checked before weights of FSDP are read, of which torch would only name a missing key.
    """
    if self.is_fsdp_enabled:
        _check_parameters(self.model, Path(resume_from_checkpoint))
        return stock(self, resume_from_checkpoint, *args, **kwargs)
    with in_original_layout() if _is_patched(self.model) else nullcontext():
        return stock(self, resume_from_checkpoint, *args, **kwargs)


@seam("transformers.trainer:Trainer._load_best_model")
def load_best_weights(stock: Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the weights of the best checkpoint in that layout."""
    is_split = self.is_fsdp_enabled or self.is_deepspeed_enabled
    with in_original_layout() if _is_patched(self.model) and not is_split else nullcontext():
        return stock(self, *args, **kwargs)


def _is_patched(model: nn.Module) -> bool:
    return bool(carriers_in(model)) or any(record_of(part) is not None for part in model.modules())


def _check_parameters(model: nn.Module, checkpoint: Path) -> None:
    if not any(path.name.startswith(("optimizer", "global_step")) for path in checkpoint.iterdir()):
        return
    current = _trained(model)
    file = checkpoint / PARAMETERS_FILE
    saved = json.loads(file.read_text("utf-8"))["parameters"] if file.exists() else _trained_in_stock(model, current)
    if list(saved.items()) == list(current.items()):
        return
    pairs = enumerate(zip_longest(saved.items(), current.items(), fillvalue=("nothing", "")), start=1)
    number, differing = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    was, now = (f"{name} ({layout})" if layout else name for name, layout in differing)
    restart = (
        f' Or begin with a new optimizer: load the weights with from_pretrained("{checkpoint}", patcher=...), and '
        "call train() without resume_from_checkpoint=."
    )
    raise PatchedWeightsError(
        f"The state of the optimizer in {checkpoint} is stored by position, and belongs to other parameters: number "
        f"{number} is {was} there, and {now} here.\n"
        "Load the model with the patcher of that run, without one if it had none."
        f"{restart if any(checkpoint.glob('*.safetensors')) else ''}"
    )


def _trained_in_stock(model: nn.Module, current: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that a run of the stock model would have trained, and those of adapters as they are."""
    layouts = [layout for carrier in carriers_in(model) for layout in carrier.all]
    parts = {name for layout in layouts if not current.keys().isdisjoint(layout.fused) for name in layout.stock}
    unchanged = dict.fromkeys((name for name, layout in current.items() if not layout), "")
    names = stock_parameter_names(model)
    return dict.fromkeys((name for name in names if name in unchanged.keys() | parts), "") | unchanged


def _trained(model: nn.Module) -> dict[str, str]:
    """Return the parameters that are trained, in their order, with the layouts of those that aren't stock's."""
    layouts = {
        f"{carrier.prefix}{name}": str(layout)
        for carrier in carriers_in(model)
        for layout in carrier.carried.all
        for name in layout.fused
    }
    names = [in_state_dict(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: layouts.get(name, "") for name in names}


register(Integration("trainer", seams_in(__name__)))
