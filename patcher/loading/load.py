"""One load as five steps, each a function from the frozen result before it to its own.

    Request -> constructed -> selected -> loaded -> the record on the model

`request` is made when `from_pretrained` is called, `construct` ends when the modules stand on the meta device,
`select` has the conversions, `read` judges names and shapes and then has the weights read, `finish` puts down what was
done. A dry run stops before the weights are read; a model built by hand goes from its construction to its record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import (
    copy_transform,
    distributed_checkpoint,
    is_stock_operation,
    leave_alone,
    set_used_conversions,
    source_patterns,
    take_over_use,
    target_patterns,
    was_used,
)
from patcher.compat.models import mark_initialized, original_class, settle_keys
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Built, Construction, constructing
from patcher.construction.in_force import InForce, Matched, entering, in_force_for, tell_blocks
from patcher.construction.init_hooks import covering
from patcher.conversions.selection import SelectedConversions, select_conversions
from patcher.conversions.simulation import Outcome, simulate
from patcher.conversions.tracing import ConversionTrace, trace_of, with_trace
from patcher.conversions.transforms import describe, identity, joins
from patcher.errors import InvalidPatcherError, PatchConstructionError, PatchedWeightsError
from patcher.loading.checks import (
    Diagnostics,
    check_matches,
    check_weights,
    class_names,
    shape_of,
    shapes_of,
    stock_outcome,
)
from patcher.loading.initial_values import (
    InitialValues,
    ParameterTraits,
    forget_indices,
    keep_new_weights,
)
from patcher.loading.record import PatchRecord, Replaced, keep_record
from patcher.resolution.resolution import Resolution, skeleton
from patcher.spec.fingerprints import check_pins

__all__ = [
    "Constructed",
    "DryRun",
    "Load",
    "Loaded",
    "Request",
    "Selected",
    "check_supported",
    "construct",
    "finish",
    "finish_by_hand",
    "initial_values",
    "read",
    "request",
    "select",
]


# --- request -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DryRun:
    """A load that stops before it reads.

    Attributes:
        unknown: the keys of the checkpoint whose shapes nobody knows.
        has_checkpoint: whether there is one; without it conversions and weights are not judged.
    """

    unknown: frozenset[str] = frozenset()
    has_checkpoint: bool = True


@dataclass(frozen=True, eq=False)
class Request:
    """What a call of `from_pretrained` asks for.

    Attributes:
        in_force: all patchers that the load meets, the innermost first.
        own: those of them that this very load brings.
        path: what is loaded.
        options: the keyword arguments of `from_pretrained`.
    """

    model_class: type[PreTrainedModel]
    in_force: tuple[InForce, ...]
    own: tuple[InForce, ...]
    path: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dry_run: DryRun | None = None
    started: float = 0.0

    @property
    def strict(self) -> bool:
        return any(entry.patcher.strict for entry in self.in_force if not entry.is_registry)


def request(
    model_class: type[PreTrainedModel], patcher: Any, path: Any, options: Mapping[str, Any], dry_run: DryRun | None
) -> Request | None:
    """What a load is asked for, None where nothing is in force.

    Raises:
        InvalidPatcherError: `patcher` is no Patcher, or comes with what its conversions are not known to survive.
        PresetDriftError: the code that a patcher is pinned to has changed.
    """
    in_force, own = in_force_for(patcher)
    if not in_force:
        return None
    for entry in own:
        check_pins(entry.patcher, model_class)
    check_supported(in_force, path, options)
    return Request(model_class, in_force, own, path, options, dry_run, time.perf_counter())


def check_supported(entries: tuple[InForce, ...], path: Any, options: Mapping[str, Any]) -> None:
    """Raise for what conversions are not yet known to survive.

    Raises:
        InvalidPatcherError: with what can be done instead.
    """
    if not any(
        entry.patcher.filtered_weight_conversion_patterns
        or entry.patcher.extra_weight_conversions
        or entry.patcher.fusions
        for entry in entries
    ):
        return
    asked = [
        name for name in ("gguf_file", "tp_plan", "tp_size", "distributed_config", "device_mesh") if options.get(name)
    ]
    if distributed_checkpoint(path, options):
        asked.append(f"the distributed checkpoint in {path}")
    if asked:
        raise InvalidPatcherError(
            f"A patcher with weight conversions was asked for together with {', '.join(asked)}, which is not "
            "supported. Load the model without the patcher, save it with save_pretrained, and load that with it."
        )


# --- construct -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Constructed:
    """The modules stand, on meta; no weight has been read."""

    request: Request
    rules: ClassRules
    model: PreTrainedModel
    outermost_built: tuple[Built, ...]
    record: PatchRecord
    traits: ParameterTraits
    matched: Matched
    diagnostics: Diagnostics
    seconds: float


@contextmanager
def construct(asked: Request, done: Callable[[Constructed], object]) -> Iterator[None]:
    """Build the model inside the block.

    Args:
        done: is given the result at the end of the block.

    Raises:
        UnmatchedPatchError: a class key or a fusion has matched nothing.
    """
    started = time.perf_counter()
    rules = ClassRules(asked.in_force)
    construction = Construction(rules, on_meta=asked.dry_run is not None)
    with entering(rules.entries), covering(rules), constructing(construction):
        yield
    model = construction.root
    if model is None:
        raise PatchConstructionError(
            f"What is built as {asked.model_class.__name__} doesn't call PreTrainedModel.__init__, so no load can "
            "follow it: derive it from PreTrainedModel, and call super().__init__(config)."
        )
    matched = _told(construction, model)
    diagnostics = Diagnostics(goes_on=asked.dry_run is not None)
    for entry in asked.own:
        if entry.patcher.strict:  # of the others all is said at the end, in one warning
            error = check_matches(entry, matched, conversions=False, model_name=asked.model_class.__name__)
            diagnostics = diagnostics.adding(error, strict=True)
    outermost = tuple(construction.outermost_built)
    done(
        Constructed(
            asked,
            rules,
            model,
            outermost,
            _record(model, construction),
            ParameterTraits.of(model, outermost),
            matched,
            diagnostics,
            time.perf_counter() - started,
        )
    )


def _told(construction: Construction, model: PreTrainedModel) -> Matched:
    """What the construction has matched, and what there was to match; the blocks around it are told as well."""
    resolution: Resolution | None = construction.resolution
    refused = resolution.refused if resolution is not None else {}
    matched = construction.matched | Matched(
        classes=frozenset(class_names(model)),
        refused=frozenset(f"{path} ({reason})" for path, reason in refused.items()),
    )
    tell_blocks(matched)
    return matched


def _record(model: PreTrainedModel, construction: Construction) -> PatchRecord:
    chosen = {id(built.module): not built.entry.is_registry for built in construction.built}
    resolution: Resolution | None = construction.resolution
    fused = resolution.fused if resolution is not None else {}
    replaced, fused_as = [], {}
    for path, module in model.named_modules(remove_duplicate=False):
        original = original_class(module)
        if original is not None:
            if path in fused:
                fused_as[path] = (original, type(module))
            replaced.append(Replaced(path, original, type(module), chosen.get(id(module), True)))
    record = PatchRecord(
        model_class=original_class(model) or type(model),  # type: ignore[arg-type]
        in_force=construction.rules.entries,
        replaced=tuple(replaced),
        fused=fused_as,
    )
    if resolution is None:
        return record
    return replace(
        record,
        refused=dict(resolution.refused),
        fusion_transforms=resolution.fusion_plan.transforms,
        fused_parameters=_fused_parameters(model, resolution),
        fusions={fusion: paths for fusion, paths in resolution.fusion_plan.by_fusion.items() if paths},
    )


def _fused_parameters(model: PreTrainedModel, resolution: Resolution) -> frozenset[str]:
    names = set()
    for path in resolution.fused:
        for name, tensor in model.get_submodule(path).state_dict(prefix=f"{path}." if path else "").items():
            if resolution.fusion_plan.shapes.get(name) != tensor.shape:
                names.add(name)
    return frozenset(names)


# --- select --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Selected:
    """The conversions of the load are known.

    Attributes:
        traced: the added ones, as copies of this load that keep a trace.
        followed: the kept ones that keep a trace because they join: transformers would cut into equal pieces.
    """

    constructed: Constructed
    conversions: SelectedConversions
    traced: tuple[Any, ...] = ()
    followed: tuple[Any, ...] = ()
    key_mapping: Mapping[str, str] | None = None


def select(
    constructed: Constructed, stock: list[WeightTransform], key_mapping: Mapping[str, str] | None
) -> tuple[Selected, list[WeightTransform]]:
    """The conversions of the load, from those of transformers: before the quantizer adapts them."""
    asked = len(key_mapping or ())  # what the user's key_mapping asks for runs first and is never filtered
    conversions = select_conversions(stock[asked:], constructed.record.patchers, constructed.record.fusion_transforms)
    traced = tuple(with_trace(transform) for transform in conversions.added)
    kept = [with_trace(item) if joins(item) else item for item in conversions.kept]
    followed = tuple(item for item in kept if trace_of(item) is not None)
    selected = Selected(constructed, conversions, traced, followed, key_mapping)
    return selected, [*stock[:asked], *traced, *kept]


# --- read ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Loaded:
    """The weights have been read, or would have been.

    Attributes:
        routes: where each tensor of the checkpoint goes, in a dry run.
        info: what transformers knows of the load: missing, unexpected and mismatched keys, errors of conversions.
        disk_index: where transformers finds what the device map puts on the disk.
    """

    selected: Selected
    record: PatchRecord
    info: Any
    diagnostics: Diagnostics
    outcome: Outcome = field(default_factory=Outcome)
    disk_index: dict[str, Any] | None = None


#: Where a load is.
Load = Request | Constructed | Selected | Loaded


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
    selected: Selected, checkpoint: Mapping[str, Any], load_config: Any, read_weights: Callable[[], tuple[Any, Any]]
) -> tuple[Loaded, Any, Any]:
    """Judge the names and shapes of a checkpoint, then have its weights read.

    Args:
        read_weights: reads them; gives what transformers knows of the load then, and its index of the disk.

    Returns:
        The result, and what `read_weights` gave.

    Raises:
        UnmatchedPatchError: a filter or a conversion had no effect.
        PatchedWeightsError: parameters of replaced modules are missing, tensors are left over, a conversion failed.
    """
    constructed = selected.constructed
    dry_run = constructed.request.dry_run
    mapping = load_config.weight_mapping or []
    foretold: Loaded | None = None
    if dry_run is None:
        if _can_be_foretold(load_config) and not _fits_as_it_is(selected, mapping, checkpoint):
            foretold = _foretell(selected, mapping, checkpoint)
    elif not dry_run.has_checkpoint:
        foretold = Loaded(selected, constructed.record, _Info(Outcome()), constructed.diagnostics)
    else:
        foretold = _foretell(selected, mapping, checkpoint, dry_run.unknown, is_dry_run=True)
        assert foretold is not None
        _settle(constructed.model, foretold)
    if dry_run is not None:
        assert foretold is not None
        return foretold, foretold.info, None
    info, disk_index = read_weights()
    loaded = replace(_judge(selected, mapping, checkpoint, info), disk_index=disk_index)
    # What it reverses by itself; the traces of ours are reversed by what they did.
    own = [item for item in loaded.record.conversions if not isinstance(item, ConversionTrace)]
    set_used_conversions(constructed.model, own)
    return loaded, info, disk_index


def _can_be_foretold(load_config: Any) -> bool:
    """Whether names and shapes say what a load will come to: not so of the parts of weights that are quantized."""
    quantizer = load_config.hf_quantizer
    return quantizer is None or not quantizer.pre_quantized


def _fits_as_it_is(selected: Selected, mapping: list[Any], checkpoint: Mapping[str, Any]) -> bool:
    """Whether every tensor of the replaced modules plainly goes where its name says: nothing to judge, as usual."""
    constructed = selected.constructed
    patchers = [entry.patcher for entry in constructed.request.in_force]
    if selected.traced or any(patcher.filtered_weight_conversion_patterns for patcher in patchers):
        return False
    paths = [item.path for item in constructed.record.replaced]
    if "" in paths or not leave_alone(mapping, checkpoint):
        return False
    under = tuple(f"{path}." for path in paths)
    expected = {
        f"{path}.{name}": parameter.shape
        for path in paths
        for name, parameter in constructed.model.get_submodule(path).named_parameters(remove_duplicate=False)
    }
    found = {key: value for key, value in checkpoint.items() if key.startswith(under)}
    return found.keys() == expected.keys() and all(expected[key] == shape_of(value) for key, value in found.items())


def _foretell(
    selected: Selected,
    mapping: list[Any],
    checkpoint: Mapping[str, Any],
    unknown: frozenset[str] = frozenset(),
    *,
    is_dry_run: bool = False,
) -> Loaded | None:
    """What the load will come to, by names and shapes; None if it can't be told.

    On copies of the conversions, since they collect what passes through them.

    Raises:
        UnmatchedPatchError: as `read`.
        PatchedWeightsError: as `read`.
    """
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
    outcome = simulate(selected.constructed.model, copied, shapes_of(checkpoint), unknown, going_on=True)
    if outcome.conversion_errors and not is_dry_run and not _fails_for_sure(copied, outcome):
        return None
    return replace(_judge(alone, copied, checkpoint, _Info(outcome)), outcome=outcome)


def _fails_for_sure(mapping: list[Any], outcome: Outcome) -> bool:
    """Whether the conversions that raise on the meta device do so for the shapes: others may look at values."""
    failed = {name: trace for item in mapping if (trace := trace_of(item)) for name in trace.failed}
    return failed.keys() >= outcome.conversion_errors.keys() and all(
        is_stock_operation(operation) or type(operation).__module__.startswith("patcher.")
        for trace in failed.values()
        for operation in getattr(trace.transform, "operations", ())
    )


def _settle(model: PreTrainedModel, foretold: Loaded) -> None:
    """Take from the keys what transformers doesn't mind, as a load does at its end."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in foretold.outcome.loaded & set(parameters):
        mark_initialized(parameters[name])
    settle_keys(model, foretold.info)


