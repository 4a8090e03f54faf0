"""Patchers that are pinned to the code that they were verified on.

```python
from patcher import presets

model = AutoModelForCausalLM.from_pretrained(repo, patcher=presets.MIXTRAL_LINEAR_EXPERTS)
presets.for_model(repo)  # those that fit, the recommended first
```

A load raises `PresetDriftError` where a transformers release has changed the code that a preset works on.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from patcher.errors import InvalidPatcherError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from patcher.patcher import Patcher

#: module of this package -> presets
_HOMES = {
    "experts": (
        "DEEPSEEK_V3_LINEAR_EXPERTS",
        "GPT_OSS_LINEAR_EXPERTS",
        "MIXTRAL_LINEAR_EXPERTS",
        "OLMOE_LINEAR_EXPERTS",
        "QWEN2_MOE_LINEAR_EXPERTS",
        "QWEN3_MOE_LINEAR_EXPERTS",
    ),
    "kernels": ("LLAMA_LIGER", "MISTRAL_LIGER", "QWEN3_LIGER"),
    "patch_embeddings": (
        "CLIP_LINEAR_PATCH_EMBEDDINGS",
        "GLM4V_LINEAR_PATCH_EMBEDDINGS",
        "QWEN2_5_VL_LINEAR_PATCH_EMBEDDINGS",
        "QWEN2_VL_LINEAR_PATCH_EMBEDDINGS",
        "QWEN3_VL_LINEAR_PATCH_EMBEDDINGS",
        "SIGLIP_LINEAR_PATCH_EMBEDDINGS",
        "VIT_LINEAR_PATCH_EMBEDDINGS",
    ),
    "projections": (
        "BERT_FUSED_PROJECTIONS",
        "GEMMA3_FUSED_PROJECTIONS",
        "LLAMA_FUSED_PROJECTIONS",
        "MISTRAL_FUSED_PROJECTIONS",
        "PHI_FUSED_PROJECTIONS",
        "QWEN2_FUSED_PROJECTIONS",
        "QWEN3_FUSED_PROJECTIONS",
    ),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

#: model type -> the presets for it, the recommended first; kernels after what needs nothing
_FOR_MODELS = {
    "bert": ("BERT_FUSED_PROJECTIONS",),
    "clip": ("CLIP_LINEAR_PATCH_EMBEDDINGS",),
    "clip_vision_model": ("CLIP_LINEAR_PATCH_EMBEDDINGS",),
    "deepseek_v3": ("DEEPSEEK_V3_LINEAR_EXPERTS",),
    "gemma3": ("GEMMA3_FUSED_PROJECTIONS",),
    "gemma3_text": ("GEMMA3_FUSED_PROJECTIONS",),
    "glm4v": ("GLM4V_LINEAR_PATCH_EMBEDDINGS",),
    "gpt_oss": ("GPT_OSS_LINEAR_EXPERTS",),
    "llama": ("LLAMA_FUSED_PROJECTIONS", "LLAMA_LIGER"),
    "mistral": ("MISTRAL_FUSED_PROJECTIONS", "MISTRAL_LIGER"),
    "mixtral": ("MIXTRAL_LINEAR_EXPERTS",),
    "olmoe": ("OLMOE_LINEAR_EXPERTS",),
    "phi": ("PHI_FUSED_PROJECTIONS",),
    "qwen2": ("QWEN2_FUSED_PROJECTIONS",),
    "qwen2_5_vl": ("QWEN2_5_VL_LINEAR_PATCH_EMBEDDINGS",),
    "qwen2_moe": ("QWEN2_MOE_LINEAR_EXPERTS",),
    "qwen2_vl": ("QWEN2_VL_LINEAR_PATCH_EMBEDDINGS",),
    "qwen3": ("QWEN3_FUSED_PROJECTIONS", "QWEN3_LIGER"),
    "qwen3_moe": ("QWEN3_MOE_LINEAR_EXPERTS",),
    "qwen3_vl": ("QWEN3_VL_LINEAR_PATCH_EMBEDDINGS",),
    "siglip": ("SIGLIP_LINEAR_PATCH_EMBEDDINGS",),
    "siglip_vision_model": ("SIGLIP_LINEAR_PATCH_EMBEDDINGS",),
    "vit": ("VIT_LINEAR_PATCH_EMBEDDINGS",),
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Patcher:
    # Late: a preset may need a package that isn't installed, and the list of names needs none.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'patcher.presets' has no attribute {name!r}")
    found: Patcher = getattr(importlib.import_module(f"patcher.presets.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "describe", "for_model"])


def describe(name: str) -> str:
    """What a preset does, why, for whom, and what was measured.

    ```python
    print(presets.describe("MIXTRAL_LINEAR_EXPERTS"))
    ```

    Raises:
        InvalidPatcherError: there is no such preset.
    """
    if name not in _MODULE_OF:
        from patcher.matching import nearest

        close = nearest(name, __all__)
        raise InvalidPatcherError(f"there is no preset {name!r}; nearest: {', '.join(close) or ', '.join(__all__)}.")
    return _documented(_MODULE_OF[name])[name]


@cache
def _documented(module: str) -> dict[str, str]:
    """The text that stands below each constant of a module."""
    home = importlib.import_module(f"patcher.presets.{module}")
    if hasattr(home, "DESCRIPTIONS"):
        return {name: inspect.cleandoc(text) for name, text in home.DESCRIPTIONS.items()}
    body = ast.parse(inspect.getsource(home)).body
    found = {}
    for node, below in pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(node.targets[0])] = inspect.cleandoc(str(below.value.value))
    return found


def for_model(config_or_id: str | PretrainedConfig, **options: Any) -> tuple[Patcher, ...]:
    """The presets that fit a model, the recommended first; none for a model that there is no preset for.

    ```python
    best, *others = presets.for_model("mistralai/Mixtral-8x7B-v0.1")
    ```

    Presets that need a package or a device that isn't here are left out.

    Args:
        config_or_id: a repo id, a folder, or a config.
        options: where the config is: `revision`, `token`, ...

    Raises:
        InvalidPatcherError: it is neither.
        OSError: there is no such repo or folder.
    """
    from patcher.model_classes import config_of

    found = []
    for name in _FOR_MODELS.get(config_of(config_or_id, options).model_type, ()):
        try:
            found.append(__getattr__(name))
        except InvalidPatcherError:
            continue
    return tuple(found)
