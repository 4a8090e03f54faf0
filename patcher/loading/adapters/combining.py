"""Adapters of joined layers that peft adds up, or puts in the place of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from patcher.compat.adapters import base_model, is_targeted, lora_layer, rank_and_alpha
from patcher.errors import InvalidPatcherError
from patcher.loading.adapters.configs import for_layers_here
from patcher.loading.adapters.layers import layers_of
from patcher.loading.adapters.lora import JoinedAdapter, alpha_for, scaling_of
from patcher.loading.adapters.planning import AdapterPlan
from patcher.loading.adapters.reading import joined_adapter, named_in_model, onto_layers
from patcher.patterns import compress


def check_combination(model: nn.Module, adapters: Sequence[str], kind: str) -> None:
    """Refuse to add up what is joined in other ways than one behind the other.

    Raises:
        InvalidPatcherError: a combination would mix the parts.
    """
    mixed = [
        path
        for path in layers_of(model).joined
        if kind != "cat" and any(_is_in_blocks(model, path, name) for name in adapters)
    ]
    if mixed:
        raise InvalidPatcherError(
            f"The adapters {', '.join(map(repr, adapters))} have matrices of their own for the layers that are joined "
            f"in {', '.join(compress(mixed))}. combination_type={kind!r} would mix them: write "
            "combination_type='cat', or combine them in a model without the fusion of these layers."
        )


def plan_weighted(model: nn.Module, config: Any, adapters: Sequence[str], kind: str) -> AdapterPlan | None:
    """How an adapter that adds others up is put onto a model: with the ranks that they have there."""
    layers, by_root = layers_of(model), bool(config.use_rslora)
    found = {}
    for path, joined in layers.joined.items():
        ranks = [
            layer.r[name] for name in adapters if (layer := lora_layer(model.get_submodule(path), name)) is not None
        ]
        if ranks:
            scaling = scaling_of(config.r, config.lora_alpha, by_root)
            rank = sum(ranks) if kind == "cat" else config.r
            found[path] = JoinedAdapter.whole(joined, rank, alpha_for(scaling, rank, by_root))
    adapted = {name: rank_and_alpha(config, name) for name in layers.here if is_targeted(config, name)}
    adapted |= {path: (adapter.rank, adapter.alpha) for path, adapter in found.items()}
    return AdapterPlan(layers, for_layers_here(config, layers, adapted), found) if found else None


def swapped(model: Any, weights: Mapping[str, torch.Tensor], name: str, config: Any) -> dict[str, torch.Tensor]:
    """The tensors of an adapter that takes the place of another one, by the names of parameters.

    Args:
        weights: by the names that they would have in a model of transformers.

    Raises:
        InvalidPatcherError: the scaling that peft gives a layer would not be that of its parts.
        PatchedWeightsError: the other adapter had other ranks.
    """
    base = base_model(model)
    layers = layers_of(base)
    for path, joined in layers.joined.items():
        layer = lora_layer(base.get_submodule(path), name)
        adapter = joined_adapter(layer, name) if layer is not None else None
        if adapter is not None and any(part.factor != 1 or part.rank != config.r for part in adapter.parts):
            raise InvalidPatcherError(
                f"The adapter {name!r} joins several in {joined.path}, of ranks or alphas of their own, and another "
                "one can't be put in its place: load it under a name of its own, with load_adapter()."
            )
        targeted = [p.path for p in joined.parts if p.path in layers.gone and is_targeted(config, p.path)]
        if any(rank_and_alpha(config, each) != (config.r, config.lora_alpha) for each in targeted):
            raise InvalidPatcherError(
                f"The adapter has ranks or alphas of their own for parts of {joined.path}, and can't be put in the "
                "place of another one: load it under a name of its own, with load_adapter()."
            )
    files = {key.replace(f".{name}.", ".").removesuffix(f".{name}"): value for key, value in weights.items()}
    return named_in_model(onto_layers(model, name, files, config), name)


def _is_in_blocks(model: nn.Module, path: str, name: str) -> bool:
    layer = lora_layer(model.get_submodule(path), name)
    adapter = joined_adapter(layer, name) if layer is not None else None
    return adapter is not None and not adapter.is_trainable
