"""Every private name of transformers that this package touches, and nothing else.

A new release of transformers is a change to this file. What is looked up here is checked the first time it is used, by
`check()`, so that a seam which is gone says so in one sentence instead of loading wrong weights.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, conversion_mapping, fusion_mapping, modeling_utils
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
)
from transformers.integrations import peft as peft_integration
from transformers.integrations.accelerate import get_device, offload_weight
from transformers.utils import output_capturing

from patcher.errors import PatcherError

__all__ = [
    "Concatenate",
    "ConversionOps",
    "PreTrainedModel",
    "PretrainedConfig",
    "WeightConverter",
    "WeightRenaming",
    "WeightTransform",
    "check",
    "dot_natural_key",
    "get_device",
]

# Constructing a model rebinds `torch.nn.init`, `torch.linspace` and `tie_weights` for the whole process, so two loads
# at once make each other wrong, without any patcher. Every load holds this while it constructs and initialises.
construction_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # The child of a fork has only the thread that forked; another one may have held the lock.
    os.register_at_fork(after_in_child=lambda: construction_lock._at_fork_reinit())  # type: ignore[attr-defined]

#: Where the hook goes: place -> the owner, the name, and the parameters that the hook relies on.
HOOKED: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "load": (PreTrainedModel, "from_pretrained", ()),
    "make": (PreTrainedModel, "_from_config", ("config",)),
    "fusion config": (fusion_mapping, "register_fusion_patches", ("cls", "config", "fusion_config")),
    "construction contexts": (PreTrainedModel, "get_init_context", ()),
    "construct": (PreTrainedModel, "__init__", ("config",)),
    "constructed": (PreTrainedModel, "post_init", ()),
    "conversions": (modeling_utils, "get_model_conversion_mapping", ("model", "key_mapping", "hf_quantizer")),
    "conversions of others": (conversion_mapping, "get_model_conversion_mapping", ("model",)),
    "conversions of adapters": (peft_integration, "get_model_conversion_mapping", ("model",)),
    "read": (modeling_utils, "convert_and_load_state_dict_in_model", ("model", "state_dict", "load_config")),
    "finish": (PreTrainedModel, "_finalize_model_loading", ("model", "load_config", "loading_info")),
    "save": (PreTrainedModel, "save_pretrained", ("save_directory", "state_dict", "save_original_format")),
    "save config": (PretrainedConfig, "save_pretrained", ("save_directory",)),
    "give back": (modeling_utils, "revert_weight_conversion", ("model", "state_dict")),
    "record outputs": (output_capturing, "install_all_output_capturing_hooks", ("model", "prefix")),
}

# What is called or read besides.
USED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (conversion_mapping, "get_model_conversion_mapping", ("model", "key_mapping", "hf_quantizer", "add_legacy")),
    (output_capturing, "install_output_capuring_hook", ("module", "key", "index", "capture_initial_hidden_state")),
    (output_capturing, "_CAN_RECORD_REGISTRY", ()),
    (PreTrainedModel, "mark_tied_weights_as_initialized", ("loading_info",)),
    (PreTrainedModel, "tie_weights", ("missing_keys", "recompute_mapping")),
    (PreTrainedModel, "_adjust_missing_and_unexpected_keys", ("loading_info",)),
    (WeightTransform, "rename_source_key", ("source_key",)),
    (WeightTransform, "add_tensor", ("target_key", "source_key", "source_pattern", "future")),
    (WeightTransform, "reverse_transform", ()),
)

#: Where the wrapper lives that transformers puts around the forward of experts, to choose among implementations.
EXPERTS_HOME = "transformers.integrations.moe"

# Attributes of a model class that decide how it is loaded and saved: a replacement of the class that says nothing of
# its own takes them from the class that it replaces.
LOADING_ATTRIBUTES = (
    "_tied_weights_keys",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_no_split_modules",
    "_skip_keys_device_placement",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
    "_can_record_outputs",
    "_supports_sdpa",
    "_supports_flash_attn",
    "_supports_flex_attn",
    "_supports_attention_backend",
    "base_model_prefix",
    "main_input_name",
    "input_modalities",
    "supports_gradient_checkpointing",
)

_checked = False


def check() -> None:
    """Raise a `PatcherError` that names the release of transformers if a seam is missing. Looks only once."""
    global _checked
    if _checked:
        return
    for owner, name, parameters in (*HOOKED.values(), *USED):
        where = f"{getattr(owner, '__module__', '')}.{owner.__name__}".lstrip(".")
        seam = getattr(owner, name, None)
        if seam is None:
            raise _gone(f"{where}.{name} is gone")
        if parameters:
            known = inspect.signature(seam).parameters
            if missing := [parameter for parameter in parameters if parameter not in known]:
                raise _gone(f"{where}.{name} has no parameter {', '.join(missing)}")
    missing = [slot for slot in ("_original_source_patterns", "_was_used") if slot not in _slots(WeightTransform)]
    if missing:
        raise _gone(f"WeightTransform has no {', '.join(missing)}")
    _checked = True


def _gone(what: str) -> PatcherError:
    return PatcherError(
        f"This release of patcher doesn't know transformers {transformers.__version__}: {what}. "
        "Install a release of transformers that patcher's metadata lists, or a newer patcher."
    )


# --- weight transforms ---------------------------------------------------------------------------------------------

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


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for base in reversed(cls.__mro__):
        own = base.__dict__.get("__slots__", ())
        names += [own] if isinstance(own, str) else list(own)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def transform_settings(transform: WeightTransform) -> dict[str, Any]:
    """All that makes a transform what it is: its patterns as they were written, its scope, its operations."""
    names = [name for name in _slots(type(transform)) if name not in _RUNTIME_SLOTS]
    settings = {name: getattr(transform, name) for name in names if hasattr(transform, name)}
    settings.update(getattr(transform, "__dict__", {}))
    return settings


def source_patterns(transform: WeightTransform) -> list[str]:
    """The source patterns as they were written."""
    return list(transform._original_source_patterns)


def target_patterns(transform: WeightTransform) -> list[str]:
    """The target patterns as they were written."""
    return list(transform._original_target_patterns)


def all_patterns(transform: WeightTransform) -> set[str]:
    """Source and target patterns, as they were written and as they are matched."""
    return {
        *transform._original_source_patterns,
        *transform._original_target_patterns,
        *transform.source_patterns,
        *transform.target_patterns,
    }


def copy_transform(transform: WeightTransform, cls: type[WeightTransform] | None = None) -> Any:
    """An unused copy, of class `cls` if one is given: a transform collects tensors and flags while it runs."""
    kind = type(transform) if cls is None else cls
    copy = kind.__new__(kind)
    for name in _slots(type(transform)):
        if hasattr(transform, name):
            value = getattr(transform, name)
            if name in ("collected_tensors", "layer_targets"):
                value = type(value)(value.default_factory)
            elif name == "compiled_sources":
                pass  # immutable
            else:
                value = deepcopy(value)
            object.__setattr__(copy, name, value)
    if hasattr(transform, "__dict__"):
        copy.__dict__.update(deepcopy(transform.__dict__))
    copy._was_used = False
    copy.quantization_operation = None
    return copy


def leave_alone(transforms: Iterable[WeightTransform], keys: Iterable[str]) -> bool:
    """Whether no transform takes or renames a key. Where a transform has a scope that takes a closer look: False."""
    transforms = list(transforms)
    searches = [transform.compiled_sources.search for transform in transforms]
    return not any(transform.scope_prefix for transform in transforms) and not any(
        search(key) for key in keys for search in searches
    )


def is_stock_operation(operation: ConversionOps) -> bool:
    """Whether transformers itself brings the operation."""
    return type(operation).__module__.startswith("transformers.")


def take_over_use(used: WeightTransform, transform: WeightTransform) -> None:
    """Mark `transform` as used if its copy `used` was."""
    transform._was_used = used._was_used


def was_used(transform: WeightTransform) -> bool:
    """Whether the transform matched a key."""
    return bool(transform._was_used)


def rename_key(
    key: str,
    transforms: Iterable[WeightTransform],
    model: PreTrainedModel | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[str, WeightTransform | None, str | None]:
    """The name that a load gives to a checkpoint key, and the converter and the source pattern that take it.

    With `model` and `parameters` the prefix of the base model is added or removed as a load does.
    """
    renamed, taker, pattern = key, None, None
    chain = list(transforms)
    for transform in chain:
        if isinstance(transform, WeightRenaming):
            renamed, _ = transform.rename_source_key(renamed)
    for transform in chain:
        if isinstance(transform, WeightConverter):
            renamed, pattern = transform.rename_source_key(renamed)
            if pattern is not None:
                taker = transform
                break
    if model is None or parameters is None:
        return renamed, taker, pattern
    renamed = with_model_prefix(renamed, model, parameters)
    if renamed not in parameters and key in parameters:
        return with_model_prefix(key, model, parameters), None, None
    return renamed, taker, pattern


def with_model_prefix(key: str, model: PreTrainedModel, parameters: Mapping[str, Any]) -> str:
    """The key with the prefix of the base model added or removed, where that names a parameter."""
    prefix = model.base_model_prefix
    if not prefix:
        return key
    if key.startswith(prefix) and key.removeprefix(f"{prefix}.") in parameters:
        return key.removeprefix(f"{prefix}.")
    if f"{prefix}.{key}" in parameters:
        return f"{prefix}.{key}"
    return key


def stock_conversions(
    model: PreTrainedModel, key_mapping: dict[str, str] | None = None, *, legacy: bool = True
) -> list[WeightTransform]:
    """The conversions that transformers has for the model, before any quantizer."""
    return _stock_conversion_mapping(as_stock(model), key_mapping, None, add_legacy=legacy)


# Before the hook stands in for them.
_stock_conversion_mapping: Callable[..., list[WeightTransform]] = conversion_mapping.get_model_conversion_mapping
_stock_revert: Callable[..., Any] = vars(modeling_utils)["revert_weight_conversion"]


def stock_revert(model: Any, state_dict: dict[str, Any], conversions: list[Any] | None = None) -> dict[str, Any]:
    """Reverse the conversions of the model's load as transformers does, or these instead."""
    if conversions is None and used_conversions(model) is None:
        # It would ask for them itself, by the classes that the sub-models have now.
        conversions = stock_conversions_from_scratch(model) or None
        if conversions is None:
            return dict(state_dict)
    return dict(_stock_revert(model if conversions is None else _Converted(model, conversions), state_dict))


