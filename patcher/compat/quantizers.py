"""Quantizers of transformers: what they make of a checkpoint, and of names."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module as should_convert_module


def is_prequantized(quantizer: Any) -> bool:
    """Whether a load meets the parts of weights that are quantized already, rather than tensors of their shapes."""
    if quantizer is None or not quantizer.pre_quantized:
        return False
    # Where it has no conversions for the model, it reads under the names of the stock model.
    return not isinstance(quantizer, GgufHfQuantizer) or bool(quantizer.supported)


def keeps_quantized(quantizer: Any) -> bool:
    """Whether what is quantized in a checkpoint is so in the model as well."""
    return is_prequantized(quantizer) and not getattr(quantizer.quantization_config, "dequantize", False)
