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

import inspect
import os
import reprlib
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from patcher import InvalidPatcherError, Patcher, errors
from patcher.presets import kernels
from patcher.presets.table import ABOUT, FAMILIES

#: preset -> its family, and the model; LIGER is for whatever model has what it replaces
_PRESETS = {f"{model}_{family.ending}": (family, model) for family in FAMILIES for model in family.pins}
#: models that are a part of another
_PARTS = {"clip_vision_model": "clip", "gemma3_text": "gemma3", "siglip_vision_model": "siglip"}

__all__ = sorted([*_PRESETS, "LIGER"])


class Preset(Patcher):
    """A patcher with a name here, by which it is shown. What `replace` and `|` make of it is a plain `Patcher`."""

    def __repr__(self) -> str:
        return f"presets.{self.name}"


class Fitting(tuple[Patcher, ...]):
    """The presets that fit a model; where there are none, `reason` says why, as its `repr` does."""

    reason: str = ""

    def __repr__(self) -> str:
        return f"()  # {self.reason}" if self.reason else super().__repr__()


def __getattr__(name: str) -> Patcher:
    if name not in __all__:
        raise errors.no_such_name(__name__, name, __dir__())
    if name == "LIGER":  # on access, as it needs a package that may not be installed
        given = kernels.arguments()
    else:
        family, model = _PRESETS[name]
        pins = {cls: found.split() for cls, found in family.pins[model].items()}
        given = {"fusions": family.fusions, "fingerprints": pins}
    return Preset(**given, name=name, transformers=">=5.17,<5.25")


def __dir__() -> list[str]:
    return sorted([*__all__, "best", "describe", "for_model"])


def describe(name: str) -> str:
    """What a preset does, why, for whom, and what was measured.

    >>> print(describe("MIXTRAL_LINEAR_EXPERTS").splitlines()[0])
    Each expert as plain linear layers, which quantizers find.

    Raises:
        AttributeError: there is no such preset.
    """
    if name not in __all__:
        raise errors.no_such_name(__name__, name, __all__)
    if name == "LIGER":
        texts = [inspect.cleandoc(kernels.__doc__ or "")]
    else:
        family, model = _PRESETS[name]
        texts = [family.does, *([ABOUT[model]] if model in ABOUT else []), family.about]
    return "\n\n".join([*texts, f"`patcher bench MODEL --preset {name}` measures it on your machine."])


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
    config: Any = config_or_id
    if not isinstance(config, PretrainedConfig):
        try:
            config = AutoConfig.from_pretrained(os.fspath(config_or_id), **options)
        except Exception as error:
            raise InvalidPatcherError(
                f"{reprlib.repr(config_or_id)} names no model: write the path of a folder that is there, or a repo "
                "that can be reached; for a model in memory write model.config. "
                f"({' '.join(f'{type(error).__name__}: {error}'.split())[:500]})"
            ) from error
    name = _PARTS.get(config.model_type, config.model_type).upper()
    found = [__getattr__(preset) for preset, (_, model) in _PRESETS.items() if model == name]
    reason = "The preset LIGER replaces nothing in it."
    try:
        liger = __getattr__("LIGER")
        found += [liger] * kernels.fits(config)
    except InvalidPatcherError as error:  # it can't be used here
        reason = str(error)
    fitting = Fitting(found)
    if not found:
        known = sorted({model.lower() for family in FAMILIES for model in family.pins})
        fitting.reason = (
            f"No preset was verified on models of the type {config.model_type!r}; there are presets for "
            f"{', '.join(known)}. Fusions need no preset: patcher.plan(model, Patcher(fusions=['qkv'])), or the "
            f"command `patcher plan MODEL --fusion qkv`, says whether one applies. {reason}"
        )
    return fitting
