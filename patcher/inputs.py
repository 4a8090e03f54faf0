"""Inputs for any model: what its `forward` takes by name, in the shapes that its config tells, tried one by one.

A pass that stock refuses is dropped; of the others those are kept that reach layers which no earlier one reached. An
image goes with as many image tokens as the model itself makes features of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["NoInputsError", "Pass", "chosen_passes"]


@dataclass(frozen=True)
class Pass:
    """One call of a model, or of a model inside of it: a method and its keyword arguments."""

    method: str
    arguments: dict[str, Any]
    path: str = ""

    def of(self, model: nn.Module) -> list[torch.Tensor]:
        """All floating-point tensors that the call gives."""
        torch.manual_seed(0)
        arguments = _fitted(self.arguments, model)
        model = model.get_submodule(self.path)
        call = model if self.method == "forward" else getattr(model, self.method)
        cached = {"use_cache": False} if "use_cache" in _parameters(model, self.method) else {}
        found: list[torch.Tensor] = []
        _collect(call(**arguments, **cached), found)
        return found


class NoInputsError(Exception):
    """Stock runs with nothing that was tried."""


def chosen_passes(model: Any) -> list[Pass]:
    """The passes that stock runs, without those that reach nothing new.

    Raises:
        NoInputsError: there is none; what the first one says.
    """
    layers = _layers_of(model)
    reached: set[str] = set()
    chosen: list[Pass] = []
    first: Exception | None = None
    # The whole first, then models inside of which it has not reached everything: towers that want other inputs.
    for path, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        inside = {name for name in layers if name.startswith(f"{path}.") or not path}
        for one in _candidates(part, path):
            if chosen and reached >= inside:
                break
            here: set[str] = set()
            handles = [layer.register_forward_pre_hook(_noting(name, here)) for name, layer in layers.items()]
            try:
                with torch.no_grad():
                    outputs = one.of(model)
            except Exception as error:
                first = first or error
                continue
            finally:
                for handle in handles:
                    handle.remove()
            if outputs and (not chosen or here - reached):
                chosen.append(one)
                reached |= here
    if not chosen:
        raise NoInputsError(f"{type(first).__name__}: {first}" if first else f"{type(model).__name__} takes nothing")
    return chosen


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """What the fusions are about: layers with weights."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
        or any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    }


def _noting(path: str, reached: set[str]) -> Any:
    return lambda *_: reached.add(path)


def _fresh(value: dict[str, Any]) -> dict[str, Any]:
    """A copy, for models that write into what they are given; one tensor given twice stays one."""
    return {name: item.clone() if isinstance(item, torch.Tensor) else item for name, item in value.items()}


