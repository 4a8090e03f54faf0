"""Quantizers of transformers: which names they leave alone, and the settings that they have for single layers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from patcher.compat.conversions import reads_gguf_by_name
from patcher.expressions import matches

#: The key of torchao's `FqnToConfig` that stands for the layers which no other key names.
_DEFAULT = "_default"


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


def goes_by_parameters(quantizer: Any) -> bool:
    """Whether a quantizer looks for the name of a parameter in its list, as torchao's does: others look for layers."""
    return "should_convert_module" in type(quantizer).param_needs_quantization.__code__.co_names


@contextmanager
def list_extended(quantizer: Any, more: Any) -> Iterator[list[bool]]:
    """Have a quantizer leave more alone than its config says: `more` gives that, from the list it would go by.

    Gives a list that is empty as long as the quantizer hasn't asked.
    """
    stock, asked = quantizer.get_modules_to_not_convert, list[bool]()

    def extended(model: Any, *args: Any, **kwargs: Any) -> list[str]:
        asked.append(True)
        found: list[str] = stock(model, *args, **kwargs)
        return [*found, *more(found)]

    quantizer.get_modules_to_not_convert = extended
    try:
        yield asked
    finally:
        del quantizer.get_modules_to_not_convert


def settings_by_name(quantizer: Any) -> Mapping[str, Any]:
    """The settings that a config has for single layers, by name or expression: those of torchao's `FqnToConfig`."""
    found: Mapping[str, Any] = getattr(_quant_type(quantizer), "fqn_to_config", None) or {}
    return found


def names_setting(key: str, layer: str, parameter: str) -> bool:
    """Whether a key of these settings names a layer, or its parameter; the default names none."""
    if key.startswith("re:"):
        return any(matches(key[3:], name) for name in (parameter, layer))
    return key in (parameter, layer)


def setting_of(settings: Mapping[str, Any], layer: str, parameter: str) -> Any:
    """The setting of a parameter: the first of those that name it, in the order that torchao documents."""
    for name in (parameter, layer):
        if name in settings:
            return settings[name]
    hit = next((key for key in settings if names_setting(key, layer, parameter)), _DEFAULT)
    return settings.get(hit)


@contextmanager
def settings_extended(quantizer: Any, more: Mapping[str, Any]) -> Iterator[None]:
    """Have a quantizer go by more settings of single layers than its config has, which stays as it is."""
    if not more:
        yield
        return
    config = quantizer.quantization_config
    quant_type, extended = copy.copy(config.quant_type), copy.copy(config)
    quant_type.fqn_to_config = quant_type.module_fqn_to_config = OrderedDict({**more, **quant_type.fqn_to_config})
    extended.quant_type = quant_type
    quantizer.quantization_config = extended
    try:
        yield
    finally:
        quantizer.quantization_config = config


def words_of(quantizer: Any) -> str:
    """All names and numbers in the config of a quantizer."""
    return repr(quantizer.quantization_config.to_dict())


def method_of(quantizer: Any) -> str:
    """The name of the method, as a config has it."""
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def _quant_type(quantizer: Any) -> Any:
    return getattr(getattr(quantizer, "quantization_config", None), "quant_type", None)
