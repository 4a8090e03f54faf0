"""What a load will come to, by names and shapes: before weights are read, or instead of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers.utils import logging

from patcher.compat.conversions import copy_transform
from patcher.compat.models import mark_initialized, named_parameters, settle_keys
from patcher.compat.quantizers import is_prequantized, keeps_quantized
from patcher.errors import PatchedWeightsError
from patcher.layouts.simulation import Outcome, simulate
from patcher.layouts.tracing import trace_of, with_trace
from patcher.layouts.transforms import has_known_operations
from patcher.loading.load import DryRun, Loaded, Selected
from patcher.loading.reading.completion import Completion, complete
from patcher.loading.reading.fused_sources import FusedReading, in_runtime_layout, with_fused_sources
from patcher.loading.reading.quantized_checkpoints import check_made_quantized, check_quantized
from patcher.loading.reading.read_weights import check_read, shapes_of, stock_load, unknown_keys
from patcher.patterns import compress

logger = logging.get_logger(__name__)


class ExpectedInfo:
    """What transformers would know of a load at its end."""

    def __init__(self, outcome: Outcome) -> None:
        self.missing_keys = set(outcome.missing)
        self.unexpected_keys = set(outcome.unexpected)
        self.mismatched_keys = {(name, *shapes) for name, shapes in outcome.mismatched.items()}
        self.conversion_errors = outcome.conversion_errors

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def dry_run_reading(selected: Selected, load_config: Any, checkpoint: Mapping[str, Any], asked: DryRun) -> Loaded:
    """What the load would come to, of one that doesn't read."""
    if not asked.has_checkpoint:
        return Loaded(**vars(selected), info=ExpectedInfo(Outcome()))
    _, _, expected = simulate_reading(selected, load_config, checkpoint)
    assert expected is not None
    # Take from the keys what transformers doesn't mind, as a load does at its end.
    parameters = dict(named_parameters(selected.model))
    for name in expected.outcome.loaded & set(parameters):
        mark_initialized(parameters[name])
    settle_keys(selected.model, expected.info)
    return expected


def simulate_reading(
    selected: Selected, load_config: Any, checkpoint: Mapping[str, Any]
) -> tuple[Selected, Mapping[str, Any], Loaded | None]:
    """What the load will come to, by names and shapes.

    On copies of the conversions, since they collect what passes through them.

    Returns:
        The load with what was said of it, the checkpoint as it is to be read, and the result, if it can be told.

    Raises:
        UnmatchedPatchError: as `read`.
        PatchedWeightsError: as `read`.
    """
    mapping, quantizer = load_config.weight_mapping or [], load_config.hf_quantizer
    alone, copied, reading, outcome = _simulated(selected, mapping, checkpoint, quantizer)
    for twice, others in outcome.twice.items():
        as_it_is = "as it is" if others[-1] == twice else f"as {others[-1]}"
        raise PatchedWeightsError(
            f"The checkpoint holds {twice} twice: {as_it_is}, and as {', '.join(others[:-1])}. Take one of them out."
        )
    if (
        not is_prequantized(quantizer)
        and not selected.runtime_layout
        and (reading.problem is not None or selected.traced)
    ):
        completion = _completed(selected, load_config, checkpoint, outcome)
        is_strict = selected.strict or bool(completion.misfits)  # transformers raises for shapes as well
        selected = replace(selected, diagnostics=selected.diagnostics.adding(completion.error, strict=is_strict))
        if completion.initialized:
            checkpoint = completion.checkpoint
            alone, copied, reading, outcome = _simulated(selected, mapping, checkpoint, quantizer)
            if selected.dry_run is None:
                keys = ", ".join(compress(completion.initialized))
                logger.warning(f"Not in the checkpoint, or of another shape there, so newly initialized: {keys}")
    if outcome.conversion_errors and selected.dry_run is None and not _fails_for_sure(copied, outcome):
        return selected, checkpoint, None
    result = replace(check_read(alone, copied, checkpoint, reading, ExpectedInfo(outcome)), outcome=outcome)
    return selected, checkpoint, result


def _copy(item: Any) -> Any:
    """An unused copy of a conversion, with a trace of its own if it has one."""
    return copy_transform(item) if trace_of(item) is None else with_trace(item)


def _simulated(
    selected: Selected, mapping: list[Any], checkpoint: Mapping[str, Any], quantizer: Any
) -> tuple[Selected, list[Any], FusedReading, Outcome]:
    """The load with copies of its conversions, these, how the checkpoint is read, and what comes of it."""
    copies = {id(item): _copy(item) for item in mapping}
    alone = replace(
        selected,
        traced=tuple(copies.get(id(item)) or with_trace(item) for item in selected.traced),
        followed=tuple(copies[id(item)] for item in selected.followed if id(item) in copies),
    )
    copied = [copies[id(item)] for item in mapping]
    shapes, unknown = shapes_of(checkpoint), unknown_keys(selected)
    reading = fused_reading(selected, shapes, copied, quantizer, unknown, simulated=True)
    rest = shapes_of(reading.rest)
    outcome = simulate(selected.model, copied, rest, unknown, sources=reading.shapes, going_on=True)
    outcome.routes += reading.routes()
    return alone, copied, reading, outcome


def _completed(selected: Selected, load_config: Any, checkpoint: Mapping[str, Any], patched: Outcome) -> Completion:
    stock, outcome = stock_load(selected, checkpoint)
    copies = [_copy(item) for item in load_config.weight_mapping or []]
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
        has_known_operations(trace.transform) for trace in failed.values()
    )


def fused_reading(
    selected: Selected,
    checkpoint: Mapping[str, Any],
    mapping: list[Any],
    quantizer: Any,
    unknown: frozenset[str] = frozenset(),
    *,
    simulated: bool = False,
) -> FusedReading:
    """How the checkpoint is read by a model with fused modules."""
    if selected.runtime_layout:
        return in_runtime_layout(selected.model, checkpoint, mapping)
    checks = keeps_quantized(quantizer)
    if checks and (problem := check_quantized(selected, checkpoint, mapping)):
        return FusedReading(checkpoint, problem=problem)
    quantized = is_prequantized(quantizer)
    reading = with_fused_sources(
        selected.model, checkpoint, mapping, unknown, quantized=quantized, simulated=simulated
    )
    if checks and reading.problem is None:
        reading = replace(reading, problem=check_made_quantized(selected, checkpoint, reading))
    return reading
