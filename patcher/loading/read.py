"""The fourth step of a load: its keys are routed and judged, the weights are read, and what was done is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from patcher.compat.conversions import (
    copy_transform,
    is_prequantized,
    keeps_quantized,
    key_renamer,
    set_used_conversions,
    stock_conversions,
    with_model_prefix,
)
from patcher.compat.models import mark_initialized, named_parameters, settle_keys, state_tensors
from patcher.errors import PatchedWeightsError
from patcher.layouts.carried import fused_modules, is_quantized
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.sources import dtype_of, named_sources
from patcher.loading.expert_names import quantized_experts
from patcher.loading.judgement import judge
from patcher.loading.load import Loaded, Selected
from patcher.loading.routes import Conversions, Routing, route, share
from patcher.patterns import compress
from patcher.resolution.resolution import skeleton


class ExpectedInfo:
    """What transformers would know of a load at its end."""

    def __init__(self, routing: Routing) -> None:
        self.missing_keys = set(routing.missing)
        self.unexpected_keys = set(routing.unexpected)
        self.mismatched_keys = {(name, *shapes) for name, shapes in routing.mismatched.items()}
        self.conversion_errors = dict(routing.errors)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def is_true_of(self, info: Any) -> bool:
        """Whether it has come so."""
        return (
            not info.conversion_errors
            and self.missing_keys == info.missing_keys
            and self.unexpected_keys == info.unexpected_keys
            and {name for name, *_ in self.mismatched_keys} == {name for name, *_ in info.mismatched_keys}
        )


def read(
    selected: Selected,
    checkpoint: Mapping[str, Any],
    load_config: Any,
    read_weights: Callable[[Mapping[str, Any], Any], tuple[Any, Any]],
) -> tuple[Loaded, Any, Any]:
    """Check the names and shapes of a checkpoint, then have its weights read.

    Args:
        read_weights: reads what it is given as the checkpoint, by this configuration of a load; gives what
            transformers knows of the load then, and its index of the disk.

    Returns:
        The result, and what `read_weights` gave.

    Raises:
        UnmatchedPatchError: a filter or a conversion had no effect.
        PatchedWeightsError: parameters of replaced modules are missing, tensors are left over, a conversion failed.
    """
    dry_run = selected.dry_run
    if dry_run is not None and not dry_run.has_checkpoint:
        info = ExpectedInfo(Routing())
        return Loaded(**vars(selected), info=info), info, None
    mapping, quantizer = list(load_config.weight_mapping or []), load_config.hf_quantizer
    routing = _routed(selected, checkpoint, mapping, load_config)
    expected = ExpectedInfo(routing)
    if dry_run is None and (problem := routing.problem or routing.failure):
        raise problem
    is_told = not is_prequantized(quantizer) and not routing.errors
    of_stock = cache(partial(stock_routing, selected, checkpoint))
    judged = partial(judge, selected, routing, checkpoint, stock_routing=of_stock)
    loaded = judged(expected) if is_told or dry_run is not None else None
    if dry_run is not None and loaded is not None:
        _settle(loaded)
        return loaded, loaded.info, None
    weights, conversions = dict(routing.rest), mapping
    if selected.runtime_layout:  # what is left of transformers' own renames; the others are a quantizer's
        conversions = [each for each in mapping if isinstance(each, WeightConverter)]
    if routing.sources:
        named, conversion = named_sources(routing.sources)
        weights, conversions = {**weights, **named}, [conversion, *mapping]
    info, disk_index = read_weights(weights, replace(load_config, weight_mapping=conversions))
    set_used_conversions(selected.model, mapping, routing.used)
    if loaded is None or not expected.is_true_of(info):
        loaded = judged(info)
    return replace(loaded, info=info, disk_index=disk_index), info, disk_index


def stock_routing(selected: Selected, checkpoint: Mapping[str, Any]) -> Routing:
    """What the stock model would make of a checkpoint."""
    stock = skeleton(selected.record.model_class, selected.model.config)
    conversions = stock_conversions(stock, dict(selected.key_mapping) if selected.key_mapping else None)
    return route(stock, checkpoint, Conversions(conversions), unknown=unknown_keys(selected))


def unknown_keys(selected: Selected) -> frozenset[str]:
    return selected.dry_run.unknown if selected.dry_run is not None else frozenset()


def _routed(selected: Selected, checkpoint: Mapping[str, Any], mapping: list[Any], load_config: Any) -> Routing:
    """Where the keys of a checkpoint go."""
    model, quantizer = selected.model, load_config.hf_quantizer
    if selected.runtime_layout:
        return _as_it_is(model, checkpoint, mapping)
    unknown = unknown_keys(selected)
    conversions = Conversions(
        mapping,
        selected.conversions.added,
        len(selected.key_mapping or ()),
        selected.record.paths_of_replacements,
    )
    own = state_tensors(model)
    routing = route(
        model,
        checkpoint,
        conversions,
        unknown=unknown,
        is_quantized=is_prequantized(quantizer),
        dtype=(lambda name: _dtype(load_config, own, name)) if selected.dry_run is None else None,
    )
    keeps = keeps_quantized(quantizer)
    if keeps or (is_prequantized(quantizer) and conversions.added):
        check_quantized(model, checkpoint, routing, keeps=keeps)
    return routing


def _as_it_is(model: PreTrainedModel, checkpoint: Mapping[str, Any], mapping: list[Any]) -> Routing:
    """A checkpoint that has the parameters of the model as they are: what has the name of one isn't renamed."""
    own = state_tensors(model)
    renamings = [copy_transform(each) for each in mapping if not isinstance(each, WeightConverter)]
    rename = key_renamer(renamings, model, own)
    known = {key: with_model_prefix(key, model, own) for key in checkpoint}
    names = {key if name in own else rename(key)[0]: key for key, name in known.items()}
    weights = {name: checkpoint[key] for name, key in names.items()}
    routing = route(model, weights, Conversions())
    routing.rest, routing.sources, routing.is_runtime_layout = weights, {}, True
    layouts = [layout for each in fused_modules(model) for layout in each.fused]
    if any(map(lies_in_blocks, layouts)):
        share(routing.rest, {with_model_prefix(name, model, own): name for name in names}, layouts)
    return routing


