"""The places of transformers that the hook stands in for, checked the first time that it is installed.

A new release of transformers is a change to this package. A place which is gone is named in one sentence instead of
loading wrong weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from accelerate.utils import modeling as accelerate_modeling  # type: ignore[import-untyped]
from transformers import PretrainedConfig, PreTrainedModel, conversion_mapping, fusion_mapping, modeling_utils
from transformers.core_model_loading import WeightTransform
from transformers.distributed import tensor_parallel
from transformers.integrations import peft as peft_integration
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.utils import output_capturing

from patcher.errors import PatcherError, unknown_release
from patcher.source.importing import when_imported as when_imported

#: What stood at a place before the hook.
Stock = Callable[..., Any]

#: Where the hook goes: place -> the owner, the name, and the parameters that the hook relies on.
HOOKED: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "load": (PreTrainedModel, "from_pretrained", ()),
    "make": (PreTrainedModel, "_from_config", ("config",)),
    "fusion config": (fusion_mapping, "register_fusion_patches", ("cls", "config", "fusion_config")),
    "find weights": (
        modeling_utils,
        "_get_resolved_checkpoint_files",
        ("pretrained_model_name_or_path", "variant", "gguf_file", "transformers_explicit_filename", "download_kwargs"),
    ),
    "construction contexts": (PreTrainedModel, "get_init_context", ()),
    "construct": (PreTrainedModel, "__init__", ("config",)),
    "constructed": (PreTrainedModel, "post_init", ()),
    "stands": (modeling_utils, "patch_output_recorders", ("model",)),
    "quantize": (HfQuantizer, "preprocess_model", ("model",)),
    "conversions": (modeling_utils, "get_model_conversion_mapping", ("model", "key_mapping", "hf_quantizer")),
    "conversions of others": (conversion_mapping, "get_model_conversion_mapping", ("model",)),
    "conversions of adapters": (peft_integration, "get_model_conversion_mapping", ("model",)),
    "adapter, loaded by transformers": (
        peft_integration.PeftAdapterMixin,
        "load_adapter",
        (
            "peft_model_id",
            "adapter_name",
            "peft_config",
            "adapter_state_dict",
            "is_trainable",
            "hotswap",
            "local_files_only",
            "adapter_kwargs",
            "load_config",
        ),
    ),
    "read GGUF": (GgufHfQuantizer, "get_state_dict", ("checkpoint_file", "model")),
    "distribute": (PreTrainedModel, "maybe_distribute_model", ("model", "distributed_config")),
    "device map": (modeling_utils, "_get_device_map", ("model", "device_map")),
    "read": (modeling_utils, "convert_and_load_state_dict_in_model", ("model", "state_dict", "load_config")),
    "report keys": (modeling_utils, "log_state_dict_report", ("model", "loading_info")),
    "finish": (PreTrainedModel, "_finalize_model_loading", ("model", "load_config", "loading_info")),
    "save": (
        PreTrainedModel,
        "save_pretrained",
        ("save_directory", "state_dict", "variant", "save_original_format", "distributed_checkpoint"),
    ),
    "gather to save": (PreTrainedModel, "gather_sharded_state_dict_for_save", ("model_to_save", "state_dict")),
    "weights to save": (modeling_utils, "remove_tied_weights_from_state_dict", ("state_dict", "model")),
    "read offloaded weight": (modeling_utils, "load_offloaded_parameter", ("model", "param_name")),
    "write weights": (modeling_utils, "safe_save_file", ("filename",)),
    "upload": (PreTrainedModel, "_upload_modified_files", ("working_dir", "repo_id", "token")),
    "save config": (PretrainedConfig, "save_pretrained", ("save_directory",)),
    "read into a model": (accelerate_modeling, "load_state_dict", ("checkpoint_file", "device_map")),
    "give back": (modeling_utils, "revert_weight_conversion", ("model", "state_dict")),
    "record outputs": (output_capturing, "install_all_output_capturing_hooks", ("model", "prefix")),
}

#: The same of modules that not everybody imports: hooked when somebody does. Names are found below the module.
HOOKED_LATE: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "transformers.pipelines": {
        "load for a pipeline": ("load_model", ("model", "config")),
        "make a pipeline": ("Pipeline.__init__", ("model",)),
    },
    "transformers.trainer_utils": {"shards": ("load_sharded_checkpoint", ("model", "folder", "strict"))},
    "transformers.trainer": {
        "shards of a trainer": ("load_sharded_checkpoint", ("model", "folder", "strict")),
        "optimizer of a trainer, saved": ("Trainer._save_optimizer_and_scheduler", ("output_dir",)),
        "optimizer of a trainer, loaded": ("Trainer._load_optimizer_and_scheduler", ("checkpoint",)),
    },
    "transformers.exporters.utils": {"patches of exporters": ("patch_attributes", ("patches",))},
    "peft.tuners.tuners_utils": {"adapter, injected": ("BaseTuner.inject_adapter", ("model", "adapter_name"))},
    "peft.utils.transformers_weight_conversion": {
        "config of an adapter": ("convert_peft_config_for_transformers", ("peft_config", "model", "conversions")),
        "weights of an adapter": (
            "convert_peft_adapter_state_dict_for_transformers",
            ("model", "peft_config", "adapter_state_dict", "adapter_name"),
        ),
    },
    "peft.tuners.lora.model": {
        "adapters, added up": ("LoraModel.add_weighted_adapter", ("adapters", "combination_type", "adapter_name"))
    },
    "peft.utils.hotswap": {
        "adapter, swapped": ("hotswap_adapter_from_state_dict", ("model", "state_dict", "adapter_name", "config"))
    },
    "peft.utils.save_and_load": {
        "state of an adapter": ("get_peft_model_state_dict", ("model", "state_dict", "adapter_name"))
    },
    "peft.peft_model": {
        "PeftModel, loaded": (
            "PeftModel.from_pretrained",
            ("model", "model_id", "adapter_name", "is_trainable", "config"),
        ),
        "PeftModel, loaded into": (
            "PeftModel.load_adapter",
            ("model_id", "adapter_name", "is_trainable", "key_mapping"),
        ),
        "PeftModel, saved": ("PeftModel.save_pretrained", ("save_directory",)),
    },
}

#: Functions that others import by name, also before the hook is there: all that have one are given the other.
FOLLOWED = ("state of an adapter",)

#: What is called or read besides.
USED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (accelerate_modeling, "load_checkpoint_in_model", ("model", "checkpoint", "device_map")),
    (HfQuantizer, "get_modules_to_not_convert", ("model", "skip_modules", "keep_in_fp32_modules")),
    (HfQuantizer, "param_needs_quantization", ("model", "param_name")),
    (conversion_mapping, "get_model_conversion_mapping", ("model", "key_mapping", "hf_quantizer", "add_legacy")),
    (output_capturing, "install_output_capuring_hook", ("module", "key", "index", "capture_initial_hidden_state")),
    (output_capturing, "_CAN_RECORD_REGISTRY", ()),
    (tensor_parallel, "replace_layer_number_by_wildcard", ("name",)),
    (PreTrainedModel, "mark_tied_weights_as_initialized", ("loading_info",)),
    (PreTrainedModel, "tie_weights", ("missing_keys", "recompute_mapping")),
    (PreTrainedModel, "_adjust_missing_and_unexpected_keys", ("loading_info",)),
    (WeightTransform, "rename_source_key", ("source_key",)),
    (WeightTransform, "add_tensor", ("target_key", "source_key", "source_pattern", "future")),
    (WeightTransform, "reverse_transform", ()),
    (WeightTransform, "_original_source_patterns", ()),
    (WeightTransform, "_was_used", ()),
)

_checked = False


def check() -> None:
    """Raise a `PatcherError` that names the library and its release if a seam is missing. Looks only once."""
    global _checked
    if _checked:
        return
    for owner, name, parameters in (*HOOKED.values(), *USED):
        check_seam(owner, name, parameters)
    _checked = True


def check_seam(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    """Raise a `PatcherError` where one place is not as the hook knows it."""
    where = f"{getattr(owner, '__module__', '')}.{owner.__name__}".lstrip(".")
    library = where.partition(".")[0]
    seam = getattr(owner, name, None)
    if seam is None:
        raise unknown_release(library, f"{where}.{name} is gone")
    if parameters:
        known = inspect.signature(seam).parameters
        if missing := [parameter for parameter in parameters if parameter not in known]:
            raise unknown_release(library, f"{where}.{name} has no parameter {', '.join(missing)}")


def not_called(place: str) -> PatcherError:
    """The error for a place that is there, and that transformers has not come by."""
    owner, name, _ = HOOKED[place]
    return unknown_release("transformers", f"{owner.__name__}.{name} is not called where a model is loaded, or saved")
