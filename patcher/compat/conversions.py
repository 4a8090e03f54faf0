"""Weight transforms of transformers: their private slots, how a load names a key, and the conversions of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

from transformers import PreTrainedModel, conversion_mapping, modeling_utils
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

# Before the hook replaces them.
_stock_conversion_mapping: Callable[..., list[WeightTransform]] = conversion_mapping.get_model_conversion_mapping
_stock_revert: Callable[..., Any] = vars(modeling_utils)["revert_weight_conversion"]

# What a transform collects while it runs, and what follows from its patterns.
_RUNTIME_SLOTS = frozenset(
    {
        "collected_tensors",
        "compiled_sources",
        "distributed_operation",
        "layer_targets",
        "quantization_operation",
        "source_patterns",
        "target_patterns",
        "_active",
        "_was_used",
    }
)


def _values(transform: WeightTransform) -> dict[str, Any]:
    """Its attributes, in slots or not."""
    state: Any = object.__getstate__(transform)
    plain, slots = state if isinstance(state, tuple) else (state, None)
    return {**(slots or {}), **(plain or {})}


def transform_settings(transform: WeightTransform) -> dict[str, Any]:
    """All that makes a transform what it is: its patterns as they were written, its scope, its operations."""
    return {name: value for name, value in _values(transform).items() if name not in _RUNTIME_SLOTS}


def source_patterns(transform: WeightTransform) -> list[str]:
    """The source patterns as they were written."""
    return list(transform._original_source_patterns)


def target_patterns(transform: WeightTransform) -> list[str]:
    """The target patterns as they were written."""
    return list(transform._original_target_patterns)


def copy_transform(transform: WeightTransform) -> Any:
    """An unused copy, in which what may take long to match has a limit of time."""
    copy = type(transform).__new__(type(transform))
    for name, value in _values(transform).items():
        is_collected = name in ("collected_tensors", "layer_targets")
        object.__setattr__(copy, name, type(value)(value.default_factory) if is_collected else deepcopy(value))
    if not all(map(is_quick, transform.source_patterns)):  # of which the compiled ones are the alternatives
        copy.compiled_sources = compiled(transform.compiled_sources.pattern)  # type: ignore[assignment]
    copy._was_used = False
    copy.quantization_operation = None
    return copy


def was_used(transform: WeightTransform) -> bool:
    """Whether the transform matched a key."""
    return bool(transform._was_used)


#: What a load makes of a key: its name, and the converter and the source pattern that take it.
Renamed: TypeAlias = "tuple[str, WeightTransform | None, str | None]"


def key_renamer(
    transforms: Iterable[WeightTransform],
    model: PreTrainedModel | None = None,
    parameters: dict[str, Any] | None = None,
) -> Callable[[str], Renamed]:
    """Gives what a load makes of a checkpoint key.

    With `model` and `parameters` the prefix of the base model is added or removed as a load does.
    """
    chain = list(transforms)
    renamings = [transform for transform in chain if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in chain if isinstance(transform, WeightConverter)]
    # The first converter that matches gives the name, and the last one with that text does the work.
    takers = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix if model is not None else None

    def rename(key: str) -> Renamed:
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
        if model is not None and parameters is not None and renamed not in parameters and key in parameters:
            return with_model_prefix(key, model, parameters), None, None
        return renamed, takers[pattern] if pattern else None, pattern

    return rename


def with_model_prefix(key: str, model: PreTrainedModel, parameters: dict[str, Any]) -> str:
    """The key with the prefix of the base model added or removed, where that names a parameter."""
    renamed, _ = rename_source_key(key, [], [], model.base_model_prefix, parameters)
    return renamed


def stock_conversions(
    model: PreTrainedModel, key_mapping: dict[str, str] | None = None, *, legacy: bool = True
) -> list[WeightTransform]:
    """The conversions that transformers has for the model, before any quantizer."""
    return _stock_conversion_mapping(as_stock(model), key_mapping, None, add_legacy=legacy)


def stock_revert(model: Any, state_dict: dict[str, Any], conversions: list[Any] | None = None) -> dict[str, Any]:
    """Reverse the conversions of the model's load as transformers does, or these instead."""
    if conversions is None and getattr(model, "_weight_conversions", None) is None:
        # It would ask for them itself, by the classes that the sub-models have now.
        conversions = stock_conversions_from_scratch(model) or None
        if conversions is None:
            return dict(state_dict)
    if conversions is not None:
        model = ModelView(model, _weight_conversions=conversions)
    return dict(_stock_revert(model, state_dict))


