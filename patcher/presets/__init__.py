"""Verified patchers, pinned to the modeling code on which they were verified.

>>> from patcher import presets
>>> from transformers import AutoModel, ViTConfig
>>> config = ViTConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=96, image_size=32)
>>> [preset.name for preset in presets.for_model(config)]  # the presets that fit, the recommended one first
['VIT_LINEAR_PATCH_EMBEDDINGS']
>>> model = AutoModel.from_config(config, patcher=presets.VIT_LINEAR_PATCH_EMBEDDINGS)

A load raises `PresetDriftError` if a transformers release has changed the code that a preset patches.
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

#: preset -> its family and model; LIGER is for all models with classes that it replaces
_PRESETS = {f"{model}_{family.ending}": (family, model) for family in FAMILIES for model in family.pins}
#: type of a model -> type of the model that it is a part of
_PARTS = {"clip_vision_model": "clip", "gemma3_text": "gemma3", "siglip_vision_model": "siglip"}

NAMES = sorted([*_PRESETS, "LIGER"])
__all__ = sorted(_PRESETS)  # LIGER needs a GPU and a package, which `from patcher.presets import *` doesn't


class Preset(Patcher):
    """A patcher that is shown by its name in this module. `replace` and `|` return a plain `Patcher`."""

    def __repr__(self) -> str:
        return f"presets.{self.name}"


class Fitting(tuple[Patcher, ...]):
    """The presets that fit a model; if there are none, `reason` and the `repr` say why."""

    reason: str = ""

    def __repr__(self) -> str:
        return f"()  # {self.reason}" if self.reason else super().__repr__()


def __getattr__(name: str) -> Patcher:
    if name not in NAMES:
        raise errors.no_such_name(__name__, name, __dir__())
    if name == "LIGER":  # created on access, because it needs an optional package
        arguments = kernels.arguments()
    else:
        family, model = _PRESETS[name]
        pins = {cls: fingerprints.split() for cls, fingerprints in family.pins[model].items()}
        arguments = {"fusions": family.fusions, "fingerprints": pins}
    return Preset(**arguments, name=name, transformers=">=5.17,<5.25")


def __dir__() -> list[str]:
    return sorted([*NAMES, "best", "describe", "for_model"])


def describe(name: str) -> str:
    """Return the description of a preset: what it does, what it gains, and what was measured.

    >>> print(describe("MIXTRAL_LINEAR_EXPERTS").splitlines()[0])
    Each expert as plain linear layers, which quantizers find.

    Raises:
        AttributeError: if there is no such preset.
    """
    if name not in NAMES:
        raise errors.no_such_name(__name__, name, NAMES)
    if name == "LIGER":
        texts = [inspect.cleandoc(kernels.__doc__ or "")]
    else:
        family, model = _PRESETS[name]
        texts = [family.does, family.about, *([ABOUT[model]] if model in ABOUT else [])]
    return "\n\n".join([*texts, f"`patcher bench MODEL --preset {name}` measures it on your machine."])


def best(config_or_id: str | PretrainedConfig, **options: Any) -> Patcher:
    """Return the recommended preset for a model, the first of `for_model`.

    >>> from transformers import LlamaConfig
    >>> best(LlamaConfig())
    presets.LLAMA_FUSED_PROJECTIONS

    Raises:
        InvalidPatcherError: if none fits; or what `for_model` raises.
    """
    fitting = for_model(config_or_id, **options)
    if not fitting:
        raise InvalidPatcherError(fitting.reason)
    return fitting[0]


def for_model(config_or_id: str | PretrainedConfig, **options: Any) -> Fitting:
    """Return the presets that fit a model, the recommended one first; if none does, an empty tuple with the reason.

    >>> from transformers import MixtralConfig
    >>> for_model(MixtralConfig())[0].name
    'MIXTRAL_LINEAR_EXPERTS'

    Presets that need a missing package or device are left out.

    Args:
        config_or_id: a repo id, a folder, or a config.
        options: arguments of `AutoConfig.from_pretrained`: `revision`, `token`, ...

    Raises:
        InvalidPatcherError: if it is none of these, or there is no such repo or folder.
    """
    config: Any = config_or_id
    if not isinstance(config, PretrainedConfig):
        try:
            config = AutoConfig.from_pretrained(os.fspath(config_or_id), **options)
        except Exception as error:
            raise InvalidPatcherError(
                f"{reprlib.repr(config_or_id)} doesn't name a model: write the path of an existing folder, or a repo "
                "that can be reached; for a model in memory write model.config. "
                f"({' '.join(f'{type(error).__name__}: {error}'.split())[:500]})"
            ) from error
    name = _PARTS.get(config.model_type, config.model_type).upper()
    matching = [__getattr__(preset) for preset, (_, model) in _PRESETS.items() if model == name]
    reason = "The preset LIGER replaces nothing in it."
    try:
        liger = __getattr__("LIGER")
        matching += [liger] * kernels.fits(config)
    except InvalidPatcherError as error:  # a package or a device is missing
        reason = str(error)
    fitting = Fitting(matching)
    if not fitting:
        known = sorted({model.lower() for family in FAMILIES for model in family.pins})
        fitting.reason = (
            f"No preset was verified on models of the type {config.model_type!r}; there are presets for "
            f"{', '.join(known)}. Fusions need no preset: patcher.plan(model, Patcher(fusions=['qkv'])), or the "
            f"command `patcher plan MODEL --fusion qkv`, says whether one applies. {reason}"
        )
    return fitting
