"""What is known of peft: it is imported by these functions only, which run where somebody has loaded an adapter."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

#: What peft puts in front of the names of tensors in files.
PREFIX = "base_model.model."
#: How adapters may start that don't change the weights of the model beneath: others are another model's adapters.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
#: The settings of LoRA that mean the same for joined layers; of any other, of a newer peft too, that isn't known.
_KNOWN = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save init_lora_weights "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_core trainable_token_indices eva_config "
    "use_dora qalora_group_size runtime_config lora_bias target_parameters ensure_weight_tying".split()
)
#: What `PeftConfig.from_pretrained` and the readers of weights take of the options of a download.
_DOWNLOAD = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download", "proxies")


def is_lora(config: Any) -> bool:
    return kind_of(config) == "LORA"


def kind_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def unusual_setting(config: Any) -> str:
    """A setting with which the matrices of an adapter aren't known to be a plain LoRA or DoRA, "" if there is none."""
    start = getattr(config, "init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        return f"init_lora_weights={start!r}"
    for field in dataclasses.fields(config):
        factory = field.default_factory
        usual = field.default if factory is dataclasses.MISSING else factory()
        if field.name not in _KNOWN and (value := getattr(config, field.name)) != usual:
            return f"{field.name}={value!r}"
    return ""


def is_targeted(config: Any, name: str) -> bool:
    """Whether peft adapts a module of that name."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules is None and getattr(config, "target_parameters", None) is None:
        return False
    return bool(check_target_module_exists(config, name))


def is_all_linear(config: Any) -> bool:
    from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

    targets = getattr(config, "target_modules", None)
    return isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND


def linear_names(config: Any, model: nn.Module) -> set[str]:
    """What "all-linear" means for a model."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    resolved: Any = _maybe_include_all_linear_layers(copy.copy(config), model)
    return set(resolved.target_modules)


def prepared(tuner: Any, config: Any, model: nn.Module) -> Any:
    """A copy of a config with the targets that peft knows for the architecture where it names none."""
    config = copy.deepcopy(config)
    return tuner._prepare_adapter_config(config, tuner.get_model_config(model))


def rank_and_alpha(config: Any, name: str) -> tuple[int, float]:
    from peft.utils.other import get_pattern_key

    rank_key, alpha_key = get_pattern_key(config.rank_pattern, name), get_pattern_key(config.alpha_pattern, name)
    return config.rank_pattern.get(rank_key, config.r), config.alpha_pattern.get(alpha_key, config.lora_alpha)


def patterns_that_match(patterns: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    from peft.utils.other import get_pattern_key

    def matches(key: str) -> bool:
        return any(get_pattern_key([key], name) == key for name in names)

    return {key: value for key, value in patterns.items() if matches(key)}


def is_tuner_layer(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def lora_layer(module: nn.Module, adapter: str) -> Any:
    """The module, if it is a layer with a LoRA of that name; otherwise None."""
    from peft.tuners.lora import LoraLayer

    return module if isinstance(module, LoraLayer) and adapter in module.lora_A else None


def base_model(model: Any) -> nn.Module:
    """The model of transformers inside of a `PeftModel`, or the model itself."""
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def base_weight(layer: Any) -> torch.Tensor:
    """The weight of the layer beneath an adapter, dequantized."""
    from peft.utils.integrations import dequantize_module_weight

    found: torch.Tensor = dequantize_module_weight(layer.get_base_layer() if is_tuner_layer(layer) else layer)
    return found


def read_config(path: Any, options: Mapping[str, Any]) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_pretrained(str(path), **_download(options))


def read_weights(path: Any, options: Mapping[str, Any], key_mapping: Any = None) -> dict[str, torch.Tensor]:
    from peft.utils.save_and_load import load_peft_weights

    found: dict[str, torch.Tensor] = load_peft_weights(
        str(path), device="cpu", key_mapping=key_mapping, **_download(options)
    )
    return found


def _download(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _DOWNLOAD if options.get(name) is not None}


def in_stock_names(
    model: nn.Module, config: Any, weights: Mapping[str, torch.Tensor], adapter: str
) -> dict[str, torch.Tensor]:
    """The tensors of an adapter under the names that layers have in transformers today, as peft converts them."""
    from peft.utils import transformers_weight_conversion as conversion

    convert = inspect.unwrap(conversion.convert_peft_adapter_state_dict_for_transformers)
    found = convert(model=model, peft_config=config, adapter_state_dict=dict(weights), adapter_name=adapter)
    return {name.removeprefix(PREFIX): value for name, value in found.items()}


def adapters_of(model: Any) -> Mapping[str, Any]:
    """Name -> config of the adapters of a model."""
    return getattr(model, "peft_config", None) or {}


def inner_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of a model without what adapters have put inside of its layers."""
    inside_of = ""  # what is inside of a module follows it
    for name, module in model.named_modules():
        if not inside_of or not name.startswith(inside_of):
            yield name, module
            inside_of = f"{name}." if name and is_tuner_layer(module) else ""


def wraps_parameter(layer: nn.Module) -> bool:
    """Whether an adapter is of a parameter rather than of a layer."""
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(layer, ParamWrapper)


def converted_config(config: Any, model: nn.Module) -> None:
    """Have a config name what transformers has today in the place of the experts of a mixture."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(config, model=model, conversions=None)


def is_targeted_parameter(config: Any, name: str) -> bool:
    """Whether peft adapts a parameter of that name by itself."""
    return any(name == each or name.endswith(f".{each}") for each in getattr(config, "target_parameters", None) or ())
