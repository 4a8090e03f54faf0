"""The config and the model class of a repo, a folder or a config."""

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

#: Keyword arguments of `from_pretrained`, and the names of those that only locate files.
Options = Mapping[str, Any]
PLACES = frozenset(
    "cache_dir code_revision force_download local_files_only proxies revision subfolder token trust_remote_code "
    "variant".split()
)
#: Names of config attributes that count modules, and a limit that no model reaches.
_IS_COUNT = re.compile("layer|depth|block|expert|stage")
_MAX_COUNT = 10_000
#: Tasks of Auto classes for a config without `architectures`, the most likely one first.
_TASKS = "ImageTextToText CausalLM Seq2SeqLM MaskedLM SpeechSeq2Seq ImageClassification".split()


def config_of(model: Any, options: Options) -> PretrainedConfig:
    """Load the config of a repo or a folder, or copy a config.

    Raises:
        InvalidPatcherError: if `model` is none of these, can't be reached, or has no readable config.
    """
    if isinstance(model, PretrainedConfig):
        return _checked(deepcopy(model), type(model).__name__)
    if not isinstance(model, str | os.PathLike):
        raise InvalidPatcherError(
            f"a model is given by its repo, its folder or its config, found {reprlib.repr(model)} "
            f'({type(model).__name__}); write "./folder", the name of a repo, or for a model in memory model.config.'
        )
    places = {name: value for name, value in options.items() if name in PLACES - {"variant"}}
    file = Path(model, options.get("subfolder") or "", "config.json")
    try:
        if file.exists() and not file.is_file():  # opening a pipe would block
            raise ValueError(f"{file} isn't a regular file, but a folder, a pipe or a device")
        if not Path(model).exists():
            _reach_hub(str(model), places)
        config: PretrainedConfig = AutoConfig.from_pretrained(model, **places)
    except Exception as error:
        hint = "Fetch its config.json again, or install the release of transformers that knows it."
        if "trust_remote_code" in str(error):  # transformers' own message ends with it
            hint = "It has code of its own: if you trust that, pass trust_remote_code=True (--trust-remote-code)."
        elif not Path(model).exists():
            hint = "There is no such folder: write the path of one that is there, or a repo that can be reached."
        elif not file.exists():
            hint = "It has no config.json: write the folder of a model; for an adapter, that of its base model."
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise InvalidPatcherError(f"{str(model)!r} isn't a model that can be used here. {hint} ({reason})") from error
    return _checked(config, str(model))


def _reach_hub(repo: str, places: Options) -> None:
    """Raise at once, where a load retries for half a minute, if the repo isn't cached and can't be reached."""
    cached = {name: places[name] for name in ("cache_dir", "revision") if name in places}
    try:
        if places.get("local_files_only") or try_to_load_from_cache(repo, "config.json", **cached) is not None:
            return
        HfApi(token=places.get("token")).repo_exists(repo)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        return  # transformers' own error is clearer
    except Exception as error:
        raise OSError(f"{constants.ENDPOINT} can't be reached: {error}") from error


def _checked(config: PretrainedConfig, where: str) -> PretrainedConfig:
    """Return the config if its counts of modules are plausible: a skeleton with a billion layers never gets built."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _checked(value, where)
        elif type(value) is int and value > _MAX_COUNT and _IS_COUNT.search(name):
            raise InvalidPatcherError(
                f"the config of {where} says {name}={value}, and at most {_MAX_COUNT:,} make sense. Fetch it again, "
                "or correct it."
            )
    return config


def model_class_of(
    config: PretrainedConfig, model_class: Any, model: Any = None, options: Options | None = None
) -> type[PreTrainedModel]:
    """Return the class to load: `model_class` itself, the class that it chooses as an Auto class, or the config's.

    Raises:
        InvalidPatcherError: if there is no such class.
    """
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return model_class
    options = options or {}
    if model_class is not None:
        auto = getattr(model_class, "__name__", "")
        cls = _remote_class(auto, config, model, options) or class_in(model_class, config)
        if cls is None:
            raise InvalidPatcherError(
                f"model_class= takes a model class, or an Auto class that supports {type(config).__name__}, found "
                f"{model_class!r}; write model_class=AutoModel."
            )
        return cls
    for name in config.architectures or ():
        if (cls := _class_named(name, config, model, options)) is not None:
            return cls
    if config.architectures:
        raise InvalidPatcherError(
            f"The config names {config.architectures[0]} as its architecture, which transformers doesn't have; pass "
            "model_class=, or trust_remote_code=True if the repo has its code."
        )
    classes = {task: class_in(getattr(transformers, f"AutoModelFor{task}"), config) for task in _TASKS}
    if classes["MaskedLM"] is not None and not getattr(config, "is_decoder", False):
        classes["CausalLM"] = None  # a decoder variant of an encoder
    if cls := next(filter(None, [*classes.values(), class_in(transformers.AutoModel, config)]), None):
        return cls
    raise InvalidPatcherError(
        f"No Auto class supports {type(config).__name__}, and it names no architecture; pass model_class=."
    )


def _class_named(name: str, config: PretrainedConfig, model: Any, options: Options) -> type[PreTrainedModel] | None:
    for auto, reference in (getattr(config, "auto_map", None) or {}).items():
        if str(reference).rpartition(".")[2] == name and (cls := _remote_class(auto, config, model, options)):
            return cls
    registered = (cls for cls in subclasses(PreTrainedModel) if cls.__name__ == name)  # outside of transformers
    cls = getattr(transformers, str(name), None) or next(registered, None)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None


def _remote_class(auto: str, config: PretrainedConfig, model: Any, options: Options) -> type[PreTrainedModel] | None:
    """Return the class of the repo's code for an Auto class, if that code may run."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto)
    if not options.get("trust_remote_code") or not isinstance(reference, str):
        return None
    names = PLACES - {"subfolder", "trust_remote_code", "variant"}
    return remote_class(reference, str(model), **{name: options[name] for name in names & options.keys()})
