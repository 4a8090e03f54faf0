"""The keys that a checkpoint has for single experts, if it has them one by one.

Layers of such experts are read and saved under these keys. So are tensors that a quantizer puts beside their weights
(`weight_packed`, `weight_scale`), for which a stack has no place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from patcher.compat.conversions import stock_conversions_from_scratch, stock_revert
from patcher.compat.models import ModelView
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.carried import Carrier, is_quantized
from patcher.layouts.layouts import Layout
from patcher.patterns import inside, parents

#: Converts a state dict with stacks to the checkpoint that it is saved as.
Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def default_revert(model: PreTrainedModel) -> Revert:
    """Return the `Revert` of a model that was not loaded."""
    view: Any = ModelView(model, get_parameter={}.__getitem__)
    return functools.partial(stock_revert, view, conversions=stock_conversions_from_scratch(model))


def group_by_layer(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return path of a layer -> name of a tensor in it -> key; `x.weight.absmax` is of x too, as `x.weight` is."""
    keys = list(keys)
    weights = {layer for layer, _, name in (key.rpartition(".") for key in keys) if name.startswith("weight")}
    layers: dict[str, dict[str, str]] = {}
    for key in keys:
        around = parents(key)
        layer = next((path for path in reversed(around) if path in weights), around[-1])
        layers.setdefault(layer, {})[key.removeprefix(inside(layer))] = key
    return layers


def expert_checkpoint_names(
    carrier: Carrier, state_dict: Mapping[str, torch.Tensor], by_layer: Mapping[str, dict[str, str]], revert: Revert
) -> tuple[dict[str, str], dict[str, str]]:
    """Return key of a state dict -> key in the checkpoint: for quantized experts, and for weights of the others."""
    quantized: dict[str, str] = {}
    plain: dict[str, str] = {}
    for layout, layers in _expert_weights(carrier):
        by_weight = {name: by_layer.get(layer, {}) for name, layer in layers.items()}
        is_plain = all(
            kind in ("weight", "bias") and not is_quantized(state_dict[key])
            for keys in by_weight.values()
            for kind, key in keys.items()
        )
        for name, checkpoint_key in expert_keys(carrier.prefix, layout, revert).items():
            for kind, key in by_weight[name].items():
                if not (is_plain and kind == "bias"):
                    (plain if is_plain else quantized)[key] = checkpoint_key.removesuffix("weight") + kind
    return quantized, plain


def quantized_experts(
    model: PreTrainedModel, checkpoint: Iterable[str], fused: Iterable[Carrier], state: Iterable[str]
) -> dict[str, tuple[str, Layout]]:
    """Return key -> (name in the model's state, layout) of experts that the checkpoint has quantized one by one.

    The quantizer has replaced their weights by tensors of its own, also in the model. Layers among them that it left
    in full precision are read one by one as well.
    """
    experts: dict[str, tuple[str, Layout]] = {}
    tensors, keys = group_by_layer(state), group_by_layer(checkpoint)
    for carrier in fused:
        for layout, layers in _expert_weights(carrier):
            by_weight = {name: tensors.get(layer, {}) for name, layer in layers.items()}
            if all(kinds.keys() <= {"weight", "bias"} for kinds in by_weight.values()):
                continue
            for name, checkpoint_key in expert_keys(carrier.prefix, layout, default_revert(model)).items():
                for kind, key in keys.get(checkpoint_key.removesuffix(".weight"), {}).items():
                    if kind in by_weight[name]:
                        experts[key] = f"{layers[name]}.{kind}", layout
    return experts


def _expert_weights(carrier: Carrier) -> Iterator[tuple[Matrices, dict[str, str]]]:
    """Yield the layouts of a module that are weights of experts, each with parameter -> path of its layer."""
    for layout in carrier.carried.layouts:
        if isinstance(layout, Matrices) and layout.fused[0].endswith(".weight"):
            yield layout, {name: carrier.prefix + name.removesuffix(".weight") for name in layout.fused}


def expert_keys(prefix: str, layout: Matrices, revert: Revert) -> dict[str, str]:
    """Return parameter of one expert -> its key in the checkpoint, {} if they haven't a key each.

    They are found by reverting a stack of small matrices with distinct values, which have to be returned unchanged.
    """
    experts, rows = layout.stock_shapes[0][0], 2 * layout.parts
    shape = (experts, 3, rows) if layout.transposed else (experts, rows, 3)
    small = replace(layout, stock_shapes=(shape,))
    values = torch.arange(6.0, dtype=torch.float32).view(2, 3)  # loads in other threads change the default
    matrices = [values + 6 * index for index in range(len(layout.fused))]
    (stack,) = small.separate(matrices)
    try:
        reverted = revert({f"{prefix}{layout.stock[0]}": stack})
    except Exception:  # an operation that depends on shapes
        return {}
    keys = {int(value.flatten()[0]) // 6: key for key, value in reverted.items() if key.endswith(".weight")}
    if len(reverted) != len(matrices) or keys.keys() != set(range(len(matrices))):
        return {}
    if not all(torch.equal(reverted[keys[index]], matrix) for index, matrix in enumerate(matrices)):
        return {}
    return {name: keys[index] for index, name in enumerate(layout.fused)}
