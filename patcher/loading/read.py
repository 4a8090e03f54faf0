"""The fourth step of a load: its keys are routed and judged, the weights are read, and what was done is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.utils import logging

from patcher.compat.conversions import key_renamer, set_used_conversions, stock_conversions
from patcher.compat.models import mark_initialized, named_parameters, settle_keys, state_tensors
from patcher.compat.quantizers import is_prequantized, keeps_quantized
from patcher.layouts.carried import fused_modules, is_shared
from patcher.layouts.sources import named_sources, shape_of
from patcher.layouts.transforms import is_concatenation
from patcher.loading.completion import complete, missing_experts
from patcher.loading.judgement import judge
from patcher.loading.load import Loaded, Selected
from patcher.loading.quantized_checkpoints import check_quantized
from patcher.loading.routes import Conversions, Routing, route, share
from patcher.patterns import compress
from patcher.resolution.resolution import skeleton

logger = logging.get_logger(__name__)


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
    # Names and shapes don't say what comes of the parts of weights that are quantized.
    if not is_prequantized(quantizer) and not selected.runtime_layout and _is_incomplete(selected, routing):
        selected, checkpoint, routing = _completed(selected, checkpoint, mapping, load_config, routing)
    expected = ExpectedInfo(routing)
    if dry_run is None and (problem := routing.problem or routing.failure):
        raise problem
    is_told = not is_prequantized(quantizer) and not routing.errors
    unpatched = partial(stock_routing, selected, checkpoint)
    judged = partial(judge, selected, routing, checkpoint, stock_routing=unpatched)
    loaded = judged(expected) if is_told or dry_run is not None else None
    if dry_run is not None and loaded is not None:
        _settle(loaded)
        return loaded, loaded.info, None
    weights, conversions = dict(routing.rest), mapping
    if routing.sources:
        named, conversion = named_sources(routing.sources)
        weights, conversions = {**weights, **named}, [conversion, *mapping]
    info, disk_index = read_weights(weights, replace(load_config, weight_mapping=conversions))
    set_used_conversions(selected.model, mapping, routing.used)
    if loaded is None or not expected.is_true_of(info):
        loaded = judged(info)
    return replace(loaded, info=info, disk_index=disk_index), info, disk_index


def stock_routing(selected: Selected, checkpoint: Mapping[str, Any]) -> Routing:
    """What the unpatched model would make of a checkpoint."""
    stock = skeleton(selected.record.model_class, selected.model.config)
    conversions = stock_conversions(stock, dict(selected.key_mapping) if selected.key_mapping else None)
    return route(stock, checkpoint, Conversions(conversions), unknown=unknown_keys(selected))


def tell_initialized(info: Any, selected: Selected) -> None:
    """Add to what a load gives out as its info the parts of parameters that it has initialised, as stock would."""
    for key, shapes in selected.initialized.items():
        if shapes is None:
            info.missing_keys.add(key)
        else:
            info.mismatched_keys.add((key, *shapes))


def unknown_keys(selected: Selected) -> frozenset[str]:
    return selected.dry_run.unknown if selected.dry_run is not None else frozenset()


def _routed(selected: Selected, checkpoint: Mapping[str, Any], mapping: list[Any], load_config: Any) -> Routing:
    """Where the keys of a checkpoint go."""
    model, quantizer = selected.model, load_config.hf_quantizer
    if selected.runtime_layout:
        return _as_it_is(model, checkpoint, mapping)
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
        unknown=unknown_keys(selected),
        is_quantized=is_prequantized(quantizer),
        dtype=(lambda name: _dtype(load_config, own, name)) if selected.dry_run is None else None,
    )
    keeps = keeps_quantized(quantizer)
    if keeps or (is_prequantized(quantizer) and conversions.added):
        check_quantized(model, checkpoint, routing, keeps=keeps)
    return routing


def _as_it_is(model: PreTrainedModel, checkpoint: Mapping[str, Any], mapping: list[Any]) -> Routing:
    """A checkpoint that has the parameters of the model as they are."""
    routing = route(
        model, checkpoint, Conversions([each for each in mapping if not isinstance(each, WeightConverter)])
    )
    routing.rest, routing.sources, routing.is_runtime_layout = dict(checkpoint), {}, True
    fused = fused_modules(model)
    if any(is_shared(carried) for *_, carried in fused):
        own = state_tensors(model)
        rename = key_renamer(mapping, model, own)
        share(routing.rest, {rename(key)[0]: key for key in checkpoint}, fused)
    return routing


def _is_incomplete(selected: Selected, routing: Routing) -> bool:
    """Whether something that is made of several tensors may lack one of them."""
    if routing.problem is not None:
        return not routing.is_hopeless
    amiss = bool(routing.missing or routing.mismatched or routing.errors)
    added = [each.transform for each in selected.conversions.added]
    if any(amiss or is_concatenation(each) for each in added):
        return True
    return selected.dry_run is None and bool(missing_experts(selected.model, routing.missing))


def _completed(
    selected: Selected, checkpoint: Mapping[str, Any], mapping: list[Any], load_config: Any, routing: Routing
) -> tuple[Selected, Mapping[str, Any], Routing]:
    """The load with initial values for parts that the checkpoint lacks, or with what is said of them."""
    completion = complete(
        selected.model,
        skeleton(selected.record.model_class, selected.model.config),
        checkpoint,
        routing,
        dtype=load_config.dtype,
        ignores_shapes=load_config.ignore_mismatched_sizes,
        is_read=selected.dry_run is None,
        replaced=selected.record.paths_of_replacements,
    )
    is_strict = selected.strict or bool(completion.misfits)  # transformers raises for shapes as well
    selected = replace(selected, diagnostics=selected.diagnostics.adding(completion.error, strict=is_strict))
    if not completion.initialized:
        return selected, checkpoint, routing
    if selected.dry_run is None:
        keys = ", ".join(compress(completion.initialized))
        logger.warning(f"Not in the checkpoint, or of another shape there, so newly initialized: {keys}")
    initialized = dict.fromkeys(completion.initialized) | {
        key: (torch.Size(shape_of(checkpoint[key])), torch.Size(shape_of(completion.checkpoint[key])))
        for key in completion.initialized
        if key in checkpoint
    }
    selected = replace(selected, initialized=initialized)
    return selected, completion.checkpoint, _routed(selected, completion.checkpoint, mapping, load_config)


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
