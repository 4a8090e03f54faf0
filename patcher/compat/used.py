"""What is called or read of transformers besides its documented names and the seams, checked when these are installed.

A new release of transformers is a change to this package. What is gone is named in one sentence instead of loading
wrong weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.distributed import tensor_parallel
from transformers.quantizers.base import HfQuantizer
from transformers.utils import output_capturing

from patcher.compat.seams import require

#: (owner, name, parameters that are relied on).
USED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (HfQuantizer, "param_needs_quantization", ("model", "param_name")),
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


@cache
def check() -> None:
    """Raise a `PatcherError` that names the library and its release if one is missing. Looks only once."""
    for owner, name, parameters in USED:
        require(owner, name, parameters)
