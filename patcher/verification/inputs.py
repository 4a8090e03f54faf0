"""Inputs for any model: arguments by the names in its `forward`, in the shapes of its config, tried one by one.

A pass that the stock model refuses is dropped; others are kept if they reach layers that no earlier one reached.
An image comes with as many image tokens as the model makes features of it. Where there is a processor beside the
checkpoint, its output for an image or a sound is tried first.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import nn
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from patcher.checkpoints.model_classes import PLACES
from patcher.verification.comparing import error_text
from patcher.verification.passes import Pass as Pass, fitted, floating_tensors, parameters_of, recording_calls


def processor_of(model: Any, options: Mapping[str, Any]) -> Any:
    """Return the processor, image processor, feature extractor or tokenizer of a folder or repo, None without one."""
    places = {key: value for key, value in options.items() if key in PLACES - {"variant"}}
    for auto in (AutoProcessor, AutoTokenizer) if isinstance(model, str | os.PathLike) else ():
        with suppress(Exception):  # there is none, or it needs a package that isn't installed
            return auto.from_pretrained(model, **places)
    return None


def processed(model: PreTrainedModel, processor: Any) -> Iterator[Pass]:
    """Yield the output of a processor for a generated image or sound, with a text where it takes one."""
    if processor is None:
        return
    accepted = parameters_of(model)
    generator = torch.Generator().manual_seed(0)
    rate = getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)
    image = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=generator).numpy()
    sound = torch.randn(rate or 1, generator=generator).numpy()
    tokens = [getattr(processor, name, None) or "" for name in ("image_token", "audio_token")]
    text = {"text": [f"{''.join(tokens)} What is it?"]}
    images, audio = {"images": [image]}, {"audio": [sound], "sampling_rate": rate}
    speech = {"raw_speech": [sound], "sampling_rate": rate}  # as feature extractors call it
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    chat = {"conversation": [{"role": "user", "content": content}], "tokenize": True, "return_dict": True}
    common: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    common |= {"decoder_input_ids": torch.tensor([[0, 1, 2, 3]])} if "decoder_input_ids" in accepted else {}
    for arguments in (chat, images | text, audio | text, images, audio, speech):
        with suppress(Exception):  # it takes something else
            call = processor.apply_chat_template if arguments is chat else processor
            batch = call(**arguments, return_tensors="pt")
            tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
            tensors = _only(tensors, accepted)
            if any(value.is_floating_point() for value in tensors.values()):  # it took the image or the sound
                yield Pass("forward", common | tensors)


class NoInputsError(Exception):
    """The stock model runs on none of the inputs that were tried."""


def chosen_passes(model: Any, first: Iterable[Pass] = (), reached: Iterable[str] = ()) -> list[Pass]:
    """Return the passes that the stock model runs, without those that reach nothing new.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> [one.name for one in chosen_passes(LlamaForCausalLM(config))]
    ['the model: input_ids, attention_mask']

    Args:
        model: the stock model.
        first: passes to try before any is guessed.
        reached: the paths of layers that other passes reach.

    Raises:
        NoInputsError: there is none, with the first error.
    """
    # The fusions are about layers with weights.
    layers = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
        or any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    }
    error = ""
    reached = set(reached)
    chosen: list[Pass] = []
    # The whole model first, then inner models of which not all has been reached: towers with other inputs.
    for path, part in model.named_modules():
        inside = {name for name in layers if name.startswith(f"{path}.") or not path}
        for run in chain(() if path else first, _guesses(part, path)) if isinstance(part, PreTrainedModel) else ():
            if reached and reached >= inside:
                break
            called: set[str] = set()
            try:
                with torch.no_grad(), recording_calls(model, called):
                    outputs = run.of(model)
            except Exception as raised:  # whatever a model raises for unsuitable inputs
                error = error or error_text(raised)
                continue
            if outputs and (not reached or called & layers - reached):
                chosen.append(run)
                reached |= called & layers
    if not chosen and not reached:
        raise NoInputsError(error or f"{type(model).__name__} takes no known inputs")
    return chosen


def _guesses(model: Any, path: str) -> Iterator[Pass]:
    """Yield passes of a model by the names of its arguments."""
    generator = torch.Generator().manual_seed(0)
    accepted = parameters_of(model)
    ids = torch.randint(3, 100, (2, 12), generator=generator)
    text = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": torch.randint(3, 100, (2, 6), generator=generator),
        "bbox": torch.randint(0, 100, (2, 12, 4), generator=generator).sort(-1).values,
    }
    text, uncached = _only(text, accepted), _only({"use_cache": False}, accepted)
    takes_images = not accepted.keys().isdisjoint(("pixel_values", "pixel_values_videos"))
    images = list(_images(model.config, generator)) if takes_images else []
    sounds = list(_sounds(model.config, accepted, generator))
    for arguments in chain(
        _with_images(model, text, [_only(image, accepted) for image in images]),
        *([sound, text | sound] for sound in sounds),
        (_only(image, accepted) for image in images),
        _texts(text, accepted, _size(model.config, "hidden_size", "d_model", default=64), generator),
    ):
        yield Pass("forward", arguments | uncached, path)
    for method in ("get_image_features", "get_video_features", "get_text_features", "get_audio_features"):
        if hasattr(model, method):
            accepted = parameters_of(model, method)
            for arguments in [*images, *sounds, text]:
                yield Pass(method, _only(arguments, accepted), path)


def _only(arguments: dict[str, Any], accepted: Container[str]) -> dict[str, Any]:
    """Return the arguments that are accepted."""
    return {name: value for name, value in arguments.items() if name in accepted}


def _texts(
    text: dict[str, Any], accepted: Container[str], width: int, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield arguments without an image or a sound."""
    yield text
    crossed = _only({"encoder_hidden_states": torch.randn(2, 5, width, generator=generator)}, accepted)
    if "input_ids" in accepted:
        yield {"input_ids": text["input_ids"]}
        yield text | crossed
    if "inputs_embeds" in accepted:
        yield {"inputs_embeds": torch.randn(2, 12, width, generator=generator)}


