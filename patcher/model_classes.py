"""Which config and which class of model are meant by a repo, a folder or a config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from patcher import seams
from patcher.errors import InvalidPatcherError
from patcher.matching import module_subclasses

__all__ = ["PLACES", "config_of", "model_class_of"]

#: The options of `from_pretrained` that say where files are, and no more.
PLACES = frozenset(
    {
        "cache_dir",
        "code_revision",
        "force_download",
        "local_files_only",
        "proxies",
        "revision",
        "subfolder",
        "token",
        "trust_remote_code",
        "variant",
    }
)
_CODE_PLACES = PLACES - {"subfolder", "trust_remote_code", "variant"}
# In this order: what a config without `architectures` is most likely used for.
_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
    "AutoModel",
)


def config_of(model: Any, options: Mapping[str, Any]) -> PretrainedConfig:
    """The config of a repo or a folder, or the config that is given, as a copy.

    Raises:
        InvalidPatcherError: it is neither.
        OSError: there is no such repo, or nothing may be fetched.
    """
    if isinstance(model, PretrainedConfig):
        return deepcopy(model)
    if not isinstance(model, str | os.PathLike):
        raise InvalidPatcherError(
            f"a model is named by its repo, its folder or its config, found {model!r} ({type(model).__name__}); "
            "for a model in memory write model.config."
        )
    places = {name: value for name, value in options.items() if name in PLACES - {"variant"}}
    config: PretrainedConfig = AutoConfig.from_pretrained(model, **places)
    return config


def model_class_of(
    config: PretrainedConfig, model_class: Any, model: Any = None, options: Mapping[str, Any] | None = None
) -> type[PreTrainedModel]:
    """The class of model to load: the one that is given, or that an Auto class has, or that the config names.

    Raises:
        InvalidPatcherError: nothing says which.
    """
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return model_class
    if model_class is not None:
        found = _remote(getattr(model_class, "__name__", ""), config, model, options or {})
        if found is None and hasattr(model_class, "_model_mapping"):
            found = seams.class_in(model_class, config)
        if found is None:
            raise InvalidPatcherError(
                f"model_class= takes a class of model, or an Auto class that knows {type(config).__name__}, found "
                f"{model_class!r}; write model_class=AutoModel."
            )
        return found
    for name in config.architectures or ():
        named = _named(name, config, model, options or {})
        if named is not None:
            return named
    if config.architectures:
        raise InvalidPatcherError(
            f"The config names {config.architectures[0]} as its architecture, which transformers doesn't have; pass "
            "model_class=, or trust_remote_code=True if the repo brings its code."
        )
    for name in _AUTO_CLASSES:
        found = seams.class_in(getattr(transformers, name), config)
        if found is not None and not (name == "AutoModelForCausalLM" and _is_encoder(config)):
            return found
    raise InvalidPatcherError(
        f"No Auto class knows {type(config).__name__}, and it names no architecture; pass model_class=."
    )


def _is_encoder(config: PretrainedConfig) -> bool:
    """Whether the model fills in masked words, though there is a variant of it that goes on with a text."""
    masked = seams.class_in(transformers.AutoModelForMaskedLM, config) is not None
    return masked and not getattr(config, "is_decoder", False)


def _named(
    name: str, config: PretrainedConfig, model: Any, options: Mapping[str, Any]
) -> type[PreTrainedModel] | None:
    for auto, reference in (getattr(config, "auto_map", None) or {}).items():
        if isinstance(reference, str) and reference.rpartition(".")[2] == name:
            found = _remote(auto, config, model, options)
            if found is not None:
                return found
    cls = getattr(transformers, name, None)
    if cls is None:  # of a module that registers its own
        cls = next((each for each in module_subclasses(name.__eq__) if issubclass(each, PreTrainedModel)), None)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None


def _remote(
    auto: str, config: PretrainedConfig, model: Any, options: Mapping[str, Any]
) -> type[PreTrainedModel] | None:
    """The class that the repo brings for an Auto class, if its code may be run."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto)
    if not options.get("trust_remote_code") or not isinstance(reference, str):
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    places = {key: value for key, value in options.items() if key in _CODE_PLACES}
    found: type[PreTrainedModel] = get_class_from_dynamic_module(reference, str(model), **places)
    return found
