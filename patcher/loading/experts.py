"""The names that a checkpoint has for the layers of single experts, where it has such.

There such layers can be given as they are, under the names that the checkpoint itself has for them. What a quantizer
puts beside the weights of a layer (`weight_packed`, `weight_scale`), which no stack has a place for, is saved so.
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
from patcher.patterns import inside

#: Gives the checkpoint that stacks are saved as.
Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def default_revert(model: PreTrainedModel) -> Revert:
    """What gives the checkpoint that stacks are saved as by a model that was not loaded."""
    view: Any = ModelView(model, get_parameter={}.__getitem__)
    return functools.partial(stock_revert, view, conversions=stock_conversions_from_scratch(model))


def group_by_layer(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Path of a module -> name of what it has itself -> the key; `x.weight.absmax` is of the layer x too."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        layer = key.partition(".weight.")[0] if ".weight." in key else key.rpartition(".")[0]
        found.setdefault(layer, {})[key.removeprefix(inside(layer))] = key
    return found


def expert_checkpoint_names(
    carrier: Carrier, state_dict: Mapping[str, torch.Tensor], revert: Revert
) -> tuple[dict[str, str], dict[str, str]]:
    """Key of a state dict -> the key of a checkpoint, of what belongs to the experts of a module.

    Returns:
        All of those that are quantized, and the weights of the others.
    """
    quantized: dict[str, str] = {}
    plain: dict[str, str] = {}
    held = group_by_layer(key for key in state_dict if key.startswith(carrier.prefix))
    for layout, layers in _weights_of(carrier):
        own = {name: held.get(layer, {}) for name, layer in layers.items()}
        is_plain = all(
            kind in ("weight", "bias") and not is_quantized(state_dict[key])
            for found in own.values()
            for kind, key in found.items()
        )
        for name, known in expert_keys(carrier.prefix, layout, revert).items():
            for kind, key in own[name].items():
                if not (is_plain and kind == "bias"):
                    (plain if is_plain else quantized)[key] = known.removesuffix("weight") + kind
    return quantized, plain


def quantized_experts(
    model: PreTrainedModel, checkpoint: Iterable[str], fused: Iterable[Carrier], own: Iterable[str]
) -> dict[str, tuple[str, Layout]]:
    """Key -> (parameter or buffer, layout), of experts that are quantized as the layers that they are here.

    A quantizer has given such layers tensors of its own in the place of the weight, and the checkpoint has them under
    its names of experts. Where it has left some of them alone, those are read one by one as well.

    Args:
        own: the names of what the model holds.
    """
    found: dict[str, tuple[str, Layout]] = {}
    held, given = group_by_layer(own), group_by_layer(checkpoint)
    for each in fused:
        for layout, layers in _weights_of(each):
            here = {name: held.get(layer, {}) for name, layer in layers.items()}
            if all("weight" in kinds for kinds in here.values() if kinds):  # none are experts of other processes
                continue
            for name, known in expert_keys(each.prefix, layout, default_revert(model)).items():
                for kind, key in given.get(known.removesuffix(".weight"), {}).items():
                    if kind in here[name]:
                        found[key] = f"{layers[name]}.{kind}", layout
    return found


def _weights_of(carrier: Carrier) -> Iterator[tuple[Matrices, dict[str, str]]]:
    """The layouts of a module that are weights of experts, and the paths of their layers by parameter."""
    for layout in carrier.carried.layouts:
        if isinstance(layout, Matrices) and layout.fused[0].endswith(".weight"):
            yield layout, {name: carrier.prefix + name.removesuffix(".weight") for name in layout.fused}


def expert_keys(prefix: str, layout: Matrices, revert: Revert) -> dict[str, str]:
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