def _images(config: Any, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield images in the forms that models of transformers take, with more arguments than most of them accept."""
    vision = _part(config, "vision_config", "backbone_config")
    channels = _size(vision, "num_channels", "in_channels", "in_chans", default=3)
    size: Any = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 32
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = [size, size] if isinstance(size, int) else list(size)[-2:]
    patch = _size(vision, "patch_size", default=8)
    depth, merge = _size(vision, "temporal_patch_size", default=1), _size(vision, "spatial_merge_size", default=2)

    random, ones = partial(torch.randn, generator=generator), partial(torch.ones, dtype=torch.long)
    sizes = torch.tensor([[height, width]] * 2)
    yield {
        "image_sizes": sizes,
        "pixel_mask": ones(2, height, width),
        "pixel_values": random(2, channels, height, width),
    }
    # flat patches, in the order in which they are merged
    patches = merge * merge
    grid = torch.tensor([[1, merge, merge]] * 2)
    for shape in ((2 * patches, channels * depth * patch * patch), (2 * patches, channels, patch, patch)):
        yield {"pixel_values": random(shape), "image_grid_thw": grid, "grid_thw": grid}
    # patches with a mask, or with positions
    rows, columns = max(1, height // patch), max(1, width // patch)
    pixels = random(2, rows * columns, channels * patch * patch)
    mask, shapes = ones(2, rows * columns), torch.tensor([[rows, columns]] * 2)
    yield {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    across, down = torch.arange(columns).repeat(rows), torch.arange(rows).repeat_interleave(columns)
    yield {"pixel_values": pixels, "image_position_ids": torch.stack([across, down], -1).expand(2, -1, -1)}
    # several images or frames in each row
    for frames in dict.fromkeys([1, 2, _size(vision, "num_frames", "frames_per_clip", default=4)]):
        several = {"image_sizes": sizes, "pixel_attention_mask": ones(2, frames, height, width)}
        video = random(2, frames, channels, height, width)
        yield several | {"pixel_values": video, "pixel_values_videos": video}


def _sounds(config: Any, accepted: Container[str], generator: torch.Generator) -> Iterator[dict[str, Any]]:
    audio = _part(config, "audio_config", "encoder_config")
    mels = _size(audio, "num_mel_bins", "feat_extract_dim", "input_feat_per_channel", "input_dim", default=80)
    decoder = _only({"decoder_input_ids": torch.randint(3, 100, (2, 6), generator=generator)}, accepted)
    if "input_features" in accepted:
        whole = 2 * _size(audio, "max_source_positions", default=64)  # a convolution halves the length
        for shape in dict.fromkeys([(2, mels, 128), (2, mels, whole), (2, 64, mels), (2, 64, 160)]):
            yield {"input_features": torch.randn(shape, generator=generator)} | decoder
    if "input_values" in accepted:
        for values in ((2, 4000), (2, 1, 4000), (2, 1024, mels)):
            yield {"input_values": torch.randn(values, generator=generator)} | decoder


def _part(config: Any, *names: str) -> Any:
    return next((part for name in names if (part := getattr(config, name, None))), config)


def _size(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        value = value[-1] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value:
            return value
    return default


def _with_images(model: Any, text: dict[str, Any], images: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield images with as many image tokens as they have features, then beside a text without any."""
    if "input_ids" not in text:
        return
    names = ("image_token_id", "image_token_index", "image_patch_id", "media_placeholder_token_id")
    tokens: list[Any] = [value for name in names if isinstance(value := getattr(model.config, name, None), int)]
    for token, image in product(tokens[:1], filter(None, images)):
        if count := _feature_count(model, image):
            rows = 2 if count % 2 == 0 else 1
            ids = text["input_ids"][:rows]
            ids = torch.cat([ids[:, :2], torch.full((rows, count // rows), token), ids[:, 2:]], 1)
            arguments = text | {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | image
            for name in ("mm_token_type_ids", "token_type_ids"):
                if name in parameters_of(model):
                    yield arguments | {name: (ids == token).int()}
            yield arguments
    for image in images:
        yield text | image


def _feature_count(model: Any, image: dict[str, Any]) -> int:
    """Return how many features the model makes of an image."""
    owners: list[Any] = [model, getattr(model, "model", None)]
    for owner in owners:
        with suppress(Exception), torch.no_grad():
            accepted = parameters_of(owner, "get_image_features")
            result = owner.get_image_features(**_only(fitted(image, model), accepted))
            features = getattr(result, "pooler_output", result)
            return sum(piece[..., 0].numel() for piece in floating_tensors(features))
    return 0
