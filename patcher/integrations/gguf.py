"""GGUF files: transformers reads them by the names of the model's parameters, so it gets the stock model."""

from __future__ import annotations

from typing import Any

from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import InvalidPatcherError
from patcher.loading.hooks.loads import current_load
from patcher.loading.integration import Integration, register
from patcher.loading.load import Constructed, has_conversions
from patcher.resolution.resolution import skeleton


@seam("transformers.quantizers.quantizer_gguf:GgufHfQuantizer.get_state_dict", "checkpoint_file", "model")
def get_state_dict(stock: Stock, self: Any, checkpoint_file: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Read a file under the names of the stock model.

    Raises:
        InvalidPatcherError: if transformers has conversions for the file, which replace those of the patcher.
    """
    load = current_load()
    if type(load) is Constructed:
        if not self.supported:  # `supported`: there are conversions for the architecture
            model = skeleton(load.record.model_class, model.config)
        elif any(map(has_conversions, load.in_force)):
            raise InvalidPatcherError(
                f"A patcher with weight conversions is used with a GGUF file of {load.model_class.__name__}, which "
                "transformers reads by conversions of its own; that is not supported. Load the model without the "
                "patcher (with quantization_config=GgufConfig(dequantize=True)), save it with save_pretrained, and "
                "load that with it."
            )
    return stock(self, checkpoint_file, model, *args, **kwargs)


register(Integration("gguf", seams_in(__name__)))
