"""The config and the class of model of a repo, a folder or a config."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from patcher.compat.modeling_code import subclasses
from patcher.compat.models import class_in, remote_class
from patcher.errors import InvalidPatcherError

#: Keyword arguments of `from_pretrained`, and those of them that say where files are, and no more.
Options = Mapping[str, Any]
PLACES = frozenset(
    "cache_dir code_revision force_download local_files_only proxies revision subfolder token trust_remote_code "
    "variant".split()
)
#: How configs call the numbers of what is built one by one, and more than any model has.
_IS_COUNT = re.compile("layer|depth|block|expert|stage")
_MOST_LAYERS = 10_000
#: Auto classes, in this order: what a config without `architectures` is most likely used for.
_TASKS = "ImageTextToText CausalLM Seq2SeqLM MaskedLM SpeechSeq2Seq ImageClassification".split()


def config_of(model: Any, options: Options) -> PretrainedConfig:
    """The config of a repo or a folder, or the config that is given, as a copy.

    Raises:
        InvalidPatcherError: it is neither, there is no such repo, nothing may be fetched, or none that can be read.
    """
    if isinstance(model, PretrainedConfig):
        return _checked(deepcopy(model), type(model).__name__)
    if not isinstance(model, str | os.PathLike):
        raise InvalidPatcherError(
            f"a model is named by its repo, its folder or its config, found {reprlib.repr(model)} "
            f'({type(model).__name__}); write "./folder", the name of a repo, or for a model in memory model.config.'
        )
    places = {name: value for name, value in options.items() if name in PLACES - {"variant"}}
    file = Path(model, options.get("subfolder") or "", "config.json")
    try:
        if file.exists() and not file.is_file():  # whoever opens a pipe waits
            raise ValueError(f"{file} isn't a regular file, but a folder, a pipe or a device")
        if not Path(model).exists():
            _reach_hub(str(model), places)
        config: PretrainedConfig = AutoConfig.from_pretrained(model, **places)
    except Exception as error:
        hint = "Fetch its config.json again, or install the release of transformers that knows it."
        if not Path(model).exists():
            hint = "There is no such folder: write the path of one that is there, or a repo that can be reached."
        elif not file.exists():
            hint = "It has no config.json: write the folder of a model; for an adapter, that of its base model."
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise InvalidPatcherError(f"{str(model)!r} isn't a model that can be used here. {hint} ({reason})") from error
    return _checked(config, str(model))


def _reach_hub(repo: str, places: Options) -> None:
    """Raise where a repo has to be fetched and the hub can't be reached: a load would try that six times, in half a
    minute, and what was meant is most likely a folder."""
    cached = {name: places[name] for name in ("cache_dir", "revision") if name in places}
    try:
        if places.get("local_files_only") or try_to_load_from_cache(repo, "config.json", **cached) is not None:
            return
        HfApi(token=places.get("token")).repo_exists(repo)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return  # transformers says what that means
    except Exception as error:
        raise OSError(f"{constants.ENDPOINT} can't be reached: {error}") from error


def _checked(config: PretrainedConfig, where: str) -> PretrainedConfig:
    """The config, if a model of it can be built in bounded time: its layers are built one by one."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _checked(value, where)
        elif type(value) is int and value > _MOST_LAYERS and _IS_COUNT.search(name):
            raise InvalidPatcherError(
                f"the config of {where} says {name}={value}, and at most {_MOST_LAYERS:,} make sense. Fetch it again, "
                "or correct it."
            )
    return config


def model_class_of(
    config: PretrainedConfig, model_class: Any, model: Any = None, options: Options | None = None
) -> type[PreTrainedModel]:
    """The class of model to load: the one that is given, or that an Auto class has, or that the config names.

    Raises:
        InvalidPatcherError: nothing says which.
    """
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return model_class
    options = options or {}
    if model_class is not None:
        found = _brought(getattr(model_class, "__name__", ""), config, model, options) or class_in(model_class, config)
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
    if found := next(filter(None, [*known.values(), class_in(transformers.AutoModel, config)]), None):
        return found
    raise InvalidPatcherError(
        f"No Auto class knows {type(config).__name__}, and it names no architecture; pass model_class=."
    )


def _named(name: str, config: PretrainedConfig, model: Any, options: Options) -> type[PreTrainedModel] | None:
    for auto, reference in (getattr(config, "auto_map", None) or {}).items():
        if str(reference).rpartition(".")[2] == name and (found := _brought(auto, config, model, options)):
            return found
    found = getattr(transformers, str(name), None)
    # A module may register its own.
    known = [cls for cls in subclasses(PreTrainedModel) if cls.__name__ == name] if found is None else [found]
    return next((cls for cls in known if isinstance(cls, type) and issubclass(cls, PreTrainedModel)), None)


def _brought(auto: str, config: PretrainedConfig, model: Any, options: Options) -> type[PreTrainedModel] | None:
    """The class that the repo brings for an Auto class, if its code may be run."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto)
    if not options.get("trust_remote_code") or not isinstance(reference, str):
        return None
    names = PLACES - {"subfolder", "trust_remote_code", "variant"}
    return remote_class(reference, str(model), **{name: options[name] for name in names & options.keys()})
