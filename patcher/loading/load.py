"""A load in five steps, each a function from the frozen state before it to the next.

    Request -> Constructed -> Selected -> Loaded -> Finalized -> the record on the model

Each state extends the one before it, so the class of a state says how far the load has come.

`request` runs when `from_pretrained` is called, `construct` ends when the modules are on the meta device, `select`
chooses the conversions, `read` checks names and shapes and has the weights read, transformers finalizes the rest of
the model, and `finish` stores the record. A dry run stops before weights are read. A model built without a checkpoint
goes from construction to its record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import distributed_checkpoint, is_deepspeed_zero3_enabled
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import follow_no_split_names, named_modules, original_class, sizes, stock_class
from patcher.compat.seams import not_called
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction, Placed
from patcher.construction.gates import building
from patcher.construction.in_force import InForce, Outcome, in_force_for, tell_blocks
from patcher.construction.meta_init import NoValues
from patcher.errors import InvalidPatcherError, PatchConstructionError, PatcherError
from patcher.functions.models import NO_FUNCTIONS, Functions
from patcher.layouts.transforms import SelectedConversions, converts, select_conversions
from patcher.loading.findings import Diagnostics, outcome_of_modules
from patcher.loading.initial_values import frozen_parameters
from patcher.loading.record import RECORD, PatchedModule, PatchRecord, record_of, store_record
from patcher.loading.routes import Routing
from patcher.loading.state_dicts import carry_routes
from patcher.resolution.resolution import NO_CHANGE, Resolution
from patcher.spec.fingerprints import check_pins


@dataclass(frozen=True)
class DryRun:
    """A load that stops before it reads weights."""

    #: without a checkpoint, conversions and weights aren't checked
    has_checkpoint: bool = True
    files: tuple[str, ...] = ()
    runtime_layout: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """The request of a call of `from_pretrained`, of which `options` are the keyword arguments."""

    model_class: type[PreTrainedModel]
    #: all patchers in force, the innermost first; empty if nothing is patched
    in_force: tuple[InForce, ...] = ()
    #: those that this load itself brings
    requested: tuple[InForce, ...] = ()
    path: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dry_run: DryRun | None = None
    #: the local files of the checkpoint, once they are resolved
    files: tuple[str, ...] = ()
    #: whether the checkpoint has the parameters of the patched model
    runtime_layout: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def strict(self) -> bool:
        return any(entry.patcher.strict for entry in self.in_force if not entry.is_registry)


def request(
    model_class: type[PreTrainedModel], patcher: Any, path: Any, options: Mapping[str, Any], dry_run: DryRun | None
) -> Request:
    """Start a load.

    Raises:
        InvalidPatcherError: `patcher` isn't a Patcher, or its conversions don't support an option of the load.
        PresetDriftError: the code that a patcher is pinned to has changed.
    """
    in_force, requested = in_force_for(patcher)
    for entry in requested:
        check_pins(entry.patcher, model_class)
    check_supported(in_force, path, options)
    files, runtime_layout = (dry_run.files, dry_run.runtime_layout) if dry_run is not None else ((), False)
    return Request(
        model_class=model_class,
        in_force=in_force,
        requested=requested,
        path=path,
        options=options,
        dry_run=dry_run,
        files=files,
        runtime_layout=runtime_layout,
    )


def check_supported(entries: tuple[InForce, ...], path: Any, options: Mapping[str, Any]) -> None:
    """Raise for options of a load that patchers, or their conversions, don't support."""
    if entries and is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        raise InvalidPatcherError(
            "A patcher was requested while DeepSpeed ZeRO-3 is enabled, which partitions each parameter when it is "
            "created and reads weights on its own: patchers don't support that. Load the model before the ZeRO-3 "
            "config is created (HfDeepSpeedConfig, or TrainingArguments with deepspeed=), or use ZeRO stage 2."
        )
    if not any(map(has_conversions, entries)):
        return
    unsupported = ["device_mesh"] if options.get("device_mesh") else []
    if sizes(options.get("distributed_config")).stages > 1:
        unsupported.append("a distributed_config with pp_size")
    if distributed_checkpoint(path, options):
        unsupported.append(f"the distributed checkpoint in {path}")
    if unsupported:
        raise InvalidPatcherError(
            f"A patcher with weight conversions was requested together with {', '.join(unsupported)}, which is not "
            "supported. Load the model without the patcher, save it with save_pretrained, and load that with it."
        )