class _Converted:
    """A model as transformers' reversal sees it, with other conversions to reverse."""

    def __init__(self, model: Any, conversions: list[Any]) -> None:
        self._model = model
        self._weight_conversions = conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def adapted_to_quantizer(
    quantizer: Any, conversions: list[WeightTransform], model: PreTrainedModel
) -> list[WeightTransform]:
    """The conversions as a quantizer, if there is one, adapts them."""
    if quantizer is None:
        return conversions
    adapt = quantizer.update_weight_conversions
    takes_model = "model" in inspect.signature(adapt).parameters  # since 5.19
    adapted: list[WeightTransform] = adapt(conversions, model) if takes_model else adapt(conversions)
    return adapted


def stock_conversions_from_scratch(model: PreTrainedModel) -> list[WeightTransform]:
    """The conversions that transformers reverses when it saves a model that was not loaded."""
    return [
        conversion for conversion in stock_conversions(model, legacy=False) if not isinstance(conversion, PrefixChange)
    ]


def used_conversions(model: PreTrainedModel) -> list[WeightTransform] | None:
    """The conversions of the model's load, as transformers remembers them for saving."""
    return getattr(model, "_weight_conversions", None)


def set_used_conversions(model: PreTrainedModel, conversions: list[WeightTransform]) -> None:
    model.__dict__["_weight_conversions"] = conversions


