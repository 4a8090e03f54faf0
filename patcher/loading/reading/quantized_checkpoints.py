"""Checkpoints that are quantized already: a fusion or a conversion can't take such weights.

Beside them lie tensors that belong to the layer as it is (`SCB`, `weight_scale`), so they are refused before anything
is read. What the quantizer has left alone is taken as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from patcher.compat.conversions import key_renamer
from patcher.compat.models import state_tensors
from patcher.errors import PatchedWeightsError
from patcher.layouts.fused_weights import fused_modules, is_quantized
from patcher.layouts.sources import dtype_of
from patcher.layouts.tracing import trace_of
from patcher.loading.expert_names import quantized_experts
from patcher.loading.load import Selected
from patcher.loading.reading.fused_sources import FusedReading, stock_tensors
from patcher.patterns import compress, inside

#: Types of one byte, as safetensors calls them.
_BYTES = ("I8", "U8", "F8")


def check_quantized(
    selected: Selected, checkpoint: Mapping[str, Any], conversions: Iterable[Any]
) -> PatchedWeightsError | None:
    """What is wrong with a load that would make other weights of quantized ones."""
    model, fused = selected.model, fused_modules(selected.model)
    own = state_tensors(model)
    rename = key_renamer(conversions, model, stock_tensors(own, fused))
    wanted = {f"{inside(path)}{name}" for path, _, carried in fused for name in carried.stock}
    added = {id(item.trace.transform) for item in selected.traced}
    as_they_are = quantized_experts(model, checkpoint, fused, own)

    def is_taken(key: str) -> bool:
        name, taker, _ = rename(key)
        trace = None if taker is None else trace_of(taker)
        return name in wanted or (trace is not None and id(trace.transform) in added)

    left = [key for key in checkpoint if key not in as_they_are]
    return _refused(
        "it has these quantized, of which the patcher makes others", _quantized_keys(left, checkpoint, is_taken)
    )


def check_made_quantized(
    selected: Selected, checkpoint: Mapping[str, Any], reading: FusedReading
) -> PatchedWeightsError | None:
    """What is wrong with a load that would read a weight in full precision for a layer that a quantizer has made."""
    fused, own = fused_modules(selected.model), state_tensors(selected.model)
    as_they_are = {target for target, _ in quantized_experts(selected.model, checkpoint, fused, own).values()}
    keys = [
        key
        for target, (keys, _) in reading.keys.items()
        if target in own and target not in as_they_are and is_quantized(own[target])
        for key in keys
    ]
    return _refused("it has these in full precision, of which the patcher makes layers that are quantized then", keys)


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
