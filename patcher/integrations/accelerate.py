"""accelerate: reading a checkpoint into a model that is there, and maps of devices by the names of modules."""

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
from patcher.loading.stock_view import carriers_in, check_no_part_is_named, parts_of
from patcher.patterns import compress, inside


@seam("accelerate.utils.modeling:load_checkpoint_in_model", "model", "checkpoint", "device_map", follow=True)
def load_checkpoint(
    stock: Stock, model: nn.Module, checkpoint: Any, device_map: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a checkpoint in the layout of transformers with a device map: it is written by the names of the model.

    Without a device map it goes through `load_state_dict`, which takes either layout.

    Raises:
        InvalidPatcherError: with what to write instead.
    """
    if (
        device_map is not None
        and carriers_in(model)
        and (others := sorted(headers_of(checkpoint).tensors.keys() - state_tensors(model).keys()))
    ):
        raise InvalidPatcherError(
            f"{checkpoint} is in the layout of transformers, and load_checkpoint_in_model with device_map= goes by "
            f"the names of the model, which has no {compress(others)[0]}. Load it with from_pretrained(..., "
            "patcher=..., device_map=...), which converts and dispatches."
        )
    return stock(model, checkpoint, device_map, *args, **kwargs)


def check_device_map(load: Constructed) -> None:
    """Refuse a map that names parts of joined layers: accelerate moves modules, and of these there are none.

    Raises:
        InvalidPatcherError: with the names to write in their place.
    """
    given = load.options.get("device_map")
    if not isinstance(given, Mapping):
        return
    known = {path for path, _ in named_modules(load.model)} | {*state_tensors(load.model)}
    if unknown := given.keys() - known - {name for name, _ in load.model.named_buffers()}:
        parts, places = parts_of(load), tuple(map(inside, unknown))
        check_no_part_is_named("device_map", {name for name in parts if f"{name}.".startswith(places)}, parts)


register(Integration("accelerate", seams_in(__name__), on_constructed=check_device_map))
