"""Which architectures the installed transformers has.

>>> from tests.coverage.models import architectures
>>> architectures()["LlamaForCausalLM"]
Architecture(name='LlamaForCausalLM', kind='causal-lm', model_type='llama')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from tests.support import tiny

__all__ = ["KINDS", "Architecture", "architectures", "class_named", "randomize"]

#: kind -> the tables of the Auto classes that list it
KINDS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("CAUSAL_LM",),
    "masked-lm": ("MASKED_LM",),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "vision-language": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING"),
    "vision": ("IMAGE_CLASSIFICATION",),
}
#: Vision as well; of these one class for each model that the table above doesn't have.
MORE_VISION = (
    "IMAGE VIDEO_CLASSIFICATION ZERO_SHOT_IMAGE_CLASSIFICATION OBJECT_DETECTION ZERO_SHOT_OBJECT_DETECTION "
    "UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION INSTANCE_SEGMENTATION IMAGE_SEGMENTATION DEPTH_ESTIMATION "
    "MASK_GENERATION MASKED_IMAGE_MODELING IMAGE_TO_IMAGE KEYPOINT_DETECTION KEYPOINT_MATCHING POSE_ESTIMATION "
    "IMAGE_MATTING BACKBONE"
).split()


@dataclass(frozen=True)
class Architecture:
    """A model class, where the Auto classes list it, and under which model type."""

    name: str
    kind: str
    model_type: str


def architectures() -> dict[str, Architecture]:
    """Every architecture of the kinds above, and of each model that has none of them the base class, as `other`."""
    found: dict[str, Architecture] = {}
    folders: set[str] = set()

    def add(kind: str, mapping: dict[str, Any], *, new_folders_only: bool = False) -> None:
        before = set(folders)
        for model_type, names in mapping.items():
            folder = model_type_to_module_name(model_type)
            if new_folders_only and folder in (folders if kind == "other" else before):
                continue
            for name in names if isinstance(names, list | tuple) else [names]:
                known = found.setdefault(name, Architecture(name, kind, model_type))
                if known.kind == kind and _is_named_after(name, model_type) > _is_named_after(name, known.model_type):
                    found[name] = Architecture(name, kind, model_type)  # others use its class as well
                folders.add(folder)

    for kind, tables in KINDS.items():
        for table in tables:
            add(kind, getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}))
    for table in MORE_VISION:
        add("vision", getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}), new_folders_only=True)
    add("other", modeling_auto.MODEL_MAPPING_NAMES, new_folders_only=True)
    return found


def _is_named_after(name: str, model_type: str) -> bool:
    return name.lower().startswith(model_type.replace("_", "").replace("-", ""))


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Random values of a size that keeps activations near 1, through convolutions as well."""
    tiny.randomize(model)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and "weight" in module._parameters:
            module.weight *= (module.weight.shape[-1] / module.weight[0].numel()) ** 0.5


def class_named(name: str) -> Any:
    import transformers

    return getattr(transformers, name)