def follow_earlier_imports() -> None:
    """Let peft ask the hook for conversions if it was imported before, with the function under a name of its own."""
    peft = sys.modules.get("peft.utils.transformers_weight_conversion")
    if peft is not None and vars(peft).get("get_model_conversion_mapping") is _stock_conversion_mapping:
        peft.get_model_conversion_mapping = conversion_mapping.get_model_conversion_mapping  # type: ignore[attr-defined]


def distributed_checkpoint(path: Any, options: Mapping[str, Any]) -> bool:
    """Whether a load would read a checkpoint that torch.distributed has written."""
    find = getattr(modeling_utils, "get_distributed_checkpoint_dir", None)  # since 5.18
    if find is None or path is None:
        return False
    return find(path, options.get("subfolder", ""), options.get("gguf_file"), options.get("state_dict")) is not None


# --- models --------------------------------------------------------------------------------------------------------

#: On a replaced module: the class that it was built for. transformers goes by class in many places.
ORIGINAL = "_patcher_original"


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module was built in place of, if it is a replacement."""
    return module.__dict__.get(ORIGINAL)


def mark_original_class(module: nn.Module, original: type[nn.Module]) -> None:
    module.__dict__[ORIGINAL] = original


def as_stock(model: Any) -> Any:
    """The model as conversions are found for it, which go by class: replaced sub-models pass for what they replace.

    Nothing is written to the model, which others may be running.
    """
    if any(isinstance(module, PreTrainedModel) and ORIGINAL in module.__dict__ for module in model.modules()):
        return _AsStock(model)
    return model


class _AsStock:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules(*args, **kwargs):
            original = original_class(module)
            if isinstance(module, PreTrainedModel) and original is not None:
                shown = object.__new__(original)
                object.__setattr__(shown, "__dict__", module.__dict__)  # the same attributes, of the other class
                yield name, shown
            else:
                yield name, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def tied_keys(model: PreTrainedModel) -> set[str]:
    """The parameters that are tied to another one, and so don't come from a checkpoint."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def settle_keys(model: PreTrainedModel, info: Any) -> None:
    """Take from the missing and the unexpected keys what transformers doesn't mind, as a load does at its end."""
    model.mark_tied_weights_as_initialized(info)  # type: ignore[no-untyped-call]
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)