def _judge(selected: Selected, mapping: list[Any], checkpoint: Mapping[str, Any], info: Any) -> Loaded:
    """Put down what was done with the weights, and see whether it is what was asked for."""
    constructed = selected.constructed
    model, diagnostics = constructed.model, constructed.diagnostics
    traces: list[ConversionTrace] = [item.trace for item in selected.traced]
    for trace, item in zip(traces, selected.traced, strict=True):
        # A quantizer that has rewritten a conversion has made one that nobody can follow.
        trace.lost = not any(item is other for other in mapping)
    lost = [item for item, trace in zip(selected.traced, traces, strict=True) if trace.lost]
    ran = [*lost, *(_plain_if_even(item, selected.followed) for item in mapping)]
    record = replace(
        constructed.record,
        read=True,
        conversions=tuple(trace_of(item) or item for item in ran if trace_of(item) is not None or was_used(item)),
        dropped=selected.conversions.dropped,
    )
    for trace in traces:
        if trace.failed:
            failure = _failure(trace, info)
            if diagnostics.goes_on:
                return Loaded(selected, record, info, replace(diagnostics, errors=(*diagnostics.errors, failure)))
            raise failure
    matched = constructed.matched | _matched_by_reading(selected, traces, checkpoint)
    if constructed.request.dry_run is None:
        tell_blocks(matched)
    for entry in constructed.request.own:
        strict = entry.patcher.strict  # then what the model doesn't have was said when it was built
        error = check_matches(entry, matched, classes=not strict, model_name=constructed.request.model_class.__name__)
        diagnostics = diagnostics.adding(error, strict=strict)
    expressions = [text for entry in constructed.request.in_force for text in entry.patcher.new_weights]
    found = check_weights(
        model,
        record.replaced,
        constructed.request.in_force,
        missing=constructed.traits.without_aliases(set(info.missing_keys), expressions),
        mismatched={
            name: f"found {tuple(found)}, expected {tuple(shape)}" for name, found, shape in info.mismatched_keys
        },
        unexpected=set(info.unexpected_keys),
        stock_outcome=lambda: stock_outcome(
            skeleton(record.model_class, model.config), selected.key_mapping, shapes_of(checkpoint), _unknown(selected)
        ),
    )
    record = replace(record, new_weights=constructed.traits.with_aliases(found.new), dropped_weights=found.dropped)
    return Loaded(selected, record, info, diagnostics.adding(found.error, strict=constructed.request.strict))


