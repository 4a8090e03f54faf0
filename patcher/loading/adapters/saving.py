"""Adapters of a fused model, saved for the layers that transformers has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patcher.compat.adapters import PREFIX, adapters_of, base_model, inner_modules, is_lora, lora_layer, wraps_parameter
from patcher.loading.adapters.configs import for_stock_layers
from patcher.loading.adapters.layers import JoinedLayer, Layers, layers_of
from patcher.loading.adapters.lora import NAMES, separate
from patcher.loading.adapters.reading import joined_adapter, joined_is_meant


def stock_adapter(model: Any, name: str, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter as they are saved, for the layers of transformers.

    Args:
        weights: those that peft would save.
    """
    base = base_model(model)
    layers = layers_of(base)
    if not layers.joined:
        return dict(weights)
    prefix = PREFIX if any(key.startswith(PREFIX) for key in weights) else ""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for path, joined in layers.joined.items():
        own = {kind: weights[key] for kind in NAMES if (key := f"{prefix}{path}.{kind}") in weights}
        if own and joined_is_meant(joined, layers):
            made = {
                f"{prefix}{joined.parts[number].path}.{kind}": value
                for number, (_, _, tensors) in _separate(base, joined, name, own).items()
                for kind, value in tensors.items()
            }
            parts |= dict.fromkeys((f"{prefix}{path}.{kind}" for kind in own), made)
    biases = _biases(base, layers, name, weights, prefix)
    result: dict[str, torch.Tensor] = {}
    for key, value in weights.items():
        result |= parts.get(key) or biases.get(key) or {key: value}
    return result


@contextmanager
def stock_configs(model: Any) -> Iterator[None]:
    """In the block the configs of adapters say which layers of transformers they are for."""
    base = base_model(model)
    layers = layers_of(base)
    configs: dict[str, Any] = dict(adapters_of(model)) if layers.joined else {}  # type: ignore[arg-type]
    before = {}
    try:
        for name, config in configs.items():
            if is_lora(config) and (adapted := _adapted(base, layers, name)) is not None:
                saved = for_stock_layers(config, layers, adapted)
                if saved is not config:
                    before[name] = config
                    adapters_of(model)[name] = saved  # type: ignore[index]
        yield
    finally:
        for name, config in before.items():
            config.base_model_name_or_path = adapters_of(model)[name].base_model_name_or_path
            adapters_of(model)[name] = config  # type: ignore[index]


def _separate(base: nn.Module, joined: JoinedLayer, name: str, own: Mapping[str, torch.Tensor]) -> Any:
    layer = lora_layer(base.get_submodule(joined.path), name)
    return separate(joined, joined_adapter(layer, name), own, layer.r[name], layer.lora_alpha[name])


def _adapted(base: nn.Module, layers: Layers, name: str) -> dict[str, tuple[int, float]] | None:
    """Layer of transformers -> rank and alpha of its adapter; None if no joined layer has one of that name."""
    result: dict[str, tuple[int, float]] = {}
    has_joined = False
    for path, module in inner_modules(base):
        layer = lora_layer(module, name)
        if layer is None or wraps_parameter(layer):
            continue
        joined = layers.joined.get(path)
        if joined is None or not joined_is_meant(joined, layers):
            result[path] = layer.r[name], layer.lora_alpha[name]
            continue
        has_joined = True
        own = {kind: value for kind, value in _tensors(layer, name).items() if value is not None}
        for number, (rank, alpha, _) in _separate(base, joined, name, own).items():
            result[joined.parts[number].path] = rank, alpha
    return result if has_joined else None


def _tensors(layer: Any, name: str) -> dict[str, torch.Tensor | None]:
    magnitude = layer.lora_magnitude_vector[name].weight if name in layer.lora_magnitude_vector else None
    up = layer.lora_B[name]
    return dict(zip(NAMES, (layer.lora_A[name].weight, up.weight, getattr(up, "bias", None), magnitude), strict=True))


def _biases(
    base: nn.Module, layers: Layers, name: str, weights: Mapping[str, torch.Tensor], prefix: str
) -> dict[str, dict[str, torch.Tensor]]:
    """Key of the bias of a joined layer -> the biases of its parts, of what `bias=` has had trained."""
    result: dict[str, dict[str, torch.Tensor]] = {}
    only_adapted = False
    for joined in layers.joined.values():
        layer = lora_layer(base.get_submodule(joined.path), name)
        adapter = joined_adapter(layer, name) if layer is not None else None
        with_adapter = {part.number for part in adapter.parts} if adapter else set(range(len(joined.parts)))
        for key, numbers in joined.biases:
            owner, _, last = key.rpartition(".")
            full = next((k for k in (f"{prefix}{key}", f"{prefix}{owner}.base_layer.{last}") if k in weights), None)
            if full is None:
                continue
            only_adapted = adapters_of(base)[name].bias == "lora_only" if name in adapters_of(base) else False
            pieces = torch.split(weights[full], [joined.parts[number].size for number in numbers])
            found = {}
            for number, piece in zip(numbers, pieces, strict=True):
                is_adapted = layer is not None and number in with_adapter
                if is_adapted or not only_adapted:
                    kind = "base_layer.bias" if is_adapted else "bias"
                    found[f"{prefix}{joined.parts[number].path}.{kind}"] = piece.clone()
            result[full] = found
    return result
