"""`Trainer`, where it takes up a run again: the shards of a model, the state of its optimizer.

A model in one file it gives to `load_state_dict`, which needs nothing of this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import ModelView, named_parameters, state_tensors, ties
from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import PatchedWeightsError
from patcher.loading.integration import Integration, register
from patcher.loading.record import record_of
from patcher.loading.saving import saved_state_dict
from patcher.loading.state_dicts import patched_models
from patcher.loading.stock_view import carriers_in, stock_view
from patcher.patterns import compress, inside
from patcher.resolution.resolution import skeleton

#: Beside the state of an optimizer, which knows its parameters by their places only: what these were.
PARAMETERS_FILE = "patcher_optimizer.json"


@seam("transformers.trainer_utils:load_sharded_checkpoint", "model", "folder", "strict", follow=True)
def load_shards(stock: Stock, model: Any, folder: Any, strict: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Load shards, and say truly what was missing: transformers compares their names with those of the model itself.

    Raises:
        RuntimeError: with strict=True, of keys that are missing or unexpected, after the others are loaded.
    """
    if not isinstance(model, PreTrainedModel) or (record_of(model) is None and not carriers_in(model)):
        return stock(model, folder, strict, *args, **kwargs)
    layouts = _layouts_of_names(model)
    known = dict.fromkeys(name for names in layouts for name in names)
    found = stock(ModelView(model, state_dict=lambda: known), folder, False, *args, **kwargs)
    absent = set(found.missing_keys)
    missing = min(([name for name in names if name in absent] for names in layouts), key=len)
    if strict and (missing or found.unexpected_keys):
        lines = [
            f"{head} key(s): {', '.join(compress(keys))}."
            for head, keys in (("Missing", missing), ("Unexpected", found.unexpected_keys))
            if keys
        ]
        raise RuntimeError("\n".join((f"Error(s) in loading state_dict for {type(model).__name__}", *lines)))
    return type(found)(missing, found.unexpected_keys)


def _layouts_of_names(model: PreTrainedModel) -> list[list[str]]:
    """The names that shards may have: those of the checkpoint, of the parameters of transformers, of its own."""
    own = state_tensors(model)
    layouts = [[*own], [*stock_view(model).tensors]]
    with suppress(PatchedWeightsError):  # of weights that can't be restored, so they are in no checkpoint either
        layouts.insert(0, [*saved_state_dict(model, {name: value.to("meta") for name, value in own.items()})])
    tied = ties(model)
    return [[name for name in names if name not in tied] for names in layouts]


@seam("transformers.trainer:Trainer._save_optimizer_and_scheduler", "output_dir")
def save_optimizer(stock: Stock, self: Any, output_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Note beside the optimizer of a patched model which parameters its state belongs to."""
    result = stock(self, output_dir, *args, **kwargs)
    if self.args.should_save:
        file = Path(output_dir, PARAMETERS_FILE)
        if carriers_in(self.model) or any(record_of(part) is not None for part in self.model.modules()):
            file.write_text(json.dumps({"parameters": _trained(self.model)}, indent=2), encoding="utf-8")
        else:
            file.unlink(missing_ok=True)  # of another run
    return result


@seam("transformers.trainer:Trainer._load_optimizer_and_scheduler", "checkpoint")
def load_optimizer(stock: Stock, self: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse the state of an optimizer whose parameters lay otherwise.

    torch compares how many there are, and some of its kernels go by their memory alone.

    Raises:
        PatchedWeightsError: the run was another patcher's, or a stock one.
    """
    if checkpoint is not None and any(
        path.name.startswith(("optimizer", "global_step")) for path in Path(checkpoint).iterdir()
    ):
        _check_parameters(self.model, Path(checkpoint))
    return stock(self, checkpoint, *args, **kwargs)


def _check_parameters(model: nn.Module, checkpoint: Path) -> None:
    here = _trained(model)
    noted = checkpoint / PARAMETERS_FILE
    there = json.loads(noted.read_text("utf-8"))["parameters"] if noted.exists() else _as_in_transformers(model, here)
    if list(there.items()) == list(here.items()):
        return
    pairs = enumerate(zip_longest(there.items(), here.items(), fillvalue=("nothing", "")), start=1)
    number, differing = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    was, now = (f"{name} ({made})" if made else name for name, made in differing)
    raise PatchedWeightsError(
        f"The state of the optimizer in {checkpoint} is stored by position, and belongs to other parameters: number "
        f"{number} is {was} there, and {now} here.\n"
        "Load the model with the patcher of that run, without one if it had none. Or begin with a new "
        f'optimizer: load the weights with from_pretrained("{checkpoint}", patcher=...), and call train() without '
        "resume_from_checkpoint=."
    )


def _as_in_transformers(model: nn.Module, here: Mapping[str, str]) -> dict[str, str]:
    """What a run of the stock model would have trained of what this one trains; adapters are taken as they are."""
    layouts = [layout for each in carriers_in(model) for layout in each.all]
    there = {name for layout in layouts if not here.keys().isdisjoint(layout.fused) for name in layout.stock}
    as_they_are = dict.fromkeys((name for name, how in here.items() if not how), "")
    names = [
        f"{inside(path)}{name}"
        for path, part, record in patched_models(model)
        for name, _ in named_parameters(skeleton(record.model_class, part.config))
    ]
    return dict.fromkeys((name for name in names if name in as_they_are.keys() | there), "") | as_they_are


def _trained(model: nn.Module) -> dict[str, str]:
    """The parameters that are trained, in their order, and how those of another layout were made."""
    made = {
        f"{inside(path)}{name}": str(layout)
        for path, _, carried in carriers_in(model)
        for layout in carried.all
        for name in layout.fused
    }
    return {name: made.get(name, "") for name, value in model.named_parameters() if value.requires_grad}


register(Integration("trainer", seams_in(__name__)))
