"""accelerate: loading a checkpoint into an existing model, and device maps by the names of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from patcher.checkpoints.headers import headers_of
from patcher.compat.models import named_modules, state_tensors
from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import InvalidPatcherError
from patcher.loading.integration import Integration, register
from patcher.loading.load import Constructed
from patcher.loading.state_dicts import carriers_in, check_no_part_named, parts_of
from patcher.patterns import compress, inside


@seam("accelerate.utils.modeling:load_checkpoint_in_model", "model", "checkpoint", follow=True)
def load_checkpoint(stock: Stock, model: nn.Module, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a checkpoint in the stock layout: accelerate assigns tensors by the model's names.

    Raises:
        InvalidPatcherError: if there is such a checkpoint; the message has what to write instead.
    """
    if carriers_in(model) and (others := sorted(headers_of(checkpoint).tensors.keys() - state_tensors(model).keys())):
        raise InvalidPatcherError(
            f"{checkpoint} is in the layout of transformers, and load_checkpoint_in_model of accelerate goes by the "
            f"names of the model, which has no {compress(others)[0]}. Load it with from_pretrained(..., patcher=..., "
            "device_map=...), which converts and dispatches."
        )
    return stock(model, checkpoint, *args, **kwargs)


def check_device_map(load: Constructed) -> None:
    """Refuse a map that names parts of joined layers: accelerate moves modules, which these aren't.

    Raises:
        InvalidPatcherError: if it does; the message has the names to write instead.
    """
    device_map = load.options.get("device_map")
    if not isinstance(device_map, Mapping):
        return
    known = {path for path, _ in named_modules(load.model)} | {*state_tensors(load.model)}
    if unknown := device_map.keys() - known - {name for name, _ in load.model.named_buffers()}:
        parts, prefixes = parts_of(load), tuple(map(inside, unknown))
        check_no_part_named("device_map", {name for name in parts if f"{name}.".startswith(prefixes)}, parts)


register(Integration("accelerate", seams_in(__name__), on_constructed=check_device_map))
