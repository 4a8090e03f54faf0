"""Quantizers of transformers: which names they leave alone, and the settings that they have for single layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from patcher.compat.conversions import reads_gguf_by_name
from patcher.expressions import matches


def is_prequantized(quantizer: Any) -> bool:
    """Whether a load meets the parts of weights that are quantized already, rather than tensors of their shapes."""
    if quantizer is None or not quantizer.pre_quantized:
        return False
    return not (isinstance(quantizer, GgufHfQuantizer) and reads_gguf_by_name(quantizer))


def keeps_quantized(quantizer: Any) -> bool:
    """Whether what is quantized in a checkpoint is so in the model as well."""
    return is_prequantized(quantizer) and not getattr(quantizer.quantization_config, "dequantize", False)


def is_of_quantizer(operation: Any) -> bool:
    """Whether an operation of a conversion is one that a quantizer has added, to make its own of what is read."""
    return getattr(operation, "hf_quantizer", None) is not None


def is_named(pattern: str, name: str) -> bool:
    """Whether an entry of a quantizer's list of what to leave alone names a layer or a parameter."""
    return not should_convert_module(name, [pattern])


def skipped_names(quantizer: Any) -> list[str] | None:
    """What a quantizer that has prepared a model leaves alone, None where it keeps no such list."""
    found: list[str] | None = getattr(quantizer, "modules_to_not_convert", None)
    return found


def settings_by_name(quantizer: Any) -> Mapping[str, Any]:
    """The settings that a config has for single layers, by name or expression: those of torchao's `FqnToConfig`."""
    found: Mapping[str, Any] = getattr(_quant_type(quantizer), "fqn_to_config", None) or {}
    return found


def names_setting(key: str, layer: str, parameter: str) -> bool:
    """Whether a key of these settings names a layer, or its parameter; the default names none."""
    if key.startswith("re:"):
        return any(matches(key[3:], name) for name in (parameter, layer))
    return key in (parameter, layer)


def words_of(quantizer: Any) -> str:
    """All names and numbers in the config of a quantizer."""
    return repr(quantizer.quantization_config.to_dict())


def _quant_type(quantizer: Any) -> Any:
    return getattr(getattr(quantizer, "quantization_config", None), "quant_type", None)
