"""The names that a checkpoint has for the layers of single experts, where it has such.

There such layers can be given as they are, under the names that the checkpoint itself has for them. What a quantizer
puts beside the weights of a layer (`weight_packed`, `weight_scale`), which no stack has a place for, is saved so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from patcher.compat.conversions import stock_conversions_from_scratch, stock_revert
from patcher.compat.models import ModelView
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.carried import Carrier, is_quantized
from patcher.layouts.layouts import Layout


def named_as_in_checkpoint(
    carrier: Carrier,
    state_dict: Mapping[str, torch.Tensor],
    revert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> tuple[dict[str, str], dict[str, str]]:
    """Key of a state dict -> the key of a checkpoint, of what belongs to the experts of a module.

    Args:
        revert: gives the checkpoint that stacks are saved as.

    Returns:
        All of those that are quantized, and the weights of the others.
    """
    prefix = carrier.prefix
    quantized: dict[str, str] = {}
    plain: dict[str, str] = {}
    for layout in carrier.carried.layouts:
        if not isinstance(layout, Matrices) or not layout.fused[0].endswith(".weight"):
            continue
        layers = {name.removesuffix("weight"): name for name in layout.fused}
        depth = next(iter(layers)).count(".")
        own: dict[str, str] = {}
        for key in state_dict:
            if key.startswith(prefix):
                layer = "".join(f"{part}." for part in key.removeprefix(prefix).split(".")[:depth])
                if layer in layers:
                    own[key] = layer
        known = {f"{prefix}{layer}{kind}" for layer in layers for kind in ("weight", "bias")}
        is_plain = own.keys() <= known and not any(is_quantized(state_dict[key]) for key in own)
        names = keys_of_experts(prefix, layout, revert)
        for key, layer in own.items():
            if layers[layer] in names and not (is_plain and key.endswith("bias")):
                start = f"{prefix}{layer}"
                name = names[layers[layer]].removesuffix("weight") + key.removeprefix(start)
                (plain if is_plain else quantized)[key] = name
    return quantized, plain


def quantized_experts(
    model: PreTrainedModel,
    checkpoint: Iterable[str],
    fused: Iterable[Carrier],
    own: Iterable[str],
) -> dict[str, tuple[str, Layout]]:
    """Key -> (parameter or buffer, layout), of experts that are quantized as the layers that they are here.

    A quantizer has given such layers tensors of its own in the place of the weight, and the checkpoint has them under
    its names of experts. Where it has left some of them alone, those are read one by one as well.

    Args:
        checkpoint: the keys.
        own: the names of what the model holds.
    """
    found: dict[str, tuple[str, Layout]] = {}
    held, by_layer = _by_layer(own), _by_layer(checkpoint)
    for each in fused:
        prefix = each.prefix
        for layout in each.carried.layouts:
            if not isinstance(layout, Matrices) or not layout.fused[0].endswith(".weight"):
                continue
            tensors = [held.get(f"{prefix}{name}".removesuffix(".weight"), {}) for name in layout.fused]
            if all(
                not held_here or "weight" in held_here for held_here in tensors
            ):  # none are experts of other processes
                continue
            names = keys_of_experts(prefix, layout, reverted_from_scratch(model))
            for name, known in names.items():
                layer = f"{prefix}{name}".removesuffix(".weight")
                for kind, key in by_layer.get(known.removesuffix(".weight"), {}).items():
                    if kind in held.get(layer, {}):
                        found[key] = f"{layer}.{kind}", layout
    return found


def reverted_from_scratch(model: PreTrainedModel) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """What gives the checkpoint that stacks are saved as by a model that was not loaded."""
    view: Any = ModelView(model, get_parameter={}.__getitem__)
    return functools.partial(stock_revert, view, conversions=stock_conversions_from_scratch(model))


def _by_layer(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Name of a module -> name of what it has itself -> the key."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        layer, _, kind = key.rpartition(".")
        found.setdefault(layer, {})[kind] = key
    return found


def keys_of_experts(
    prefix: str, layout: Matrices, revert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> dict[str, str]:
    """Parameter of one expert -> the key that it is saved under, {} where not each has a key of its own.

    Found by saving a stack of small matrices, whose numbers say whose they are: each has to come out as it went in.
    """
    experts, rows = layout.stock_shapes[0][0], 2 * layout.parts
    shape = (experts, 3, rows) if layout.transposed else (experts, rows, 3)
    small = replace(layout, stock_shapes=(shape,))
    given = [torch.arange(6.0).view(2, 3) + 6 * number for number in range(len(layout.fused))]
    (stack,) = small.separate(given)
    try:
        found = revert({f"{prefix}{layout.stock[0]}": stack})
    except Exception:  # an operation that looks at shapes: then it isn't known
        return {}
    numbers = {int(value.flatten()[0]) // 6: key for key, value in found.items() if key.endswith(".weight")}
    if len(found) != len(given) or numbers.keys() != set(range(len(given))):
        return {}
    if not all(torch.equal(found[numbers[number]], each) for number, each in enumerate(given)):
        return {}
    return {name: numbers[number] for number, name in enumerate(layout.fused)}
