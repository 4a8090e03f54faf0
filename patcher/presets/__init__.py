"""Patchers that are pinned to the code that they were verified on.

>>> from patcher import presets
>>> from transformers import AutoModel, ViTConfig
>>> config = ViTConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=96, image_size=32)
>>> [preset.name for preset in presets.for_model(config)]  # those that fit, the recommended first
['VIT_LINEAR_PATCH_EMBEDDINGS']
>>> model = AutoModel.from_config(config, patcher=presets.VIT_LINEAR_PATCH_EMBEDDINGS)

A load raises `PresetDriftError` where a transformers release has changed the code that a preset works on.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

from patcher.errors import InvalidPatcherError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from patcher.spec.patcher import Patcher

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

#: preset -> the module of this package that has it, by how it is named
_MODULE_OF = {
    name: module
    for suffix, module in (
        ("_LINEAR_EXPERTS", "experts"),
        ("_LIGER", "kernels"),
        ("_LINEAR_PATCH_EMBEDDINGS", "patch_embeddings"),
        ("_FUSED_PROJECTIONS", "projections"),
    )
    for names in _FOR_MODELS.values()
    for name in names
    if name.endswith(suffix)
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

    >>> print(describe("MIXTRAL_LINEAR_EXPERTS").splitlines()[0])
    Mixtral with each expert as plain linear layers, which quantizers find.

    Raises:
        InvalidPatcherError: there is no such preset.
    """
    if name not in _MODULE_OF:
        from patcher.patterns import nearest

        close = nearest(name, __all__)
        raise InvalidPatcherError(f"there is no preset {name!r}; nearest: {', '.join(close) or ', '.join(__all__)}.")
    home = importlib.import_module(f"patcher.presets.{_MODULE_OF[name]}")
    return f"{_documented(home)[name]}\n\n{inspect.cleandoc(home.__doc__ or '')}"  # its own, and what all have


@cache
def _documented(home: ModuleType) -> dict[str, str]:
    """The text that stands below each constant of a module."""
    if hasattr(home, "DESCRIPTIONS"):
        return dict(home.DESCRIPTIONS)
    found = {}
    for node, below in pairwise(ast.parse(inspect.getsource(home)).body):
        if isinstance(node, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(node.targets[0])] = inspect.cleandoc(str(below.value.value))
    return found


def for_model(config_or_id: str | PretrainedConfig, **options: Any) -> tuple[Patcher, ...]:
    """The presets that fit a model, the recommended first; none for a model that there is no preset for.

    >>> from transformers import MixtralConfig
    >>> for_model(MixtralConfig())[0].name
    'MIXTRAL_LINEAR_EXPERTS'

    Presets that need a package or a device that isn't here are left out.

    Args:
        config_or_id: a repo id, a folder, or a config.
        options: where the config is: `revision`, `token`, ...

    Raises:
        InvalidPatcherError: it is neither.
        OSError: there is no such repo or folder.
    """
    from patcher.checkpoints.model_classes import config_of

    found = []
    for name in _FOR_MODELS.get(config_of(config_or_id, options).model_type, ()):
        try:
            found.append(__getattr__(name))
        except InvalidPatcherError:
            continue
    return tuple(found)
