"""A small config of an architecture, by one table of attribute names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

#: What makes a model small: the name of an attribute -> its value. Queries have 4 heads, keys and values 2, wherever a
#: config lets them differ; a sliding window or a chunk that is shorter than the input would only test the mask.
SMALL: dict[str, Any] = {
    name: value
    for value, names in json.loads(Path(__file__).with_name("small_sizes.json").read_text(encoding="utf-8"))
    for name in names.split()
}
#: The names of numbers of layers.
COUNTS_OF_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers encoder_depth decoder_depth"
)


def small_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """A config as small as it can be.

    >>> from transformers import Qwen3Config
    >>> config = small_config(Qwen3Config)
    >>> config.hidden_size, config.num_hidden_layers, config.num_key_value_heads
    (64, 2, 2)

    Sizes that depend on each other in a way that their names don't show aren't known: for such an architecture the
    caller gives a config.

    Raises:
        Exception: what the config says of sizes that don't fit together.
    """
    return config_class(**_small(config_class()))


def _small(default: PretrainedConfig) -> dict[str, Any]:
    """Arguments for a config like this one: what the table has for it, and for the configs inside of it."""
    known, renamed = default.to_dict(), type(default).attribute_map
    arguments: dict[str, Any] = {}
    for name, value in SMALL.items():
        computed = isinstance(getattr(type(default), renamed.get(name, name), None), property)
        if name in known | renamed and not computed and _of_a_type(getattr(default, name, None), value):
            arguments[name] = value
    if "qk_rope_head_dim" in arguments:  # of the part with rotary embeddings alone: it follows
        arguments.pop("head_dim", None)
    for name, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            arguments[name] = _small(part) | {"model_type": part.model_type}
    return arguments


def _of_a_type(one: Any, other: Any) -> bool:
    return one is None or other is None or type(one) is type(other)