def _fitted(arguments: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A copy on the device of the model's weights, and of their type where a model is in half precision."""
    weight = next((each for each in model.parameters() if each.is_floating_point()), None)
    if weight is None:
        return _fresh(arguments)
    return {
        name: value.clone().to(weight.device, weight.dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


def _parameters(model: Any, method: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(model, method)).parameters)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)


# --- candidates ----------------------------------------------------------------------------------------------------


def _candidates(model: Any, path: str) -> Iterator[Pass]:
    generator = torch.Generator().manual_seed(0)
    taken = _parameters(model, "forward")
    text = _text(model, taken, generator)
    images = list(_images(model, generator)) if _sees(taken) else []
    sounds = list(_sounds(model, taken, generator))
    # The richest first: an image with its tokens, then an image alone, then text alone.
    if "input_ids" in taken:
        for image in images:
            for arguments in _with_image(model, text, _known(image, taken)):
                yield Pass("forward", arguments, path)
        for image in images:
            yield Pass("forward", text | _known(image, taken), path)
    for sound in sounds:
        yield Pass("forward", sound, path)
        yield Pass("forward", text | sound, path)
    for image in images:
        yield Pass("forward", _known(image, taken), path)
    yield Pass("forward", text, path)
    if "input_ids" in taken:
        yield Pass("forward", {"input_ids": text["input_ids"]}, path)
    width = _number(model.config, "hidden_size", "d_model", default=64)
    others = {
        "encoder_hidden_states": torch.randn(2, 5, width, generator=generator),
        "inputs_embeds": torch.randn(2, 12, width, generator=generator),
        "hidden_states": torch.randn(2, 12, width, generator=generator),
    }
    if "encoder_hidden_states" in taken and "input_ids" in taken:
        yield Pass("forward", text | {"encoder_hidden_states": others["encoder_hidden_states"]}, path)
    for name in ("inputs_embeds", "hidden_states"):
        if name in taken:
            yield Pass("forward", {name: others[name]}, path)
            yield Pass("forward", _known(others, {name, "encoder_hidden_states"} & taken.keys()), path)
    for method in ("get_image_features", "get_video_features", "get_text_features", "get_audio_features"):
        if hasattr(model, method):
            accepted = _parameters(model, method)
            for arguments in [*images, *sounds, text]:
                yield Pass(method, _known(arguments, accepted), path)


def _known(arguments: dict[str, Any], taken: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in taken}


def _text(model: Any, taken: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, 100, (2, 12), generator=generator)
    text: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": torch.randint(3, 100, (2, 6), generator=generator),
        "bbox": torch.randint(0, 100, (2, 12, 4), generator=generator).sort(-1).values,
        "pixel_mask": None,
    }
    return {name: value for name, value in text.items() if name in taken and value is not None}


def _sees(taken: dict[str, Any]) -> bool:
    return any(
        name in taken
        for name in ("pixel_values", "pixel_values_videos", "images", "image", "hidden_states", "flattened_patches")
    )


