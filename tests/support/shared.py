"""Tiny checkpoints and stock models that many tests only read: made once a session, for each config.

    >>> from tests.support.shared import checkpoint, stock
    >>> from tests.support.tiny import tiny_llama_config
    >>> stock(tiny_llama_config()) is stock(tiny_llama_config())
    True

A test that writes to one of them fails, see `changed`, and the next one gets another.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Hashable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

__all__ = ["changed", "checkpoint", "output_of", "remove", "stock"]

_folder: list[str] = []  # in which all lie, as soon as there are any
_checkpoints: dict[Hashable, tuple[Path, object]] = {}
_models: dict[Hashable, tuple[Any, object]] = {}
_outputs: dict[tuple[Hashable, object], Any] = {}
_lent: set[Hashable] = set()
T = TypeVar("T")


def checkpoint(
    config: PretrainedConfig,
    *,
    model_class: Any = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> Path:
    """The folder of a tiny model of a config, with random weights, saved by stock transformers.

    Args:
        model_class: a model class or an Auto class; by default the model with the usual language head.
        max_shard_size: with "100KB" the checkpoint is sharded.
    """
    from tests.support.tiny import build_tiny  # which copies from here what a test wants for itself

    key = _key(config, model_class, dtype, seed, max_shard_size)
    if key not in _checkpoints:
        if not _folder:
            _folder.append(tempfile.mkdtemp(prefix="patcher-tests-shared-"))
        folder = Path(tempfile.mkdtemp(dir=_folder[0]))
        model = build_tiny(deepcopy(config), model_class=model_class, dtype=dtype, seed=seed)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        _checkpoints[key] = folder, _files(folder)
    return _checkpoints[key][0]


def stock(source: PretrainedConfig | Path, model_class: Any = AutoModelForCausalLM) -> Any:
    """The stock model of a checkpoint that is shared, loaded, in eval mode.

    Args:
        source: the config, or the folder of the checkpoint. What lies in another folder is loaded anew.
        model_class: the class or Auto class that loads it.
    """
    folder = source if isinstance(source, Path) else checkpoint(source)
    if folder not in [each for each, _ in _checkpoints.values()]:
        return model_class.from_pretrained(folder)
    key = folder, model_class
    if key not in _models:
        model = model_class.from_pretrained(folder)
        _models[key] = model, _state(model)
    _lent.add(key)
    return _models[key][0]


def output_of(model: Any, compute: Callable[[Any], T]) -> T:
    """What is computed with a model: of a stock model that is shared once, if nobody has changed it meanwhile."""
    key = next((key for key in _lent if _models[key][0] is model), None)
    if key is None or _state(model) != _models[key][1]:
        return compute(model)
    if (key, compute) not in _outputs:
        _outputs[key, compute] = compute(model)
    return _outputs[key, compute]


def changed() -> list[str]:
    """What is no longer as it was made: every checkpoint, and every model that was given since the last call."""
    folders = [key for key, (folder, files) in _checkpoints.items() if _files(folder) != files]
    models = [key for key in _lent if _state(_models[key][0]) != _models[key][1]]
    _lent.clear()
    said = [str(_checkpoints.pop(key)[0]) for key in folders]
    for key in [key for key in _outputs if key[0] in models]:
        del _outputs[key]
    return said + [type(_models.pop(key)[0]).__name__ for key in models]


def remove() -> None:
    """Remove all of it from the disk, at the end of a session."""
    for folder in _folder:
        shutil.rmtree(folder, ignore_errors=True)


def _key(config: PretrainedConfig, *options: object) -> Hashable:
    return type(config), json.dumps(config.to_dict(), sort_keys=True, default=str), str(options)


def _files(folder: Path) -> object:
    stats = [(path.name, path.stat()) for path in folder.iterdir()]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _state(model: PreTrainedModel) -> object:
    """Its classes, modes, hooks and attributes, and the bytes of its tensors."""
    modules = [
        (name, type(module), module.training, {*vars(module)}, [*module._forward_hooks, *module._forward_pre_hooks])
        for name, module in model.named_modules()
    ]
    tensors = [
        (name, tensor.requires_grad, tensor.grad is None, zlib.crc32(tensor.detach().view(torch.uint8).numpy().data))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return modules, tensors