def class_in(auto_class: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The model class that an Auto class has for a config."""
    mapping = auto_class._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    listed: list[type[PreTrainedModel]] = list(found) if isinstance(found, tuple) else [found]
    named = [cls for cls in listed if cls.__name__ in (config.architectures or ())]
    return (named or listed)[0]


def tie_partners(model: PreTrainedModel) -> set[str]:
    """The parameters that take part in a tie: those that are tied, and those that they are tied to."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {*ties, *ties.values()}


def kept_in_fp32(model: PreTrainedModel, key: str) -> tuple[bool, bool]:
    """Whether a parameter stays in float32 when a model is loaded as float16, and as bfloat16."""
    names = model._keep_in_fp32_modules or (), model._keep_in_fp32_modules_strict or ()
    # As the load's own plan: a name, or an expression, that is found anywhere in the key.
    weak, strict = (any(re.search(name.replace("*", ".*"), key) for name in listed) for listed in names)
    return weak or strict, strict


def inherit_loading_attributes(model: nn.Module, original: type[nn.Module]) -> None:
    """Give a replaced model, on the instance, what its class lacks and the class that it replaces says."""
    replacement = type(model)
    if issubclass(replacement, original) or not issubclass(original, PreTrainedModel):
        return
    for name in LOADING_ATTRIBUTES:
        default = getattr(PreTrainedModel, name, None)
        mine, theirs = getattr(replacement, name, default), getattr(original, name, default)
        if mine is default and theirs is not default and not isinstance(theirs, property):
            model.__dict__[name] = deepcopy(theirs)


def follow_no_split_names(model: PreTrainedModel, names: Mapping[str, set[str]]) -> None:
    """Where a device map may not split the original class, it may not split the replacement."""
    listed = model._no_split_modules
    if listed:
        # Set by `post_init` on the instance; older models may not have got there.
        model._no_split_modules = set(listed).union(*(new for old, new in names.items() if old in listed))


def mark_initialized(tensor: torch.Tensor | nn.Module) -> None:
    """Keep transformers' initialisation away from a tensor that has its value, or from a module's own part in it."""
    tensor._is_hf_initialized = True  # type: ignore[union-attr]


def is_initialized(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "_is_hf_initialized", False))