def _unknown(selected: Selected) -> frozenset[str]:
    dry_run = selected.constructed.request.dry_run
    return dry_run.unknown if dry_run is not None else frozenset()


def _plain_if_even(item: Any, followed: tuple[Any, ...]) -> Any:
    """A stock conversion that was followed and has joined equal parts, as transformers knows it."""
    trace = trace_of(item)
    if trace is None or not any(item is other for other in followed) or trace.is_uneven():
        return item
    take_over_use(item, trace.transform)
    return trace.transform


def _failure(trace: ConversionTrace, info: Any) -> PatchedWeightsError:
    text = next((str(info.conversion_errors[key]) for key in trace.failed if key in info.conversion_errors), "")
    lines = text.strip().splitlines()
    return PatchedWeightsError(
        f"{describe(trace.transform)} failed for {', '.join(trace.failed[:3])}: "
        f"{lines[-2] if len(lines) > 1 else text}\n"
        "Check the patterns, the order of the sources and the operations of this conversion."
    )


def _matched_by_reading(selected: Selected, traces: list[ConversionTrace], checkpoint: Mapping[str, Any]) -> Matched:
    """Which filters and conversions had an effect, and what there was for them."""
    constructed = selected.constructed
    entries = [
        entry
        for entry in constructed.request.in_force
        if entry.patcher.filtered_weight_conversion_patterns or entry.patcher.extra_weight_conversions
    ]
    if not entries:
        return Matched(has_read=True)
    parameters = set(constructed.model.state_dict()) if traces else set()
    prefix = constructed.model.base_model_prefix
    filters = {text for _, text in selected.conversions.dropped}
    fired = {identity(trace.transform) for trace in traces if trace.had_effect(parameters, prefix)}
    keys: set[Any] = set()
    for entry in entries:
        for field_name, effective in (
            ("filtered_weight_conversion_patterns", filters),
            ("extra_weight_conversions", fired),
        ):
            keys.update((entry, field_name, each) for each in effective)
    stock = [*selected.conversions.kept, *(transform for transform, _ in selected.conversions.dropped)]
    patterns = {text for each in stock for text in (*source_patterns(each), *target_patterns(each))}
    return Matched(frozenset(keys), patterns=frozenset(patterns), checkpoint_keys=frozenset(checkpoint), has_read=True)


