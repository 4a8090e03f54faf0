"""The fourth step of a load: its keys are routed and judged, the weights are read, and what was done is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from patcher.compat.conversions import (
    copy_transform,
    is_prequantized,
    key_renamer,
    set_used_conversions,
    stock_conversions,
    with_model_prefix,
)
from patcher.compat.models import mark_initialized, named_parameters, settle_keys, state_tensors
from patcher.layouts.carried import fused_modules
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.sources import named_sources
from patcher.loading.judgement import judge
from patcher.loading.load import Loaded, Selected
from patcher.loading.routes import Conversions, Routing, route, share
from patcher.resolution.resolution import skeleton


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
        nothing = Routing()
        return Loaded(**vars(selected), info=nothing), nothing, None
    mapping = list(load_config.weight_mapping or [])
    routing = _routed(selected, checkpoint, mapping, load_config)
    if dry_run is None and (problem := routing.problem or routing.failure):
        raise problem
    is_told = not is_prequantized(load_config.hf_quantizer) and not routing.conversion_errors
    of_stock = cache(partial(stock_routing, selected, checkpoint))
    judged = partial(judge, selected, routing, checkpoint, stock_routing=of_stock)
    loaded = judged(routing) if is_told or dry_run is not None else None
    if dry_run is not None and loaded is not None:
        for name, parameter in named_parameters(loaded.model):  # what transformers doesn't mind, as a load does
            if name not in routing.absent:
                mark_initialized(parameter)
        settle_keys(loaded.model, routing)
        return loaded, routing, None
    weights, conversions = dict(routing.rest), mapping
    if selected.runtime_layout:  # what is left of transformers' own renames; the others are a quantizer's
        conversions = [each for each in mapping if isinstance(each, WeightConverter)]
    if routing.sources:
        named, conversion = named_sources(routing.sources)
        weights, conversions = {**weights, **named}, [conversion, *mapping]
    info, disk_index = read_weights(weights, replace(load_config, weight_mapping=conversions))
    set_used_conversions(selected.model, mapping, routing.used)
    if loaded is None or not routing.agrees_with(info):
        loaded = judged(info)
    return replace(loaded, info=info, disk_index=disk_index), info, disk_index


def stock_routing(selected: Selected, checkpoint: Mapping[str, Any]) -> Routing:
    """What the stock model would make of a checkpoint."""
    stock = skeleton(selected.record.model_class, selected.model.config)
    conversions = stock_conversions(stock, dict(selected.key_mapping) if selected.key_mapping else None)
    return route(stock, checkpoint, Conversions(conversions), unknown=_unknown_keys(selected))


def _unknown_keys(selected: Selected) -> frozenset[str]:
    return selected.dry_run.unknown if selected.dry_run is not None else frozenset()


def _routed(selected: Selected, checkpoint: Mapping[str, Any], mapping: list[Any], load_config: Any) -> Routing:
    """Where the keys of a checkpoint go."""
    model = selected.model
    if selected.runtime_layout:
        return _as_it_is(model, checkpoint, mapping)
    requested, replaced = len(selected.key_mapping or ()), selected.record.paths_of_replacements
    own = state_tensors(model)

    def dtype(name: str) -> torch.dtype:
        """The type that the load gives a parameter."""
        plan: dict[str, torch.dtype] = load_config.dtype_plan or {}
        found = next((kind for pattern, kind in plan.items() if re.search(pattern.replace("*", ".*"), name)), None)
        return found or (own[name].dtype if name in own else torch.get_default_dtype())

    return route(
        model,
        checkpoint,
        Conversions(mapping, selected.conversions.added, requested, replaced),
        unknown=_unknown_keys(selected),
        quantizer=load_config.hf_quantizer,
        dtype=dtype if selected.dry_run is None else None,
    )


def _as_it_is(model: PreTrainedModel, checkpoint: Mapping[str, Any], mapping: list[Any]) -> Routing:
    """A checkpoint that has the parameters of the model as they are: what has the name of one isn't renamed."""
    own = state_tensors(model)
    renamings = [copy_transform(each) for each in mapping if not isinstance(each, WeightConverter)]
    rename = key_renamer(renamings, model, own)
    known = {key: with_model_prefix(key, model, own) for key in checkpoint}
    names = {key if name in own else rename(key)[0]: key for key, name in known.items()}
    weights = {name: checkpoint[key] for name, key in names.items()}
    # A base model takes the names of a model with a head, and the other way round.
    placed = {with_model_prefix(name, model, own): tensor for name, tensor in weights.items()}
    routing = route(model, placed, Conversions())
    routing.rest, routing.sources, routing.is_runtime_layout = weights, {}, True
    layouts = [layout for each in fused_modules(model) for layout in each.fused]
    if any(map(lies_in_blocks, layouts)):
        share(routing.rest, {with_model_prefix(name, model, own): name for name in names}, layouts)
    return routing