def forget_initialized(tensor: torch.Tensor) -> None:
    tensor.__dict__.pop("_is_hf_initialized", None)


def declare_shared(module: nn.Module, names: Mapping[str, str]) -> None:
    """Let transformers know which names of a module are others of one parameter, so that it saves it once."""
    if not isinstance(module, PreTrainedModel) and getattr(module, "_tied_weights_keys", None) is None:
        module.__dict__["_tied_weights_keys"] = dict(names)


def offload(tensor: torch.Tensor, key: str, folder: Any, index: dict[str, Any]) -> None:
    """Write a tensor to where the load keeps what the device map puts on the disk."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    offload_weight(tensor, key, folder, index)


# --- recorded outputs ----------------------------------------------------------------------------------------------

stock_install_output_hooks = output_capturing.install_all_output_capturing_hooks


def output_recorders(model: PreTrainedModel) -> list[tuple[str, output_capturing.OutputRecorder]]:
    """What the model's class records, as (output name, recorder) pairs."""
    if type(output_capturing._CAN_RECORD_REGISTRY) is dict:  # up to 5.17
        entries = dict.get(output_capturing._CAN_RECORD_REGISTRY, str(model.__class__)) or {}
    else:
        entries = output_capturing._CAN_RECORD_REGISTRY.get(model) or {}
    recorders = []
    for key, specs in entries.items():
        for spec in specs if isinstance(specs, list) else [specs]:
            if not isinstance(spec, output_capturing.OutputRecorder):
                is_name = isinstance(spec, str)
                spec = output_capturing.OutputRecorder(
                    target_class=None if is_name else spec,  # type: ignore[arg-type]
                    index=0 if "hidden_states" in key else 1,
                    class_name=spec if is_name else None,
                )
            recorders.append((key, spec))
    return recorders


def is_recorded(recorder: output_capturing.OutputRecorder, module: nn.Module, path: str) -> bool:
    """Whether transformers finds the module by its class, or by the end of its path."""
    target: type[nn.Module] | None = recorder.target_class  # None where the path decides
    return (target is not None and isinstance(module, target)) or (
        recorder.class_name is not None and path.endswith(recorder.class_name)
    )


def is_recorded_at(recorder: output_capturing.OutputRecorder, path: str) -> bool:
    """Whether the recorder is for modules at such a path."""
    return recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f"{path}."


def mark_recorded(model: PreTrainedModel) -> None:
    """Let transformers know that the hooks are installed."""
    model._output_capturing_hooks_installed = True  # type: ignore[assignment]


class _Bearer:
    """Takes a hook as a module does. A real one, made while `torch.compile` looks on, would break its graph."""

    hook: Any = None

    def register_forward_hook(self, hook: Any) -> None:
        self.hook = hook


def output_hook(key: str, index: int, capture_initial_hidden_state: bool) -> Any:
    """The forward hook with which transformers records an output."""
    bearer: Any = _Bearer()
    output_capturing.install_output_capuring_hook(bearer, key, index, capture_initial_hidden_state)
    return bearer.hook