# --- finish --------------------------------------------------------------------------------------------------------


def initial_values(loaded: Loaded) -> InitialValues:
    """The values that no checkpoint holds, taken before transformers fills in what it takes for missing."""
    constructed = loaded.selected.constructed
    return InitialValues(
        constructed.model,
        constructed.rules,
        constructed.outermost_built,
        constructed.traits,
        loaded.info,
        loaded.disk_index,
    )


def finish(load: Load, model: PreTrainedModel) -> None:
    """Put down on the model what was done, and warn of what is not as it was asked for."""
    selected = load.selected if isinstance(load, Loaded) else load
    constructed = selected.constructed if isinstance(selected, Selected) else selected
    if not isinstance(constructed, Constructed):
        return
    asked, diagnostics = constructed.request, constructed.diagnostics
    record = constructed.record
    if isinstance(load, Loaded):
        record, diagnostics = load.record, load.diagnostics
    else:  # transformers has read it in a way of its own
        for entry in (entry for entry in asked.own if not entry.patcher.strict):
            error = check_matches(entry, constructed.matched, model_name=asked.model_class.__name__)
            diagnostics = diagnostics.adding(error, strict=False)
    total = time.perf_counter() - asked.started
    seconds = {"construction": constructed.seconds, "reading": total - constructed.seconds, "total": total}
    keep_record(model, replace(record, seconds=seconds, warnings=diagnostics.warnings))
    forget_indices(model)
    diagnostics.warn()


def finish_by_hand(construction: Construction, model: PreTrainedModel) -> None:
    """Put down on a model what was done that was made without a checkpoint: `Model(config)`, or `from_config`."""
    outermost = construction.outermost_built
    entries = construction.rules.entries
    construction.matched = _told(construction, model)
    keep_new_weights(
        model, construction.rules, outermost, [text for entry in entries for text in entry.patcher.new_weights]
    )
    ParameterTraits.of(model, outermost)
    forget_indices(model)
    keep_record(model, _record(model, construction))
    construction.forget()
