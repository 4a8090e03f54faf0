"""What people do to the layers of a model in memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

from torch import nn

from patcher.fusions.fused_module import fuse_in_place, put_in_place
from patcher.layouts.layouts import Layout

__all__ = ["SURGERY", "fuse", "operated", "settle"]

#: what is done to the layers of a model, given those of another one that is fused where it isn't
SURGERY: dict[str, Callable[[list[Any], list[Any], int, int], None]] = {
    "append a copy": lambda layers, others, i, j: layers.append(copy.deepcopy(layers[i % len(layers)])),
    "insert a copy": lambda layers, others, i, j: layers.insert(
        i % len(layers), copy.deepcopy(layers[j % len(layers)])
    ),
    "append one of the other": lambda layers, others, i, j: layers.append(copy.deepcopy(others[i % len(others)])),
    "replace by one of the other": lambda layers, others, i, j: layers.__setitem__(
        i % len(layers), copy.deepcopy(others[j % len(others)])
    ),
    "swap": lambda layers, others, i, j: layers.__setitem__(
        slice(None), [layers[-1], *layers[1:-1], layers[0]] if len(layers) > 1 else layers
    ),
    "move the last to the front": lambda layers, others, i, j: layers.insert(0, layers.pop()),
    "truncate": lambda layers, others, i, j: layers.pop() if len(layers) > 1 else None,
    "take the attention of the other": lambda layers, others, i, j: setattr(
        layers[i % len(layers)], "self_attn", copy.deepcopy(others[j % len(others)].self_attn)
    ),
    "pickle": lambda layers, others, i, j: layers.__setitem__(
        i % len(layers), pickle.loads(pickle.dumps(layers[i % len(layers)]))
    ),
    "twice the same": lambda layers, others, i, j: layers.extend(copy.deepcopy(layers)) if len(layers) < 5 else None,
}


def operated(model: Any, other: Any, steps: list[tuple[str, int, int]]) -> Any:
    layers = list(model.model.layers)
    for name, i, j in steps:
        SURGERY[name](layers, list(other.model.layers), i, j)
    model.model.layers = nn.ModuleList(layers)
    return settle(model)


def settle(model: Any) -> Any:
    """What whoever changes the number of layers does as well."""
    model.config.num_hidden_layers = len(model.model.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = ["full_attention"] * len(model.model.layers)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    return model


def fuse(module: nn.Module, *layouts: Layout, into: Any = None) -> Any:
    """Give a module the parameters of these layouts in the place of its own, or put one of another class there."""
    if into is not None:
        return put_in_place(module, into, layouts, None)
    fuse_in_place([(module, layouts, type(module), None)])
    return module