def has_conversions(entry: InForce) -> bool:
    """Whether a patcher in force changes how weights are read."""
    return bool(entry.patcher.fusions) or converts(entry.patcher)


@dataclass(frozen=True, eq=False, kw_only=True)
class Constructed(Request):
    """The modules are constructed on the meta device, and no weight has been read."""

    rules: ClassRules
    model: PreTrainedModel
    models: list[tuple[str, PreTrainedModel]]
    outermost: Placed
    record: PatchRecord
    frozen: frozenset[str]
    outcome: Outcome
    diagnostics: Diagnostics
    seconds: float


@contextmanager
def construct(load: Request, on_constructed: Callable[[Constructed], object]) -> Iterator[None]:
    """Patch the model that is constructed in the block, and call `on_constructed` at its end.

    Raises:
        PatcherError: transformers didn't reach the place where modules are fused.
        UnmatchedPatchError: a class key or a fusion matches nothing.
    """
    started = time.perf_counter()
    rules = ClassRules(load.in_force)
    construction = Construction(rules)
    with building(construction, load.model_class), NoValues():
        yield
        if construction.at_end and getattr(construction.root, "quantization_method", None) is not None:
            raise PatchConstructionError(
                f"{load.model_class.__name__} isn't constructed by its own __init__, by which a load knows when to "
                "fuse: before a quantizer replaces layers, and it has replaced them by now. Load it without the "
                "quantizer, or without the patcher."
            )
    model = check_constructed(construction, load.model_class)
    outcome, record, outermost, models = summarize(construction, model)
    diagnostics = Diagnostics(collects_errors=load.dry_run is not None)
    diagnostics = diagnostics.with_unused(load.requested, outcome, load.model_class.__name__)
    on_constructed(
        Constructed(
            **vars(load),
            rules=rules,
            model=model,
            models=models,
            outermost=outermost,
            record=record,
            frozen=frozen_parameters(model, outermost),
            outcome=outcome,
            diagnostics=diagnostics,
            seconds=time.perf_counter() - started,
        )
    )


