"""Weight transforms of transformers: their private slots, the renaming of keys, and the conversions of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

from torch import nn
from transformers import Conv1D, PreTrainedModel, conversion_mapping, modeling_utils
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key as dot_natural_key,
    rename_source_key,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled as is_deepspeed_zero3_enabled
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module as should_convert_module

from patcher.compat.models import ModelView, as_stock
from patcher.expressions import compiled, is_quick

# Unwrapped, as this is imported before seams are installed.
_stock_conversion_mapping: Callable[..., list[WeightTransform]] = conversion_mapping.get_model_conversion_mapping
_stock_revert: Callable[..., Any] = vars(modeling_utils)["revert_weight_conversion"]

#: State of a running transform, and attributes that derive from its patterns.
_RUNTIME_SLOTS = frozenset(
    "collected_tensors compiled_sources distributed_operation layer_targets quantization_operation _active "
    "_was_used".split()
)
#: whether patterns are as written -> those that aren't
_OTHER_PATTERNS = {
    True: ("source_patterns", "target_patterns"),
    False: ("_original_source_patterns", "_original_target_patterns"),
}


def _values(transform: WeightTransform) -> dict[str, Any]:
    """Return all attributes, in slots or not."""
    state: Any = object.__getstate__(transform)
    plain, slots = state if isinstance(state, tuple) else (state, None)
    return {**(slots or {}), **(plain or {})}


def transform_settings(transform: WeightTransform, *, written: bool = True) -> dict[str, Any]:
    """Return what distinguishes a transform: its patterns, as written or as they run, its scope, its operations.

    A transform that transformers has reversed, for a save, has other patterns as written than before.
    """
    excluded = _RUNTIME_SLOTS.union(_OTHER_PATTERNS[written])
    return {name: value for name, value in _values(transform).items() if name not in excluded}


def source_patterns(transform: WeightTransform) -> list[str]:
    """Return the source patterns as they were written."""
    return list(transform._original_source_patterns)


def target_patterns(transform: WeightTransform) -> list[str]:
    """Return the target patterns as they were written."""
    return list(transform._original_target_patterns)


def copy_transform(transform: WeightTransform) -> Any:
    """Return an unused copy, with a time limit for patterns that may be slow."""
    copy = type(transform).__new__(type(transform))
    for name, value in _values(transform).items():
        is_empty = name in ("collected_tensors", "layer_targets")
        object.__setattr__(copy, name, type(value)(value.default_factory) if is_empty else deepcopy(value))
    if not all(map(is_quick, transform.source_patterns)):  # the alternatives of the compiled pattern
        copy.compiled_sources = compiled(transform.compiled_sources.pattern)  # type: ignore[assignment]
    copy._was_used = False
    copy.quantization_operation = None
    return copy


def reversed_copies(transforms: Iterable[WeightTransform]) -> list[WeightTransform]:
    """Return the reverses of transforms, last one first. `reverse_transform` itself changes patterns as written."""
    return [copy_transform(transform).reverse_transform() for transform in transforms][::-1]


def was_used(transform: WeightTransform) -> bool:
    """Whether the transform matched a key."""
    return bool(transform._was_used)


#: A renamed key, and the converter and source pattern that match it.
Renamed: TypeAlias = "tuple[str, WeightTransform | None, str | None]"


def key_renamer(
    transforms: Iterable[WeightTransform],
    model: PreTrainedModel | None = None,
    parameters: dict[str, Any] | None = None,
) -> Callable[[str], Renamed]:
    """Return a function that renames a checkpoint key as a load does.

    With `model` and `parameters` the prefix of the base model is added or removed too.
    """
    transforms = list(transforms)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    # The first converter that matches renames; the last one with the same pattern converts.
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix if model is not None else None

    def rename(key: str) -> Renamed:
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
        if model is not None and parameters is not None and renamed not in parameters and key in parameters:
            return with_model_prefix(key, model, parameters), None, None
        return renamed, by_pattern[pattern] if pattern else None, pattern

    return rename


def with_model_prefix(key: str, model: PreTrainedModel, parameters: dict[str, Any]) -> str:
    """Add or remove the prefix of the base model, if that gives the name of a parameter."""
    renamed, _ = rename_source_key(key, [], [], model.base_model_prefix, parameters)
    return renamed


def stock_conversions(
    model: PreTrainedModel, key_mapping: dict[str, str] | None = None, *, legacy: bool = True
) -> list[WeightTransform]:
    """Return the conversions that transformers has for the model, without those of quantizers."""
    return _stock_conversion_mapping(as_stock(model), key_mapping, None, add_legacy=legacy)


def stock_revert(model: Any, state_dict: dict[str, Any], conversions: list[Any] | None = None) -> dict[str, Any]:
    """Reverse the conversions of the model's load as transformers does, or the given ones."""
    if conversions is None and getattr(model, "_weight_conversions", None) is None:
        # transformers would look them up by the classes of replaced sub-models.
        conversions = stock_conversions_from_scratch(model) or None
        if conversions is None:
            return dict(state_dict)
    if conversions is not None:
        model = ModelView(model, _weight_conversions=conversions)
    return dict(_stock_revert(model, state_dict))


