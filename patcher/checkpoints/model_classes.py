"""Which config and which class of model are meant by a repo, a folder or a config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from patcher.compat.modeling_code import module_subclasses
from patcher.compat.models import class_in, remote_class
from patcher.errors import InvalidPatcherError

#: The options of `from_pretrained` that say where files are, and no more.
PLACES = frozenset(
    "cache_dir code_revision force_download local_files_only proxies revision subfolder token trust_remote_code "
    "variant".split()
)
#: Auto classes, in this order: what a config without `architectures` is most likely used for.
_TASKS = "ImageTextToText CausalLM Seq2SeqLM MaskedLM SpeechSeq2Seq ImageClassification".split()


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
    options = options or {}
    if model_class is not None:
        auto = getattr(model_class, "__name__", "")
        found = _brought(auto, config, model, options) or class_in(model_class, config)
        if found is None:
            raise InvalidPatcherError(
                f"model_class= takes a class of model, or an Auto class that knows {type(config).__name__}, found "
                f"{model_class!r}; write model_class=AutoModel."
            )
        return found
    for name in config.architectures or ():
        if (named := _named(name, config, model, options)) is not None:
            return named
    if config.architectures:
        raise InvalidPatcherError(
            f"The config names {config.architectures[0]} as its architecture, which transformers doesn't have; pass "
            "model_class=, or trust_remote_code=True if the repo brings its code."
        )
    known = {task: class_in(getattr(transformers, f"AutoModelFor{task}"), config) for task in _TASKS}
    if known["MaskedLM"] is not None and not getattr(config, "is_decoder", False):
        known["CausalLM"] = None  # a variant that goes on with a text, of a model that fills in masked words
    for found in [*known.values(), class_in(transformers.AutoModel, config)]:
        if found is not None:
            return found
    raise InvalidPatcherError(
        f"No Auto class knows {type(config).__name__}, and it names no architecture; pass model_class=."
    )


def _named(
    name: str, config: PretrainedConfig, model: Any, options: Mapping[str, Any]
) -> type[PreTrainedModel] | None:
    for auto, reference in (getattr(config, "auto_map", None) or {}).items():
        if str(reference).rpartition(".")[2] == name and (found := _brought(auto, config, model, options)):
            return found
    cls = getattr(transformers, name, None)
    known = module_subclasses(name.__eq__) if cls is None else [cls]  # those of a module that registers its own
    return next((cls for cls in known if isinstance(cls, type) and issubclass(cls, PreTrainedModel)), None)


def _brought(
    auto: str, config: PretrainedConfig, model: Any, options: Mapping[str, Any]
) -> type[PreTrainedModel] | None:
    """The class that the repo brings for an Auto class, if its code may be run."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto)
    if not options.get("trust_remote_code") or not isinstance(reference, str):
        return None
    names = PLACES - {"subfolder", "trust_remote_code", "variant"}
    places = {key: value for key, value in options.items() if key in names}
    return remote_class(reference, str(model), **places)
