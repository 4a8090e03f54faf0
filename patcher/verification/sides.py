"""The two models of a comparison, loaded with varying options; small configs and random checkpoints."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from patcher.checkpoints.model_classes import config_of, model_class_of
from patcher.compat.models import make_from_config
from patcher.construction.in_force import unpatched
from patcher.spec.patcher import Patcher
from patcher.verification.comparing import UncheckedError
from patcher.verification.passes import seeded

#: Models of fewer parameters use one thread: beside other work, several spin while they wait for each other (SmolLM2
#: beside three processes on two cores: 124 processor seconds with two threads, 24 with one).
ONE_THREAD = 2**28
#: The name of a folder of random weights.
RANDOM = "random weights"
#: The attributes of small configs. Queries have 4 heads, keys and values 2, wherever a config lets them differ; a
#: sliding window or a chunk that is shorter than the input would only test the mask.
SMALL: dict[str, Any] = {
    name: value
    for value, names in json.loads(Path(__file__).with_name("small_sizes.json").read_text(encoding="utf-8"))
    for name in names.split()
}


@dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes:
        cls: its class, or an Auto class.
        folder: a repo id or a folder.
        options: keyword arguments of `from_pretrained`.
        patcher: its patcher; without one it is loaded as stock, whatever is in force.
        model: a model in memory instead, which can't be loaded again.
        name: its name in messages.
    """

    cls: Any = None
    folder: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    patcher: Patcher | None = None
    model: Any = None
    name: str = "the patched model"

    @property
    def place(self) -> str:
        """The source of its weights."""
        if self.model is not None:
            return "in memory"
        return RANDOM if isinstance(self.folder, Path) and self.folder.name == RANDOM else str(self.folder)

    @property
    def class_name(self) -> str:
        """The name of the class of the model."""
        name: str = self.cls.__name__ if self.model is None else type(self.model).__name__
        return name

    def load(self, scratch: Path, seed: int, **more: Any) -> Any:
        """Load the model, in eval mode.

        Args:
            scratch: a folder for offloaded weights.
            seed: of weights that the checkpoint doesn't have.
            more: options that override its own.
        """
        if self.model is not None:
            if more != {"dtype": self.model.dtype}:
                raise UncheckedError("a model in memory can't be loaded again with other options")
            return self.model.eval()
        options = {**self.options, **more}
        if options.get("offload_folder") is not None:  # one for each model: files are named after weights
            options["offload_folder"] = tempfile.mkdtemp(prefix="offload-", dir=scratch)
        if self.patcher is not None:
            options["patcher"] = self.patcher
        load = partial(self.cls.from_pretrained, self.folder, **options)
        with seeded(seed):
            model = load() if self.patcher is not None else unpatched(load)
        return model.eval()


def side_of(model: Any, options: Mapping[str, Any], scratch: Path, seed: int, model_class: Any = None) -> Side:
    """Return the side of a repo, a folder or a config, for which a checkpoint of random weights is saved."""
    config = config_of(model, options)
    cls = model_class_of(config, model_class, model, options)
    if isinstance(model, PretrainedConfig):
        model = unpatched(partial(random_checkpoint, cls, config, scratch / RANDOM, seed))
    return Side(cls, model, options)


def random_checkpoint(cls: Any, config: PretrainedConfig, folder: Path, seed: int) -> Path:
    """Save a checkpoint without the zeros and ones of an initialization, which hide mistakes."""
    model = make_from_config(cls, config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
        saved = model.state_dict()
        for name, buffer in model.named_buffers():  # statistics and biases that aren't trained; tables aren't changed
            if name in saved and buffer.is_floating_point() and (buffer == buffer.flatten()[:1]).all():
                buffer.add_(torch.rand(buffer.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return folder


def fit_threads(model: torch.nn.Module) -> None:
    """Set the number of threads: no more than processors, and one for a small model."""
    before = torch.get_num_threads()
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or before
    is_small = sum(parameter.numel() for parameter in model.parameters()) < ONE_THREAD
    torch.set_num_threads(1 if is_small else min(before, available))


def small_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a small config.

    >>> from transformers import Qwen3Config
    >>> config = small_config(Qwen3Config)
    >>> config.hidden_size, config.num_hidden_layers, config.num_key_value_heads
    (64, 2, 2)

    Sizes that depend on each other in a way that their names don't show aren't known.

    Raises:
        Exception: the config refuses the sizes.
    """
    return config_class(**_small(config_class()))


def with_small_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Return parameters of rotary embeddings whose sections, one for each of several axes, fill a small head.

    >>> with_small_sections({"rope_type": "default"})["mrope_section"]
    [2, 2, 4]
    """
    count = len(rope.get("mrope_section") or (1, 1, 1))
    half = int(SMALL["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    others = [half // count] * (count - 1)
    return rope | {"mrope_section": [*others, half - sum(others)]}


def _small(default: PretrainedConfig, *, is_part: bool = False) -> dict[str, Any]:
    """Return the arguments of a small config, and of its sub-configs."""
    known, renamed = default.to_dict(), type(default).attribute_map
    arguments: dict[str, Any] = {}
    for name, value in SMALL.items():
        computed = isinstance(getattr(type(default), renamed.get(name, name), None), property)
        types = {type(item) for item in (getattr(default, name, None), value) if item is not None}
        if name in known | renamed and not computed and len(types) < 2:
            arguments[name] = value
    if "qk_rope_head_dim" in arguments:  # `head_dim` follows from it
        arguments.pop("head_dim", None)
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope and (is_part or "mrope_section" in rope):
        # Of a text model inside of another, which may have rotary embeddings of three axes; others ignore it.
        arguments["rope_parameters"] = with_small_sections(rope)
    for name, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            arguments[name] = _small(part, is_part=True) | {"model_type": part.model_type}
    return arguments