def reversed_together(conversions: Iterable[WeightTransform]) -> Callable[[str], str | None] | None:
    """Return a function that gives parameters which are reversed together the same name; None if none are."""
    converters: Any = reversed_copies(item for item in conversions if isinstance(item, WeightConverter))

    def group(name: str) -> str | None:
        renamed, pattern = rename_source_key(name, [], converters)
        return None if pattern is None else renamed

    return group if converters else None


def depends_on_others(transform: WeightTransform) -> bool:
    """Whether a transform renames a key depending on the keys before it."""
    return hasattr(transform, "_active")


def stock_conversions_from_scratch(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions that transformers reverses when it saves a model that wasn't loaded."""
    transforms = stock_conversions(model, legacy=False)
    return [transform for transform in transforms if not isinstance(transform, PrefixChange)]


def set_used_conversions(model: PreTrainedModel, mapping: Iterable[WeightTransform], used: list[Any] | None) -> None:
    """Set the conversions of its mapping that transformers reverses on save; None for a model that wasn't loaded."""
    used_ids = set(map(id, used or ()))
    for transform in mapping:
        transform._was_used = id(transform) in used_ids
    model.__dict__["_weight_conversions"] = used if used is None else list(used)


def used_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions that transformers reverses when it saves the model."""
    used: list[WeightTransform] | None = vars(model).get("_weight_conversions")
    return stock_conversions_from_scratch(model) if used is None else used


def has_used_conversions(model: PreTrainedModel) -> bool:
    """Whether the conversions of the model's load are known; some quantizers remove them."""
    return vars(model).get("_weight_conversions") is not None


def is_prequantized(quantizer: Any) -> bool:
    """Whether a checkpoint has the parts of quantized weights, rather than tensors of the parameters' shapes."""
    if quantizer is None or not quantizer.pre_quantized:
        return False
    # Without conversions for the model the GGUF quantizer reads by the names of the stock model.
    return not isinstance(quantizer, GgufHfQuantizer) or bool(quantizer.supported)


def keeps_quantized(quantizer: Any) -> bool:
    """Whether quantized weights of a checkpoint stay quantized in the model."""
    return is_prequantized(quantizer) and not getattr(quantizer.quantization_config, "dequantize", False)


def is_transposed_by_quantizer(model: PreTrainedModel, name: str) -> bool:
    """Whether a quantizer transposes a weight while it quantizes it, as bitsandbytes does those of Conv1D."""
    layer = model.get_submodule(name.rpartition(".")[0])
    return issubclass(getattr(layer, "source_cls", nn.Module), Conv1D)


def distributed_checkpoint(path: Any, options: Mapping[str, Any]) -> bool:
    """Whether a load would read a checkpoint of torch.distributed."""
    find = getattr(modeling_utils, "get_distributed_checkpoint_dir", None)  # since 5.18
    if find is None or path is None:
        return False
    return find(path, options.get("subfolder", ""), options.get("gguf_file"), options.get("state_dict")) is not None


def stock_key(model: PreTrainedModel) -> str:
    """Return the key of a model's conversions in transformers: its class name or model type, "" if it has none."""
    keys = (type(model).__name__, str(model.config.model_type or ""))
    return next((key for key in keys if key and conversions_under(key)), "")


def conversions_under(key: str) -> list[WeightTransform]:
    """Return the conversions that transformers has under a key."""
    lookup: Callable[[str], Any] = conversion_mapping.get_checkpoint_conversion_mapping
    return list(lookup(key) or ())