def _settle(loaded: Loaded) -> None:
    """Take from the keys of a dry run what transformers doesn't mind, as a load does at its end."""
    parameters = dict(named_parameters(loaded.model))
    amiss = loaded.info.missing_keys | {name for name, *_ in loaded.info.mismatched_keys}
    for name in parameters.keys() - amiss:
        mark_initialized(parameters[name])
    settle_keys(loaded.model, loaded.info)


def _dtype(load_config: Any, own: Mapping[str, torch.Tensor], name: str) -> torch.dtype:
    """The type that a load gives a parameter."""
    for pattern, dtype in (load_config.dtype_plan or {}).items():
        if re.search(pattern.replace("*", ".*"), name):
            found: torch.dtype = dtype
            return found
    return own[name].dtype if name in own else torch.get_default_dtype()


# --- checkpoints that are quantized already --------------------------------------------------------------------------


#: Types of one byte, as safetensors calls them.
_BYTES = ("I8", "U8", "F8")


def check_quantized(model: PreTrainedModel, checkpoint: Mapping[str, Any], routing: Routing, *, keeps: bool) -> None:
    """Note in a routing what is wrong with a load that would make other weights of quantized ones.

    Beside these lie tensors that belong to the layer as it is (`SCB`, `weight_scale`). What the quantizer has left
    alone is taken as ever.

    Args:
        keeps: whether what is quantized in the checkpoint is so in the model as well.
    """
    fused, own = fused_modules(model), state_tensors(model)
    wanted = {name for each in fused for layout in each.fused for name in layout.stock} if keeps else set()
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
    return held[0].endswith(".weight") and dtype_of(checkpoint[held[0]]).startswith(_BYTES)


def _refused(what: str, keys: Iterable[str]) -> PatchedWeightsError | None:
    listed = compress(keys)
    if not listed:
        return None
    lines = "".join(f"  {key}\n" for key in listed[:5])
    return PatchedWeightsError(
        f"The checkpoint is quantized, and {what}:\n{lines}"
        "Fuse the full-precision checkpoint, and quantize that while it loads."
    )
