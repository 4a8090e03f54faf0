"""The names that a checkpoint has for the layers of single experts, where it has such.

A quantizer puts tensors beside the weights of a layer (`weight_packed`, `weight_scale`), which no stack has a place
for. Checkpoints that hold experts one by one do: there such layers are saved as they are, under the names that the
checkpoint itself has for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from patcher.conversions.fused_weights import FusedWeights, is_quantized
from patcher.fusions.experts.matrices import Matrices
from patcher.patterns import inside


def named_as_in_checkpoint(
    path: str,
    carried: FusedWeights,
    state_dict: Mapping[str, torch.Tensor],
    revert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, str]:
    """Key of a state dict -> the key of a checkpoint, of what belongs to the quantized experts of a module.

    Args:
        revert: gives the checkpoint that stacks are saved as.
    """
    prefix, result = inside(path), {}
    for layout in carried.layouts:
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
        plain = {f"{prefix}{layer}{kind}" for layer in layers for kind in ("weight", "bias")}
        if own.keys() <= plain and not any(is_quantized(state_dict[key]) for key in own):
            continue
        names = keys_of_experts(prefix, layout, revert)
        for key, layer in own.items():
            if layers[layer] in names:
                start = f"{prefix}{layer}"
                result[key] = names[layers[layer]].removesuffix("weight") + key.removeprefix(start)
    return result


def keys_of_experts(
    prefix: str, layout: Matrices, revert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> dict[str, str]:
    """Parameter of one expert -> the key that it is saved under, {} where not each has a key of its own.

    Found by saving a stack of matrices of one number each, which says whose it is.
    """
    experts = layout.stock_shapes[0][0]
    shape = (experts, 1, layout.parts) if layout.transposed else (experts, layout.parts, 1)
    small = replace(layout, stock_shapes=(shape,))
    (stack,) = small.separate([torch.full((1, 1), float(number)) for number in range(len(layout.fused))])
    try:
        found = revert({f"{prefix}{layout.stock[0]}": stack})
    except Exception:  # an operation that looks at shapes: then it isn't known
        return {}
    numbers = {int(value): key for key, value in found.items() if value.numel() == 1 and key.endswith(".weight")}
    if len(found) != len(layout.fused) or numbers.keys() != set(range(len(layout.fused))):
        return {}
    return {name: numbers[number] for number, name in enumerate(layout.fused)}
