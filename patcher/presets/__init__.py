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

import difflib
import importlib
import inspect
import os
from typing import TYPE_CHECKING, Any

from patcher import errors
from patcher.errors import InvalidPatcherError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from patcher import Patcher

#: module of this package -> how its presets are named, and for which models
_FAMILIES = {
    "experts": ("LINEAR_EXPERTS", "DEEPSEEK_V3 GPT_OSS MIXTRAL OLMOE QWEN2_MOE QWEN3_MOE"),
    "patch_embeddings": ("LINEAR_PATCH_EMBEDDINGS", "CLIP GLM4V QWEN2_5_VL QWEN2_VL QWEN3_VL SIGLIP VIT"),
    "projections": ("FUSED_PROJECTIONS", "BERT GEMMA3 LLAMA MISTRAL PHI QWEN2 QWEN3"),
}
#: preset -> the module of this package that has it, and the model
_PRESETS = {f"{model}_{what}": (home, model) for home, (what, models) in _FAMILIES.items() for model in models.split()}
_PRESETS["LIGER"] = ("kernels", "")  # for whatever model has what it replaces
_WHERE = "with one thread of an AMD EPYC that other programs used as well, in float32, torch 2.13.0"
#: preset -> what `benchmark` has measured of it, and where
_MEASURED = {
    "LLAMA_FUSED_PROJECTIONS": f"on SmolLM2-135M {_WHERE}: in 11 rounds no difference of prompts and decoding, of the "
    "whole and of its parts; loading 1.33 and memory 1.12 of stock's, which only maps the file.",
    "BERT_FUSED_PROJECTIONS": f"on all-MiniLM-L6-v2 {_WHERE}: in 31 rounds no difference of inference and training "
    "together (one row of 32 tokens 1.05 of stock's time); loading 1.17 and memory 1.15 of stock's.",
    "MIXTRAL_LINEAR_EXPERTS": f"on a Mixtral of four layers and four experts, made of SmolLM2's weights, {_WHERE}: in "
    "6 rounds no difference of prompts and decoding together (decoding eight rows 1.07 of stock's time); loading "
    "0.51 and memory 0.56 of stock's.",
}
#: models that are a part of another
_PARTS = {"clip_vision_model": "clip", "gemma3_text": "gemma3", "siglip_vision_model": "siglip"}

__all__ = sorted(_PRESETS)


def __getattr__(name: str) -> Patcher:
    if name not in _PRESETS:
        raise errors.no_such_name(__name__, name, __dir__())
    from patcher.presets.preset import Preset

    home, model = _family(name)
    # On access: a preset may need a package that isn't installed, and the list of names needs none.
    return Preset(**home.arguments(model), name=name, transformers=">=5.17,<5.25")


def _family(name: str) -> tuple[Any, str]:
    home, model = _PRESETS[name]
    return importlib.import_module(f"patcher.presets.{home}"), model


def __dir__() -> list[str]:
    return sorted([*__all__, "best", "describe", "for_model"])


def describe(name: str) -> str:
    """What a preset does, why, for whom, and what was measured.

    >>> print(describe("MIXTRAL_LINEAR_EXPERTS").splitlines()[0])
    Mixtral with each expert as plain linear layers, which quantizers find.

    Raises:
        InvalidPatcherError: there is no such preset.
    """
    if name not in _PRESETS:
        close = difflib.get_close_matches(str(name).upper(), __all__)
        raise InvalidPatcherError(f"there is no preset {name!r}; nearest: {', '.join(close) or ', '.join(__all__)}.")
    home, model = _family(name)
    measured = f"`patcher bench MODEL --preset {name}` measures it on your machine."
    if name in _MEASURED:
        measured = f"Measured by `patcher.benchmark` {_MEASURED[name]}\n{measured}"
    return f"{home.describe(model)}\n\n{measured}\n\n{inspect.cleandoc(home.__doc__)}"  # its own, and what all have


class Fitting(tuple["Patcher", ...]):
    """The presets that fit a model; where there are none, `reason` says why, as its `repr` does."""

    reason: str = ""

    def __repr__(self) -> str:
        return f"()  # {self.reason}" if self.reason else super().__repr__()


def best(config_or_id: str | PretrainedConfig, **options: Any) -> Patcher:
    """The recommended preset for a model, the first of `for_model`.

    >>> from transformers import LlamaConfig
    >>> best(LlamaConfig())
    presets.LLAMA_FUSED_PROJECTIONS

    Raises:
        InvalidPatcherError: none fits, and why; or what `for_model` raises.
    """
    found = for_model(config_or_id, **options)
    if not found:
        raise InvalidPatcherError(found.reason)
    return found[0]


def for_model(config_or_id: str | PretrainedConfig, **options: Any) -> Fitting:
    """The presets that fit a model, the recommended first; none, with the reason, where there is no preset for it.

    >>> from transformers import MixtralConfig
    >>> for_model(MixtralConfig())[0].name
    'MIXTRAL_LINEAR_EXPERTS'

    Presets that need a package or a device that isn't here are left out.

    Args:
        config_or_id: a repo id, a folder, or a config.
        options: where the config is: `revision`, `token`, ...

    Raises:
        InvalidPatcherError: it is neither, or there is no such repo or folder.
    """
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config_or_id, str | os.PathLike):
        try:
            config_or_id = AutoConfig.from_pretrained(config_or_id, **options)
        except (OSError, ValueError) as error:
            raise InvalidPatcherError(
                f"{str(config_or_id)!r} names no model: write the path of a folder that is there, or a repo that can "
                f"be reached. ({' '.join(str(error).split())})"
            ) from error
    if not isinstance(config_or_id, PretrainedConfig):
        raise InvalidPatcherError(
            "a model is named by its repo, its folder or its config, found "
            f"{config_or_id!r} ({type(config_or_id).__name__}); "
            "for a model in memory write model.config."
        )
    model_type = config_or_id.model_type
    names = [f"{_PARTS.get(model_type, model_type).upper()}_{what}" for what, _ in _FAMILIES.values()]
    found = [__getattr__(name) for name in filter(_PRESETS.__contains__, names)]
    reason = "The preset LIGER replaces nothing in it."
    try:
        kernels = __getattr__("LIGER")
        found += [kernels] * _family("LIGER")[0].fits(config_or_id)
    except InvalidPatcherError as error:  # it can't be used here
        reason = str(error)
    fitting = Fitting(found)
    if not found:
        known = sorted({model.lower() for _, models in _FAMILIES.values() for model in models.split()})
        fitting.reason = (
            f"No preset was verified on models of the type {model_type!r}; there are presets for {', '.join(known)}. "
            "Fusions need no preset: patcher.plan(model, Patcher(fusions=['qkv'])), or the command "
            f"`patcher plan MODEL --fusion qkv`, says whether one applies. {reason}"
        )
    return fitting