def check_constructed(construction: Construction, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Return the constructed model, or raise if it skipped a place where a model is patched."""
    model = construction.root
    if model is None:
        raise PatchConstructionError(
            f"{model_class.__name__}.__init__ doesn't call PreTrainedModel.__init__, so no patcher can "
            "follow it: derive it from PreTrainedModel, and call super().__init__(config)."
        )
    if not construction.is_constructed:
        raise PatchConstructionError(
            f"{type(model).__name__}.__init__ doesn't call self.post_init(), where a model is patched and its weights "
            "are tied: let it end with that call."
        )
    return model


def not_constructed_error(load: Request) -> PatcherError:
    """Return the error for a load that returned without constructing a model under `construct`."""
    owner = next(cls for cls in load.model_class.__mro__ if "get_init_context" in vars(cls))
    if owner is PreTrainedModel:
        return not_called("PreTrainedModel.get_init_context")
    return PatchConstructionError(
        f"{owner.__name__}.get_init_context leaves out the contexts in which a patched model is built, so nothing was "
        "patched: let it return those of super().get_init_context(...) as well."
    )


def summarize(
    construction: Construction, model: PreTrainedModel
) -> tuple[Outcome, PatchRecord, Placed, list[tuple[str, PreTrainedModel]]]:
    """Return the outcome, record, outermost replacements and models of a construction, and report it to blocks."""
    resolution: Resolution = construction.resolution or NO_CHANGE
    built, rules = construction.built, dict[str, dict[str, None]]()
    for replaced in built:
        match = replaced.match
        rules.setdefault(f"{match.field}[{match.key!r}]", {})[match.original.__name__] = None
    chosen = {id(replaced.module): not replaced.match.entry.is_registry for replaced in built}
    modules = list(named_modules(model))  # walked once: walks are a good part of the overhead of a patched load
    patched = [
        PatchedModule(
            path, original, unrebound(type(module)), chosen.get(id(module), True), resolution.fusions.get(path)
        )
        for path, module in modules
        if (original := original_class(module)) is not None
    ]
    functions: Functions = construction.functions or NO_FUNCTIONS
    outcome = outcome_of_modules(construction, model, modules)
    tell_blocks(outcome)
    # In reverse, so that of a module with several paths the first one comes last.
    models = [(path, module) for path, module in reversed(modules) if isinstance(module, PreTrainedModel)]
    follow_no_split_names((part for _, part in models), ((item.original, item.replacement) for item in patched))
    record = PatchRecord(
        model_class=stock_class(model),  # type: ignore[arg-type]
        in_force=construction.rules.entries,
        modules=tuple(patched),
        refused=dict(resolution.refused),
        fusion_transforms=resolution.transforms,
        rules=(
            *((rule, tuple(names)) for rule, names in rules.items()),
            *((f"function_mapping[{item.keys[0][1]!r}]", (item.name,)) for item in functions.replaced),
        ),
    )
    paths = {id(module): path for path, module in reversed(modules)}  # the first of several
    outermost = [(paths[id(item.module)], item) for item in built if item.outermost and id(item.module) in paths]
    return outcome, record, tuple(outermost), models


@dataclass(frozen=True, eq=False, kw_only=True)
class Selected(Constructed):
    """The conversions of the load are selected."""

    #: the conversions of transformers, without those of `key_mapping`, which run first
    stock: tuple[WeightTransform, ...]
    conversions: SelectedConversions
    key_mapping: Mapping[str, str] | None = None


def select(
    constructed: Constructed, stock: list[WeightTransform], key_mapping: Mapping[str, str] | None
) -> tuple[Selected, list[WeightTransform]]:
    """Return the next state, and the conversions that transformers runs, before the quantizer adapts them."""
    first = len(key_mapping or ())  # what the user's key_mapping says runs first and is never filtered
    record = constructed.record
    conversions = select_conversions(stock[first:], record.patchers, record.fusion_transforms, record.replacements())
    if constructed.runtime_layout:  # conversions have run already; a part may be read out of a whole
        renamings = tuple(item for item in conversions.kept if not isinstance(item, WeightConverter))
        conversions = replace(conversions, kept=renamings)
    values = vars(constructed) | {"stock": tuple(stock[first:]), "conversions": conversions}
    return Selected(**values, key_mapping=key_mapping), [*stock[:first], *conversions.kept]


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded(Selected):
    """The weights have been read, or would have been; `disk_index` is the offload index of transformers."""

    #: the loading info of transformers: missing, unexpected and mismatched keys, errors of conversions
    info: Any
    routing: Routing = field(default_factory=Routing)
    disk_index: dict[str, Any] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Finalized(Loaded):
    """The rest of the model has its values as well."""


#: State of a load -> the seam that leads to the next one.
_NEXT_SEAM: dict[type[Request], str] = {
    Constructed: "get_model_conversion_mapping",
    Selected: "convert_and_load_state_dict_in_model",
    Loaded: "PreTrainedModel._finalize_model_loading",
}


def record_load(load: Constructed) -> None:
    """Store on the model what was patched: saves and later loads into it go by that."""
    store_record(load.models, load.record)
    if isinstance(load, Loaded):
        carry_routes(load.model, load.record.routes, load.record.paths_of_replacements)


def finish(load: Constructed) -> None:
    """Complete the record, and warn about whatever isn't as requested.

    Raises:
        PatcherError: transformers skipped one of the steps, so the weights aren't what was requested.
    """
    if type(load) is not Finalized:
        if not distributed_checkpoint(load.path, load.options):
            raise not_called(_NEXT_SEAM[type(load)])
        record_load(load)  # torch.distributed has read it
    total = time.perf_counter() - load.started
    seconds = {"construction": load.seconds, "reading": total - load.seconds, "total": total}
    record = record_of(load.model) or load.record  # an adapter that was loaded as well may have changed it
    load.model.__dict__[RECORD] = replace(record, seconds=seconds, warnings=load.diagnostics.warnings)
    load.diagnostics.warn()
