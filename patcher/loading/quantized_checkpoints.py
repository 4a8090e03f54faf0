"""Checkpoints that are quantized already: a fusion or a conversion can't take such weights.

Beside them lie tensors that belong to the layer as it is (`SCB`, `weight_scale`), so they are refused before anything
is read. What the quantizer has left alone is taken as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from patcher.compat.models import state_tensors
from patcher.errors import PatchedWeightsError
from patcher.layouts.carried import fused_modules, is_quantized
from patcher.layouts.sources import dtype_of
from patcher.loading.expert_names import quantized_experts
from patcher.loading.routes import Routing
from patcher.patterns import compress, inside

#: Types of one byte, as safetensors calls them.
_BYTES = ("I8", "U8", "F8")


def check_quantized(model: PreTrainedModel, checkpoint: Mapping[str, Any], routing: Routing, *, keeps: bool) -> None:
    """Note in a routing what is wrong with a load that would make other weights of quantized ones.

    Args:
        keeps: whether what is quantized in the checkpoint is so in the model as well.
    """
    fused, own = fused_modules(model), state_tensors(model)
    wanted = {f"{inside(path)}{name}" for path, _, carried in fused for name in carried.stock} if keeps else set()
    experts = quantized_experts(model, checkpoint, fused, own)

    def is_taken(key: str) -> bool:
        found = routing.follow(key)
        return found.name in wanted or bool(found.by)

    left = [key for key in checkpoint if key not in experts]
    problem = _refused(
        "it has these quantized, of which the patcher makes others", _quantized_keys(left, checkpoint, is_taken)
    )
    as_they_are = {target for target, _ in experts.values()}
    whole = [
        key
        for route in routing.routes
        if route.layout is not None and keeps
        for target in route.parameters
        if target in own and target not in as_they_are and is_quantized(own[target])
        for key in route.keys
    ]
    problem = problem or routing.problem
    routing.problem = problem or _refused(
        "it has these in full precision, of which the patcher makes layers that are quantized then", whole
    )


def _quantized_keys(keys: Iterable[str], checkpoint: Mapping[str, Any], is_taken: Callable[[str], bool]) -> list[str]:
    """Of the layers whose weight is quantized, and taken, all keys."""
    layers: dict[str, list[str]] = {}
    for key in keys:
        # `x.weight.absmax` is of the layer x too.
        layer = key.partition(".weight.")[0] if ".weight." in key else key.rpartition(".")[0]
        layers.setdefault(layer, []).append(key)
    return [
        key
        for layer, held in layers.items()
        if _has_quantized(layer, held, checkpoint) and is_taken(f"{layer}.weight")
        for key in held
    ]


def _has_quantized(layer: str, held: list[str], checkpoint: Mapping[str, Any]) -> bool:
    if any(key not in (f"{layer}.weight", f"{layer}.bias") for key in held):
        return True
    dtype: Any = dtype_of(checkpoint[held[0]]) if held[0].endswith(".weight") else None
    return dtype.startswith(_BYTES) if isinstance(dtype, str) else dtype is not None and dtype.itemsize == 1


def _refused(what: str, keys: Iterable[str]) -> PatchedWeightsError | None:
    listed = compress(keys)
    if not listed:
        return None
    lines = "".join(f"  {key}\n" for key in listed[:5])
    return PatchedWeightsError(
        f"The checkpoint is quantized, and {what}:\n{lines}"
        "Fuse the full-precision checkpoint, and quantize that while it loads."
    )
