"""Adapters of a fused model, saved for the layers that transformers has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patcher.compat.adapters import (
    PREFIX,
    adapters_of,
    base_model,
    inner_modules,
    is_lora,
    lora_layer,
    wraps_parameter,
)
from patcher.loading.adapters.configs import for_stock_layers
from patcher.loading.adapters.experts import onto_stacks
from patcher.loading.adapters.layers import JoinedLayer, Layers, layers_of
from patcher.loading.adapters.lora import NAMES, separate
from patcher.loading.adapters.reading import joined_adapter


def stock_adapter(model: Any, name: str, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter as they are saved, for the layers of transformers.

    Args:
        weights: those that peft would save.
    """
    base = base_model(model)
    layers = layers_of(base)
    if not (layers.joined or layers.stacks):
        return dict(weights)
    prefix = PREFIX if any(key.startswith(PREFIX) for key in weights) else ""
    bare = {key.removeprefix(PREFIX): value for key, value in weights.items()}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for path, joined in layers.joined.items():
        own = {kind: bare[key] for kind in NAMES if (key := f"{path}.{kind}") in bare}
        if own and layers.is_joined(joined):
            for number, (_, _, tensors) in _separate(base, joined, name, own).items():
                made = {f"{joined.parts[number].path}.{kind}": value for kind, value in tensors.items()}
                parts.setdefault(f"{path}.{next(iter(own))}", {}).update(made)
            parts |= {f"{path}.{kind}": {} for kind in own if f"{path}.{kind}" not in parts}
    parts |= _biases(base, layers, name, bare)
    result: dict[str, torch.Tensor] = {}
    for key, value in bare.items():
        result |= parts.get(key, {key: value})
    for key in parts.keys() - bare.keys():
        result |= parts[key]
    if layers.stacks:
        result, _ = onto_stacks(base, layers.stacks, name, result, _by_root(base, name))
    return {f"{prefix}{key}": value for key, value in result.items()}


@contextmanager
def stock_configs(model: Any) -> Iterator[None]:
    """In the block the configs of adapters say which layers of transformers they are for."""
    base = base_model(model)
    layers = layers_of(base)
    configs: Any = adapters_of(model)
    before = {}
    try:
        for name, config in dict(configs).items() if layers.joined or layers.stacks else ():
            if is_lora(config) and (adapted := _adapted(base, layers, name)) is not None:
                saved = for_stock_layers(config, layers, *adapted)
                if saved is not config:
                    before[name], configs[name] = config, saved
        yield
    finally:
        for name, config in before.items():
            config.base_model_name_or_path = configs[name].base_model_name_or_path
            configs[name] = config


def _by_root(base: nn.Module, name: str) -> bool:
    config = adapters_of(base).get(name)
    return bool(getattr(config, "use_rslora", False))


def _separate(base: nn.Module, joined: JoinedLayer, name: str, own: Mapping[str, torch.Tensor]) -> Any:
    layer = lora_layer(base.get_submodule(joined.path), name)
    return separate(joined, joined_adapter(layer, name), own, layer.r[name], layer.lora_alpha[name])


def _adapted(
    base: nn.Module, layers: Layers, name: str
) -> tuple[dict[str, tuple[int, float]], dict[str, tuple[int, float]]] | None:
    """Layer -> rank and alpha of its adapter, and parameter -> those of its own; None if all is as in transformers."""
    result: dict[str, tuple[int, float]] = {}
    of_experts: dict[str, torch.Tensor] = {}
    has_joined = False
    for path, module in inner_modules(base):
        layer = lora_layer(module, name)
        if layer is None or wraps_parameter(layer):
            continue
        own = {kind: value for kind, value in _tensors(layer, name).items() if value is not None}
        joined = layers.joined.get(path)
        if path in layers.of_experts:
            of_experts |= {f"{path}.{kind}": value for kind, value in own.items()}
        elif joined is None or not layers.is_joined(joined):
            result[path] = layer.r[name], layer.lora_alpha[name]
        else:
            has_joined = True
            for number, (rank, alpha, _) in _separate(base, joined, name, own).items():
                result[joined.parts[number].path] = rank, alpha
    if not has_joined and not of_experts:
        return None
    _, stacks = onto_stacks(base, layers.stacks, name, of_experts, _by_root(base, name))
    return result, {stack.parameter: pair for stack, pair in stacks.items()}


def _tensors(layer: Any, name: str) -> dict[str, torch.Tensor | None]:
    magnitude = layer.lora_magnitude_vector[name].weight if name in layer.lora_magnitude_vector else None
    up = layer.lora_B[name]
    return dict(zip(NAMES, (layer.lora_A[name].weight, up.weight, getattr(up, "bias", None), magnitude), strict=True))


def _biases(
    base: nn.Module, layers: Layers, name: str, weights: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Key of the bias of a joined layer -> the biases of its parts, of what `bias=` has had trained.

    Where only some of the parts have one, it is a parameter of its own, by which peft doesn't know a bias.
    """
    result: dict[str, dict[str, torch.Tensor]] = {}
    kinds = getattr(adapters_of(base).get(name), "bias", "none")
    for joined in layers.joined.values() if kinds != "none" else ():
        layer = lora_layer(base.get_submodule(joined.path), name)
        adapter = joined_adapter(layer, name) if layer is not None else None
        with_adapter = {part.number for part in adapter.parts} if adapter else set(range(len(joined.parts)))
        for key, numbers in joined.biases:
            owner, _, last = key.rpartition(".")
            full = next((each for each in (key, f"{owner}.base_layer.{last}") if each in weights), None)
            if full is None and owner == joined.path:
                continue
            value = base.get_parameter(key).detach() if full is None else weights[full]
            pieces = torch.split(value, [joined.parts[number].size for number in numbers])
            found = {}
            for number, piece in zip(numbers, pieces, strict=True):
                is_adapted = layer is not None and number in with_adapter
                if is_adapted or kinds == "all":
                    kind = "base_layer.bias" if is_adapted else "bias"
                    found[f"{joined.parts[number].path}.{kind}"] = piece.clone()
            result[full or key] = found
    return result
