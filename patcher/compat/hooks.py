"""The places of transformers that the hook stands in for, checked the first time that it is installed.

A new release of transformers is a change to this package. A place which is gone is named in one sentence instead of
loading wrong weights.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel, conversion_mapping, fusion_mapping, modeling_utils
from transformers.core_model_loading import WeightTransform
from transformers.integrations import peft as peft_integration
from transformers.utils import output_capturing

from patcher.errors import PatcherError

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
    "conversions": (modeling_utils, "get_model_conversion_mapping", ("model", "key_mapping", "hf_quantizer")),
    "conversions of others": (conversion_mapping, "get_model_conversion_mapping", ("model",)),
    "conversions of adapters": (peft_integration, "get_model_conversion_mapping", ("model",)),
    "read": (modeling_utils, "convert_and_load_state_dict_in_model", ("model", "state_dict", "load_config")),
    "finish": (PreTrainedModel, "_finalize_model_loading", ("model", "load_config", "loading_info")),
    "save": (
        PreTrainedModel,
        "save_pretrained",
        ("save_directory", "state_dict", "variant", "save_original_format", "distributed_checkpoint"),
    ),
    "write weights": (modeling_utils, "safe_save_file", ("filename",)),
    "upload": (PreTrainedModel, "_upload_modified_files", ("working_dir", "repo_id", "token")),
    "save config": (PretrainedConfig, "save_pretrained", ("save_directory",)),
    "give back": (modeling_utils, "revert_weight_conversion", ("model", "state_dict")),
    "record outputs": (output_capturing, "install_all_output_capturing_hooks", ("model", "prefix")),
}

#: What is called or read besides.
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
    (WeightTransform, "_original_source_patterns", ()),
    (WeightTransform, "_was_used", ()),
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
    _checked = True


def _gone(what: str) -> PatcherError:
    return PatcherError(
        f"This release of patcher doesn't know transformers {transformers.__version__}: {what}. "
        "Install a release of transformers that patcher's metadata lists, or a newer patcher."
    )