def reversed_together(conversions: Iterable[WeightTransform]) -> Callable[[str], str | None] | None:
    """Gives which parameters are reversed together, by a name that is the same for these; None if none are."""
    converters: Any = [each.reverse_transform() for each in conversions if isinstance(each, WeightConverter)][::-1]

    def together(name: str) -> str | None:
        renamed, pattern = rename_source_key(name, [], converters)
        return None if pattern is None else renamed

    return together if converters else None


def depends_on_others(transform: WeightTransform) -> bool:
    """Whether what a transform makes of a key depends on which keys it has met."""
    return hasattr(transform, "_active")


def stock_conversions_from_scratch(model: PreTrainedModel) -> list[WeightTransform]:
    """The conversions that transformers reverses when it saves a model that was not loaded."""
    return [each for each in stock_conversions(model, legacy=False) if not isinstance(each, PrefixChange)]


def set_used_conversions(model: PreTrainedModel, mapping: Iterable[WeightTransform], used: list[Any] | None) -> None:
    """Have transformers remember, for saving, which conversions of its mapping had a part in the model's load.

    With None the model is saved as one that was made without a checkpoint.
    """
    known = set(map(id, used or ()))
    for transform in mapping:
        transform._was_used = id(transform) in known
    model.__dict__["_weight_conversions"] = used if used is None else list(used)


def used_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """The conversions that transformers reverses when it saves the model."""
    found: list[WeightTransform] | None = vars(model).get("_weight_conversions")
    return stock_conversions_from_scratch(model) if found is None else found


def has_used_conversions(model: PreTrainedModel) -> bool:
    """Whether transformers remembers the conversions of the model's load: some quantizers have it forget them."""
    return vars(model).get("_weight_conversions") is not None


def is_prequantized(quantizer: Any) -> bool:
    """Whether a load meets the parts of weights that are quantized already, rather than tensors of their shapes."""
    if quantizer is None or not quantizer.pre_quantized:
        return False
    # Where it has no conversions for the model, it reads under the names of the stock model.
    return not isinstance(quantizer, GgufHfQuantizer) or bool(quantizer.supported)


def keeps_quantized(quantizer: Any) -> bool:
    """Whether what is quantized in a checkpoint is so in the model as well."""
    return is_prequantized(quantizer) and not getattr(quantizer.quantization_config, "dequantize", False)


def distributed_checkpoint(path: Any, options: Mapping[str, Any]) -> bool:
    """Whether a load would read a checkpoint that torch.distributed has written."""
    find = getattr(modeling_utils, "get_distributed_checkpoint_dir", None)  # since 5.18
    if find is None or path is None:
        return False
    return find(path, options.get("subfolder", ""), options.get("gguf_file"), options.get("state_dict")) is not None


def stock_key(model: PreTrainedModel) -> str:
    """The key under which transformers has conversions for a model: its class name, its model type, "" without any."""
    keys = (type(model).__name__, str(model.config.model_type or ""))
    return next((key for key in keys if key and conversions_under(key)), "")


def conversions_under(key: str) -> list[WeightTransform]:
    """The conversions that transformers has under a key."""
    found: Callable[[str], Any] = conversion_mapping.get_checkpoint_conversion_mapping
    return list(found(key) or ())
