"""Whether the weights that were read, or would be, are what was asked for; and what is put down about them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from patcher.compat.conversions import (
    copy_transform,
    source_patterns,
    stock_conversions,
    take_over_use,
    target_patterns,
    was_used,
)
from patcher.compat.models import state_tensors
from patcher.construction.in_force import InForce, Matched, tell_blocks
from patcher.errors import PatchedWeightsError
from patcher.expressions import Expressions
from patcher.layouts.selection import converts
from patcher.layouts.simulation import Outcome, simulate
from patcher.layouts.sources import on_meta
from patcher.layouts.tracing import ConversionTrace, trace_of
from patcher.layouts.transforms import describe, identity
from patcher.loading.checks import Diagnostics, check_weights, failed_text
from patcher.loading.load import Loaded, Selected
from patcher.loading.matches import idle_source
from patcher.loading.reading.fused_sources import FusedReading
from patcher.resolution.resolution import skeleton


def check_read(
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
        stock_outcome=lambda: stock_load(selected, checkpoint)[1],
    )
    diagnostics = diagnostics.adding(found.error, strict=selected.strict)
    done |= {"new_weights": selected.traits.with_aliases(found.new), "dropped_weights": found.dropped}
    return _loaded(selected, diagnostics, done, info=info, disk_index=disk_index)


def _loaded(selected: Selected, diagnostics: Diagnostics, done: dict[str, Any], **read: Any) -> Loaded:
    values = vars(selected) | {"record": replace(selected.record, **done), "diagnostics": diagnostics}
    return Loaded(**values, **read)


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
    entries = [entry for entry in selected.in_force if converts(entry.patcher) or entry.patcher.dropped_weights]
    if not entries:
        return Matched(has_read=True)
    parameters = set(state_tensors(selected.model)) if traces else set()
    names = {*checkpoint, *unexpected}
    prefix = selected.model.base_model_prefix
    idle = [trace for trace in traces if not trace.had_effect(parameters, prefix)]
    effective = {identity(trace.transform) for trace in traces} - {identity(trace.transform) for trace in idle}
    keys: set[tuple[InForce, str, Hashable]] = set()
    for entry in entries:
        keys |= {(entry, "filtered_weight_conversion_patterns", text) for _, text in selected.conversions.dropped}
        keys |= {(entry, "conversions", each) for each in effective}
        dropped = Expressions(entry.patcher.dropped_weights)
        found = entry.patcher.dropped_weights if selected.runtime_layout else dropped.found_among(names)
        keys |= {(entry, "dropped_weights", text) for text in found}
    stock = [*selected.conversions.kept, *(transform for transform, _ in selected.conversions.dropped)]
    patterns = {text for each in stock for text in (*source_patterns(each), *target_patterns(each))}
    renamed = set()
    for trace in idle:  # what it would make, which the model doesn't have
        renaming = copy_transform(trace.transform)
        made = {renaming.rename_source_key(key) for key in checkpoint}
        renamed |= {(identity(trace.transform), name) for name, pattern in made if pattern is not None}
    return Matched(
        frozenset(keys),
        parameters=frozenset(parameters),
        patterns=frozenset(patterns),
        checkpoint_keys=frozenset(checkpoint),
        renamed=frozenset(renamed),
        has_read=True,
    )


def stock_load(selected: Selected, checkpoint: Mapping[str, Any]) -> tuple[PreTrainedModel, Outcome]:
    """The unpatched model on meta, and what it would make of a checkpoint, by names and shapes."""
    stock = skeleton(selected.record.model_class, selected.model.config)
    conversions = stock_conversions(stock, dict(selected.key_mapping) if selected.key_mapping else None)
    return stock, simulate(stock, conversions, shapes_of(checkpoint), unknown_keys(selected), going_on=True)


def shapes_of(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: on_meta(source) for key, source in checkpoint.items()}


def unknown_keys(selected: Selected) -> frozenset[str]:
    return selected.dry_run.unknown if selected.dry_run is not None else frozenset()
