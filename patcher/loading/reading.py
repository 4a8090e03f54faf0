"""The fourth step of a load: names and shapes are checked, the weights are read, and what was done is recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from patcher.compat.conversions import (
    copy_transform,
    is_stock_operation,
    set_used_conversions,
    source_patterns,
    stock_conversions,
    take_over_use,
    target_patterns,
    was_used,
)
from patcher.compat.models import mark_initialized, named_parameters, settle_keys, state_tensors
from patcher.construction.in_force import InForce, Matched, tell_blocks
from patcher.conversions.simulation import Outcome, simulate
from patcher.conversions.sources import on_meta, shape_of
from patcher.conversions.tracing import ConversionTrace, trace_of, with_trace
from patcher.conversions.transforms import describe, identity
from patcher.errors import PatchedWeightsError
from patcher.expressions import Expressions
from patcher.loading.checks import Diagnostics, check_weights, failed_text
from patcher.loading.completion import Completion, complete
from patcher.loading.fused_sources import FusedReading, with_fused_sources
from patcher.loading.load import DryRun, Loaded, Selected
from patcher.loading.matches import idle_source
from patcher.patterns import compress
from patcher.resolution.resolution import skeleton

logger = logging.get_logger(__name__)


class _Info:
    """What transformers would know of a load at its end."""

    def __init__(self, outcome: Outcome) -> None:
        self.missing_keys = set(outcome.missing)
        self.unexpected_keys = set(outcome.unexpected)
        self.mismatched_keys = {(name, *shapes) for name, shapes in outcome.mismatched.items()}
        self.conversion_errors = outcome.conversion_errors

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


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
    mapping = load_config.weight_mapping or []
    if selected.dry_run is not None:
        expected = _dry_run(selected, load_config, checkpoint, selected.dry_run)
        return expected, expected.info, None
    quantized = not _can_be_simulated(load_config)
    reading = _reading(selected, checkpoint, mapping, quantized=quantized)
    if not quantized and (reading.problem is not None or not _fits_as_it_is(selected, reading)):
        # Raises what is wrong before anything is read.
        selected, completed, _ = _simulate_read(selected, load_config, checkpoint)
        if completed is not checkpoint:
            checkpoint = completed
            reading = _reading(selected, checkpoint, mapping, quantized=quantized)
    if reading.problem is not None:
        raise reading.problem
    weights, conversions = reading.for_load(mapping)
    info, disk_index = read_weights(weights, replace(load_config, weight_mapping=conversions))
    loaded = _check_read(selected, mapping, checkpoint, reading, info, disk_index)
    # What it reverses by itself; the traces of ours are reversed by what they did.
    own = [item for item in loaded.record.conversions if not isinstance(item, ConversionTrace)]
    set_used_conversions(selected.model, own)
    return loaded, info, disk_index


def _reading(
    selected: Selected,
    checkpoint: Mapping[str, Any],
    mapping: list[Any],
    unknown: frozenset[str] = frozenset(),
    *,
    quantized: bool,
    simulated: bool = False,
) -> FusedReading:
    """How the checkpoint is read by a model with fused modules."""
    if selected.runtime_layout:
        return FusedReading(checkpoint, fused_already=True)
    return with_fused_sources(selected.model, checkpoint, mapping, unknown, quantized=quantized, simulated=simulated)


def _dry_run(selected: Selected, load_config: Any, checkpoint: Mapping[str, Any], asked: DryRun) -> Loaded:
    if not asked.has_checkpoint:
        return Loaded(**vars(selected), info=_Info(Outcome()))
    quantized = not _can_be_simulated(load_config)
    _, _, expected = _simulate_read(selected, load_config, checkpoint, quantized=quantized)
    assert expected is not None
    # Take from the keys what transformers doesn't mind, as a load does at its end.
    parameters = dict(named_parameters(selected.model))
    for name in expected.outcome.loaded & set(parameters):
        mark_initialized(parameters[name])
    settle_keys(selected.model, expected.info)
    return expected


def _can_be_simulated(load_config: Any) -> bool:
    """Whether names and shapes say what a load will come to: not so of the parts of weights that are quantized."""
    quantizer = load_config.hf_quantizer
    return quantizer is None or not quantizer.pre_quantized


def _fits_as_it_is(selected: Selected, reading: FusedReading) -> bool:
    """Whether what is read has every tensor of the replaced modules, by name and shape, and no other, as usual.

    A renaming of stock may still take one elsewhere: what was read is checked in any case.
    """
    filters = (entry.patcher.filtered_weight_conversion_patterns for entry in selected.in_force)
    if selected.traced or "" in dict(selected.outermost) or any(filters):
        return False
    under = tuple(f"{path}." for path, _ in selected.outermost)
    own = (named_parameters(built.module, path) for path, built in selected.outermost)
    expected = {key: parameter.shape for named in own for key, parameter in named}
    found = {key: shape_of(value) for key, value in reading.rest.items() if key.startswith(under)}
    return expected == {**found, **{key: shape for key, shape in reading.shapes.items() if key.startswith(under)}}


def _simulate_read(
    selected: Selected, load_config: Any, checkpoint: Mapping[str, Any], *, quantized: bool = False
) -> tuple[Selected, Mapping[str, Any], Loaded | None]:
    """What the load will come to, by names and shapes.

    On copies of the conversions, since they collect what passes through them.

    Returns:
        The load with what was said of it, the checkpoint as it is to be read, and the result, if it can be told.

    Raises:
        UnmatchedPatchError: as `read`.
        PatchedWeightsError: as `read`.
    """
    mapping = load_config.weight_mapping or []
    alone, copied, reading, outcome = _simulated(selected, mapping, checkpoint, quantized=quantized)
    for twice, others in outcome.twice.items():
        as_it_is = "as it is" if others[-1] == twice else f"as {others[-1]}"
        raise PatchedWeightsError(
            f"The checkpoint holds {twice} twice: {as_it_is}, and as {', '.join(others[:-1])}. Take one of them out."
        )
    if not quantized and not selected.runtime_layout and (reading.problem is not None or selected.traced):
        completion = _completed(selected, load_config, checkpoint, outcome)
        is_strict = selected.strict or bool(completion.misfits)  # transformers raises for shapes as well
        selected = replace(selected, diagnostics=selected.diagnostics.adding(completion.error, strict=is_strict))
        if completion.initialized:
            checkpoint = completion.checkpoint
            alone, copied, reading, outcome = _simulated(selected, mapping, checkpoint)
            if selected.dry_run is None:
                keys = ", ".join(compress(completion.initialized))
                logger.warning(f"Not in the checkpoint, or of another shape there, so newly initialized: {keys}")
    if outcome.conversion_errors and selected.dry_run is None and not _fails_for_sure(copied, outcome):
        return selected, checkpoint, None
    result = replace(_check_read(alone, copied, checkpoint, reading, _Info(outcome)), outcome=outcome)
    return selected, checkpoint, result


def _simulated(
    selected: Selected, mapping: list[Any], checkpoint: Mapping[str, Any], *, quantized: bool = False
) -> tuple[Selected, list[Any], FusedReading, Outcome]:
    """The load with copies of its conversions, these, how the checkpoint is read, and what comes of it."""
    copies = {
        id(item): with_trace(trace.transform) if (trace := trace_of(item)) else copy_transform(item)
        for item in mapping
    }
    alone = replace(
        selected,
        traced=tuple(copies.get(id(item)) or with_trace(item.trace.transform) for item in selected.traced),
        followed=tuple(copies[id(item)] for item in selected.followed if id(item) in copies),
    )
    copied = [copies[id(item)] for item in mapping]
    shapes, unknown = _shapes_of(checkpoint), _unknown(selected)
    reading = _reading(selected, shapes, copied, unknown, quantized=quantized, simulated=True)
    rest = _shapes_of(reading.rest)
    outcome = simulate(selected.model, copied, rest, unknown, sources=reading.shapes, going_on=True)
    outcome.routes += reading.routes()
    return alone, copied, reading, outcome


def _completed(selected: Selected, load_config: Any, checkpoint: Mapping[str, Any], patched: Outcome) -> Completion:
    stock, outcome = _stock_load(selected, checkpoint)
    copies = [
        with_trace(trace.transform) if (trace := trace_of(item)) else copy_transform(item)
        for item in load_config.weight_mapping or []
    ]
    return complete(
        selected.model,
        stock,
        outcome,
        checkpoint,
        copies,
        amiss=patched.missing | patched.mismatched.keys() | patched.conversion_errors.keys(),
        dtype=load_config.dtype,
        ignores_shapes=load_config.ignore_mismatched_sizes,
        is_read=selected.dry_run is None,
    )


def _fails_for_sure(mapping: list[Any], outcome: Outcome) -> bool:
    """Whether the conversions that raise on the meta device do so for the shapes: others may look at values."""
    failed = {name: trace for item in mapping if (trace := trace_of(item)) for name in trace.failed}
    return failed.keys() >= outcome.conversion_errors.keys() and all(
        is_stock_operation(operation) or type(operation).__module__.startswith("patcher.")
        for trace in failed.values()
        for operation in getattr(trace.transform, "operations", ())
    )


def _check_read(
    selected: Selected,
    mapping: list[Any],
    checkpoint: Mapping[str, Any],
    reading: FusedReading,
    info: Any,
    disk_index: Any = None,
) -> Loaded:
    """Put down what was done with the weights, and see whether it is what was asked for."""
    diagnostics = selected.diagnostics.adding(reading.problem, strict=True)
    traces: list[ConversionTrace] = [item.trace for item in selected.traced]
    mapped = set(map(id, mapping))
    for trace, item in zip(traces, selected.traced, strict=True):
        # A quantizer that has rewritten a conversion has made one that nobody can follow.
        trace.lost = id(item) not in mapped
    lost = [item for item in selected.traced if item.trace.lost]
    followed = set(map(id, selected.followed))
    ran = [*lost, *(_plain_if_even(item) if id(item) in followed else item for item in mapping)]
    done: dict[str, Any] = {
        "read": not reading.fused_already,
        "conversions": tuple(trace_of(item) or item for item in ran if trace_of(item) is not None or was_used(item)),
        "dropped": selected.conversions.dropped,
    }
    for trace in traces:
        if trace.failed:
            failure = _failure(trace, info, selected)
            if not diagnostics.goes_on:
                raise failure
            diagnostics = replace(diagnostics, errors=(*diagnostics.errors, failure))
            return _loaded(selected, diagnostics, done, info=info)
    matched = selected.matched | _matched_by_reading(selected, traces, checkpoint, info.unexpected_keys)
    if selected.dry_run is None:
        tell_blocks(matched)
    for entry in selected.own:
        classes = not entry.patcher.strict  # otherwise what the model doesn't have was said when it was built
        diagnostics = diagnostics.adding_matches([entry], matched, selected.model_class.__name__, classes=classes)
    expressions = [text for entry in selected.in_force for text in entry.patcher.new_weights]
    found = check_weights(
        selected.model,
        selected.record.replaced,
        selected.in_force,
        info,
        missing=selected.traits.without_aliases(set(info.missing_keys), expressions),
        parts_of=reading.missing,
        checkpoint=checkpoint,
        idle=[idle_source(trace.transform, text, checkpoint) for trace in traces for text in trace.idle_sources()],
        stock_outcome=lambda: _stock_load(selected, checkpoint)[1],
    )
    diagnostics = diagnostics.adding(found.error, strict=selected.strict)
    done |= {"new_weights": selected.traits.with_aliases(found.new), "dropped_weights": found.dropped}
    return _loaded(selected, diagnostics, done, info=info, disk_index=disk_index)


def _loaded(selected: Selected, diagnostics: Diagnostics, done: dict[str, Any], **read: Any) -> Loaded:
    values = vars(selected) | {"record": replace(selected.record, **done), "diagnostics": diagnostics}
    return Loaded(**values, **read)


def _shapes_of(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: on_meta(source) for key, source in checkpoint.items()}


def _unknown(selected: Selected) -> frozenset[str]:
    return selected.dry_run.unknown if selected.dry_run is not None else frozenset()


def _stock_load(selected: Selected, checkpoint: Mapping[str, Any]) -> tuple[PreTrainedModel, Outcome]:
    """The unpatched model on meta, and what it would make of a checkpoint, by names and shapes."""
    stock = skeleton(selected.record.model_class, selected.model.config)
    conversions = stock_conversions(stock, dict(selected.key_mapping) if selected.key_mapping else None)
    return stock, simulate(stock, conversions, _shapes_of(checkpoint), _unknown(selected), going_on=True)


def _plain_if_even(item: Any) -> Any:
    """A stock conversion that was followed, as transformers knows it if it has joined equal parts."""
    trace = trace_of(item)
    if trace is None or trace.is_uneven():
        return item
    take_over_use(item, trace.transform)
    return trace.transform


def _failure(trace: ConversionTrace, info: Any, selected: Selected) -> PatchedWeightsError:
    if trace.failed_quantizing:
        return PatchedWeightsError(failed_text(info.conversion_errors, selected.model))
    text = next((str(info.conversion_errors[key]) for key in trace.failed if key in info.conversion_errors), "")
    lines = text.strip().splitlines()
    return PatchedWeightsError(
        f"{describe(trace.transform)} failed for {', '.join(trace.failed[:3])}: "
        f"{lines[-2] if len(lines) > 1 else text}\n"
        "Check the patterns, the order of the sources and the operations of this conversion."
    )


def _matched_by_reading(
    selected: Selected, traces: list[ConversionTrace], checkpoint: Mapping[str, Any], unexpected: Iterable[str]
) -> Matched:
    """Which filters, conversions and dropped weights had an effect, and what there was for them."""
    entries = [
        entry
        for entry in selected.in_force
        if entry.patcher.filtered_weight_conversion_patterns
        or entry.patcher.extra_weight_conversions
        or entry.patcher.dropped_weights
    ]
    if not entries:
        return Matched(has_read=True)
    parameters = set(state_tensors(selected.model)) if traces else set()
    names = {*checkpoint, *unexpected}
    prefix = selected.model.base_model_prefix
    keys: set[tuple[InForce, str, Hashable]] = set()
    for entry in entries:
        keys |= {(entry, "filtered_weight_conversion_patterns", text) for _, text in selected.conversions.dropped}
        keys |= {
            (entry, "extra_weight_conversions", identity(trace.transform))
            for trace in traces
            if trace.had_effect(parameters, prefix)
        }
        dropped = Expressions(entry.patcher.dropped_weights)
        found = entry.patcher.dropped_weights if selected.runtime_layout else dropped.found_among(names)
        keys |= {(entry, "dropped_weights", text) for text in found}
    stock = [*selected.conversions.kept, *(transform for transform, _ in selected.conversions.dropped)]
    patterns = {text for each in stock for text in (*source_patterns(each), *target_patterns(each))}
    renamed = (
        (identity(trace.transform), name)
        for trace in traces
        if not trace.had_effect(parameters, prefix)
        for name in trace.renamed.values()
    )
    return Matched(
        frozenset(keys),
        parameters=frozenset(parameters),
        patterns=frozenset(patterns),
        checkpoint_keys=frozenset(checkpoint),
        renamed=frozenset(renamed),
        has_read=True,
    )
