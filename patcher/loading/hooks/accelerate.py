"""What stands at the place where accelerate reads a checkpoint into a model that is already built.

`load_checkpoint_in_model` with a device map writes tensor by tensor, by the names that the model has: no hook of a
module is asked. Users bind it before anything is hooked, so the hook is in what it calls, which isn't given the model:
that is looked up in its frame, as the parameter of this name, which is checked to be there.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from patcher.compat.hooks import Stock
from patcher.compat.models import state_tensors
from patcher.errors import InvalidPatcherError, calling_frame
from patcher.loading.traced_layouts import layouts_in
from patcher.patterns import compress


def read_checkpoint(stock: Stock, checkpoint_file: Any, device_map: Any = None, **kwargs: Any) -> Any:
    """Refuse a checkpoint in the layout of transformers for a model that has another one.

    Without a device map it goes through `load_state_dict`, which takes either.

    Raises:
        InvalidPatcherError: with what to write instead.
    """
    tensors = stock(checkpoint_file, device_map=device_map, **kwargs)
    caller = calling_frame(("patcher.",))
    if device_map is None or caller.f_code.co_name != "load_checkpoint_in_model":
        return tensors
    model: nn.Module = caller.f_locals["model"]
    if not layouts_in(model):
        return tensors
    if others := sorted(tensors.keys() - state_tensors(model).keys()):
        raise InvalidPatcherError(
            f"{checkpoint_file} is in the layout of transformers, and load_checkpoint_in_model with device_map= goes "
            f"by the names of the model, which has no {compress(others)[0]}. Load it with from_pretrained(..., "
            "patcher=..., device_map=...), which converts and dispatches."
        )
    return tensors