def _images(model: Any, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """An image in every form that processors give; what a model doesn't take is left out later."""
    config = model.config
    vision = next(
        (part for name in ("vision_config", "backbone_config") if (part := getattr(config, name, None))), config
    )
    channels = _number(vision, "num_channels", "in_channels", "in_chans", default=3)
    size: Any = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 32
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    sides: list[int] = [size, size] if isinstance(size, int) else list(size)[-2:]
    height, width = sides
    patch = _number(vision, "patch_size", default=8)
    depth, merge = _number(vision, "temporal_patch_size", default=1), _number(vision, "spatial_merge_size", default=2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    sizes = torch.tensor([[height, width]] * 2)
    plain = {"image_sizes": sizes, "pixel_mask": torch.ones(2, height, width, dtype=torch.long)}
    yield plain | {"pixel_values": random(2, channels, height, width)}
    # patches cut before, in the order of a merge
    patches = merge * merge
    grid = torch.tensor([[1, merge, merge]] * 2)
    flat = random(2 * patches, channels * depth * patch * patch)
    yield {"pixel_values": flat, "image_grid_thw": grid, "grid_thw": grid, "hidden_states": flat}
    yield {"pixel_values": flat, "image_grid_hws": grid[:, 1:], "grid_thw": grid}
    cut = random(2 * patches, channels, patch, patch)
    yield {"pixel_values": cut, "image_grid_thw": grid, "grid_thw": grid}
    # patches with their places
    count = max(1, height // patch) * max(1, width // patch)
    places = torch.tensor([[max(1, height // patch), max(1, width // patch)]] * 2)
    known = {"pixel_attention_mask": torch.ones(2, count, dtype=torch.long), "spatial_shapes": places}
    yield known | {"pixel_values": random(2, count, channels * patch * patch)}
    across = torch.arange(width // patch).repeat(max(1, height // patch))
    down = torch.arange(height // patch).repeat_interleave(max(1, width // patch))
    positions = torch.stack([across, down], -1).expand(2, -1, -1)
    if positions.shape[1] == count:
        pixels = random(2, count, channels * patch * patch)
        yield {"pixel_values": pixels, "pixel_position_ids": positions, "image_position_ids": positions}
    rows_and_columns = torch.stack([down + 1, across + 1], -1).expand(2, -1, -1).float()
    flattened = torch.cat([rows_and_columns, random(2, rows_and_columns.shape[1], channels * patch * patch)], -1)
    yield {"flattened_patches": flattened}
    # several pictures or frames each
    for frames in dict.fromkeys([1, 2, 3, _number(vision, "num_frames", "frames_per_clip", default=4), 5]):
        video = random(2, frames, channels, height, width)
        several = {
            "image_sizes": sizes,
            "pixel_attention_mask": torch.ones(2, frames, height, width, dtype=torch.long),
            "aspect_ratio_ids": torch.ones(2, frames, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, frames, dtype=torch.long),
        }
        yield several | {"pixel_values": video, "pixel_values_videos": video, "pixel_values_images": video}
    video = random(2, channels, 4, height, width)
    yield {"pixel_values": video, "pixel_values_videos": video}


def _sounds(model: Any, taken: dict[str, Any], generator: torch.Generator) -> Iterator[dict[str, Any]]:
    config = model.config
    audio = next(
        (part for name in ("audio_config", "encoder_config") if (part := getattr(config, name, None))), config
    )
    mels = _number(audio, "num_mel_bins", "feat_extract_dim", "input_feat_per_channel", "input_dim", default=80)
    decoder = {"decoder_input_ids": torch.randint(3, 100, (2, 6), generator=generator)}
    decoder = _known(decoder, taken)
    if "input_features" in taken:
        for frames in ((2, mels, 128), (2, 64, mels), (2, 128, mels), (2, 64, 160)):
            features = torch.randn(frames, generator=generator)
            yield {"input_features": features} | decoder
            yield {"input_features": features, "attention_mask": torch.ones(2, frames[-1], dtype=torch.long)} | decoder
            yield {"input_features": features, "attention_mask": torch.ones(2, frames[1], dtype=torch.long)} | decoder
    if "input_values" in taken:
        shapes: list[tuple[int, ...]] = [(2, 4000), (2, 1, 4000), (2, 128, mels), (2, 1024, mels)]
        for shape in shapes:
            yield {"input_values": torch.randn(shape, generator=generator)} | decoder


def _number(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        value = value[-1] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value:
            return value
    return default


# --- images with their tokens --------------------------------------------------------------------------------------


def _with_image(model: Any, text: dict[str, Any], image: dict[str, Any]) -> Iterator[dict[str, Any]]:
    token = next(
        (
            value
            for name in ("image_token_id", "image_token_index", "image_patch_id", "media_placeholder_token_id")
            if isinstance(value := getattr(model.config, name, None), int)
        ),
        None,
    )
    if token is None or not image:
        return
    for count in _feature_counts(model, image):
        rows = 2 if count % 2 == 0 else 1
        ids = text["input_ids"][:rows]
        ids = torch.cat([ids[:, :2], torch.full((rows, count // rows), token), ids[:, 2:]], 1)
        marked = text | {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | image
        if "mm_token_type_ids" in (taken := _parameters(model, "forward")):
            yield marked | {"mm_token_type_ids": (ids == token).int()}
        if "token_type_ids" in taken:
            yield marked | {"token_type_ids": (ids == token).int()}
        yield marked


def _feature_counts(model: Any, image: dict[str, Any]) -> Iterator[int]:
    """How many image features the model makes of an image, by what it says itself."""
    for owner in (model, getattr(model, "model", None)):
        method = getattr(owner, "get_image_features", None)
        if owner is None or method is None:
            continue
        try:
            with torch.no_grad():
                result = method(**_known(_fresh(image), _parameters(owner, "get_image_features")))
        except Exception:
            continue
        counts = []
        for value in (getattr(result, "pooler_output", None), result):
            pieces: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
            if pieces and all(isinstance(piece, torch.Tensor) for piece in pieces):
                counts.append(sum(piece[..., 0].numel() for piece in pieces))
        yield from dict.fromkeys(count for count in counts if count)
        return
