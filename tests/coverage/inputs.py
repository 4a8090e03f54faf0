"""Inputs of models that take something of their own, by the names of what their forward takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patcher.verification.inputs import Pass
from patcher.verification.passes import parameters_of

__all__ = ["particular_passes"]


def particular_passes(model: Any) -> list[Pass]:
    """Passes that are tried before any is guessed."""
    generator = torch.Generator().manual_seed(0)
    taken = parameters_of(model)
    found: list[dict[str, Any]] = []
    for names, arguments in _TABLE.items():
        if taken.keys() >= set(names.split()):
            made = arguments(model.config, generator)
            found += made if isinstance(made, list) else [made]
    known = [{name: value for name, value in one.items() if name in taken} for one in found]
    return [Pass("forward", one) for one in known]


def _text(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (2, 12), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pictures(config: Any, generator: torch.Generator) -> torch.Tensor:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(2, config.num_channels, height, width, generator=generator)


def _series(config: Any, generator: torch.Generator) -> list[dict[str, Any]]:
    """The last values of a series: of several channels, or of one."""
    length = getattr(config, "context_length", 64)
    channels = torch.randn(2, length, getattr(config, "num_input_channels", 1), generator=generator)
    one = torch.randn(2, length, generator=generator)
    rest = {"past_values_padding": torch.zeros(2, length), "freq": torch.zeros(2, 1, dtype=torch.long)}
    more = rest | {"past_values_padding": torch.zeros(2, length, dtype=torch.long)}
    return [{"past_values": channels}, {"past_values": one} | rest, {"past_values": one} | more]


def _series_with_features(config: Any, generator: torch.Generator) -> dict[str, Any]:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=generator)

    return {
        "past_values": random(past),
        "past_time_features": random(past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": random(future),
        "future_time_features": random(future, config.num_time_features),
    }


def _prompted_pictures(config: Any, generator: torch.Generator) -> dict[str, Any]:
    height, width = config.image_size
    half = {"pixel_values", "prompt_pixel_values", "prompt_masks"}
    shape = (2, config.num_channels, height // 2, width)
    return {name: torch.randn(shape, generator=generator) for name in sorted(half)}


def _objects(config: Any, generator: torch.Generator) -> dict[str, Any]:
    seen = torch.randn(2, 5, config.visual_feat_dim, generator=generator)
    return _text(generator) | {"visual_feats": seen, "visual_pos": torch.rand(2, 5, 4, generator=generator)}


def _draft(config: Any, generator: torch.Generator) -> dict[str, Any]:
    width = config.hidden_size * len(config.target_layer_ids)
    return {
        "noise_embeds": torch.randn(2, config.block_size, config.hidden_size, generator=generator),
        "context_hidden_states": torch.randn(2, 6, width, generator=generator),
    }


def _several_pictures(config: Any, generator: torch.Generator) -> dict[str, Any]:
    vision = config.vision_config
    pictures = torch.randn(2, 1, vision.num_channels, vision.image_size, vision.image_size, generator=generator)
    return _text(generator) | {"pixel_values": pictures, "image_attention_mask": torch.ones(2, 12, 1)}


def _shared_states(config: Any, generator: torch.Generator) -> dict[str, Any]:
    text = config.get_text_config()
    shared = {}
    for number, kind in enumerate(text.layer_types):
        layer = text.per_layer_config[number]
        shape = (2, layer.num_key_value_heads, 6, layer.head_dim)
        shared[kind] = tuple(torch.randn(shape, generator=generator) for _ in "kv")
    embeds = torch.randn(2, 6, 2 * config.backbone_hidden_size, generator=generator)
    positions = torch.arange(6).expand(2, -1)
    return {"inputs_embeds": embeds, "shared_kv_states": shared, "position_ids": positions}


def _sound(config: Any, generator: torch.Generator) -> list[dict[str, Any]]:
    """Frames, some of them stacked."""
    audio = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    mels = getattr(audio, "num_mel_bins", 80)
    stacked = hasattr(audio, "subsample_layers")
    return [{"input_features": torch.randn(2, 64, mels * 4, generator=generator)}] if stacked else []


def _entities(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Words, and what some of them name."""
    places = torch.full((2, 2, 4), -1)
    places[:, :, :2] = torch.randint(0, 10, (2, 2, 2), generator=generator)
    return _text(generator) | {
        "entity_ids": torch.randint(1, config.entity_vocab_size, (2, 2), generator=generator),
        "entity_attention_mask": torch.ones(2, 2, dtype=torch.long),
        "entity_position_ids": places,
    }


#: names that a forward takes -> what it is given
_TABLE: dict[str, Callable[[Any, torch.Generator], dict[str, Any] | list[dict[str, Any]]]] = {
    "past_values past_time_features": _series_with_features,
    "past_values": _series,
    "prompt_pixel_values prompt_masks": _prompted_pictures,
    "visual_feats visual_pos": _objects,
    "noise_embeds context_hidden_states": _draft,
    "image_encoder_embeddings image_attention_mask": _several_pictures,
    "inputs_embeds shared_kv_states": _shared_states,
    "input_features attention_mask labels": _sound,
    "entity_ids entity_position_ids": _entities,
}
