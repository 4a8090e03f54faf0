"""One load as five steps, each a function from the frozen result before it to its own.

    Request -> Constructed -> Selected -> Loaded -> Finalized -> the record on the model

Each result has all that those before it have. Where a load is, its exact class says.

`request` is made when `from_pretrained` is called, `construct` ends when the modules are on the meta device,
`select` has the conversions, `read` checks names and shapes and then has the weights read, transformers finalizes the
rest of the model, `finish` puts down what was done. A dry run stops before the weights are read; a model built by hand
goes from its construction to its record.
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
from patcher.functions.models import NO_FUNCTIONS, Functions, full_name
from patcher.layouts.transforms import SelectedConversions, converts, select_conversions
from patcher.loading.findings import Diagnostics, found_in_modules
from patcher.loading.initial_values import frozen_parameters
from patcher.loading.record import RECORD, PatchedModule, PatchRecord, keep_record, record_of
from patcher.loading.routes import Routing
from patcher.loading.stock_view import carry_routes
from patcher.resolution.resolution import NO_CHANGE, Resolution, fuse_standing_modules
from patcher.spec.fingerprints import check_pins


@dataclass(frozen=True)
class DryRun:
    """A load that stops before it reads.

    Attributes:
        unknown: the keys of the checkpoint whose shapes aren't known.
        has_checkpoint: whether there is one; without it conversions and weights are not judged.
        files: of the checkpoint, as far as they are here.
        runtime_layout: whether it has the parameters of the model as they are.
        reached: the results of the load, the last of which says where it has come to.
    """

    unknown: frozenset[str] = frozenset()
    has_checkpoint: bool = True
    files: tuple[str, ...] = ()
    runtime_layout: bool = False
    reached: list[Request] = field(default_factory=list, compare=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What a call of `from_pretrained` asks for.

    Attributes:
        in_force: all patchers that the load meets, the innermost first; none where nothing is patched.
        own: those of them that this very load brings.
        path: what is loaded.
        options: the keyword arguments of `from_pretrained`.
        files: of the checkpoint, once they are found.
        runtime_layout: whether the checkpoint has the parameters of the model as they are.
    """

    model_class: type[PreTrainedModel]
    in_force: tuple[InForce, ...] = ()
    own: tuple[InForce, ...] = ()
    path: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dry_run: DryRun | None = None
    files: tuple[str, ...] = ()
    runtime_layout: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def strict(self) -> bool:
        return any(entry.patcher.strict for entry in self.in_force if not entry.is_registry)


def request(
    model_class: type[PreTrainedModel], patcher: Any, path: Any, options: Mapping[str, Any], dry_run: DryRun | None
) -> Request:
    """What a load is to do.

    Raises:
        InvalidPatcherError: `patcher` isn't a Patcher, or comes with what its conversions are not known to survive.
        PresetDriftError: the code that a patcher is pinned to has changed.
    """
    in_force, own = in_force_for(patcher)
    for entry in own:
        check_pins(entry.patcher, model_class)
    check_supported(in_force, path, options)
    return Request(
        model_class=model_class,
        in_force=in_force,
        own=own,
        path=path,
        options=options,
        dry_run=dry_run,
        files=dry_run.files if dry_run is not None else (),
        runtime_layout=dry_run is not None and dry_run.runtime_layout,
    )


def check_supported(entries: tuple[InForce, ...], path: Any, options: Mapping[str, Any]) -> None:
    """Raise for what patchers, or their conversions, are not yet known to survive."""
    if entries and is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        raise InvalidPatcherError(
            "A patcher was requested while DeepSpeed ZeRO-3 is on, which partitions each parameter as soon as it is "
            "made and reads weights in a way of its own: no patcher follows that. Load the model before the ZeRO-3 "
            "config is made (HfDeepSpeedConfig, or TrainingArguments with deepspeed=), or use ZeRO stage 2."
        )
    if not any(map(brings_conversions, entries)):
        return
    beside = [name for name in ("device_mesh",) if options.get(name)]
    if sizes(options.get("distributed_config")).stages > 1:
        beside.append("a distributed_config with pp_size")
    if distributed_checkpoint(path, options):
        beside.append(f"the distributed checkpoint in {path}")
    if beside:
        raise InvalidPatcherError(
            f"A patcher with weight conversions was requested together with {', '.join(beside)}, which is not "
            "supported. Load the model without the patcher, save it with save_pretrained, and load that with it."
        )


def brings_conversions(entry: InForce) -> bool:
    """Whether a patcher in force changes how weights are read."""
    return bool(entry.patcher.fusions) or converts(entry.patcher)


@dataclass(frozen=True, eq=False, kw_only=True)
class Constructed(Request):
    """The modules are constructed, on meta; no weight has been read."""

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
def construct(load: Request, done: Callable[[Constructed], object]) -> Iterator[None]:
    """Build the model inside the block.

    Args:
        done: is given the result at the end of the block.

    Raises:
        PatcherError: transformers has not come by the place where the modules are fused.
        UnmatchedPatchError: a class key or a fusion has matched nothing.
    """
    started = time.perf_counter()
    rules = ClassRules(load.in_force)
    construction = Construction(rules)
    with building(construction), NoValues():
        yield
    model = check_stands(construction, load.model_class)
    if construction.resolution is None and any(entry.patcher.fusions for entry in load.in_force):
        raise not_called("patch_output_recorders")
    outcome, record, outermost, models = seen(construction, model)
    strict = [entry for entry in load.own if entry.patcher.strict]  # the others give one warning at the end
    diagnostics = Diagnostics(goes_on=load.dry_run is not None)
    diagnostics = diagnostics.adding_unused(strict, outcome, load.model_class.__name__)
    done(
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


def check_stands(construction: Construction, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """The model that was built, if it has gone through all that a model is patched at."""
    model = construction.root
    if model is None:
        raise PatchConstructionError(
            f"What is built as {model_class.__name__} doesn't call PreTrainedModel.__init__, so no load can "
            "follow it: derive it from PreTrainedModel, and call super().__init__(config)."
        )
    if not construction.is_constructed:
        raise PatchConstructionError(
            f"{type(model).__name__}.__init__ doesn't call self.post_init(), where a model is patched and its weights "
            "are tied: let it end with that call."
        )
    return model


def never_constructed(load: Request) -> PatcherError:
    """The error for a load that has returned without a model of ours."""
    owner = next(cls for cls in load.model_class.__mro__ if "get_init_context" in vars(cls))
    if owner is PreTrainedModel:
        return not_called("PreTrainedModel.get_init_context")
    return PatchConstructionError(
        f"{owner.__name__}.get_init_context leaves out the contexts in which a patched model is built, so nothing was "
        "patched: let it return those of super().get_init_context(...) as well."
    )


def seen(
    construction: Construction, model: PreTrainedModel
) -> tuple[Outcome, PatchRecord, Placed, list[tuple[str, PreTrainedModel]]]:
    """What was found and done, the outermost replacements, and the models; blocks around it are notified."""
    resolution: Resolution = construction.resolution or NO_CHANGE
    built, rules = construction.built, dict[str, dict[str, None]]()
    for one in built:
        rules.setdefault(f"{one.match.field}[{one.match.key!r}]", {})[one.match.original.__name__] = None
    chosen = {id(one.module): not one.match.entry.is_registry for one in built}
    modules = list(named_modules(model))  # once: walks are a good part of what a load of ours takes longer
    plan = resolution.fusion_plan
    fusions = plan.by_path
    patched = [
        PatchedModule(
            path,
            original,
            unrebound(type(module)),
            chosen.get(id(module), True),
            fusions.get(path),
            plan.layouts.get(path, ()),
        )
        for path, module in modules
        if (original := original_class(module)) is not None
    ]
    functions: Functions = construction.functions or NO_FUNCTIONS
    outcome = found_in_modules(construction, model, modules)
    tell_blocks(outcome)
    # Backwards, so that of a module with several paths the first one comes last.
    models = [(path, module) for path, module in reversed(modules) if isinstance(module, PreTrainedModel)]
    follow_no_split_names((each for _, each in models), ((item.original, item.replacement) for item in patched))
    record = PatchRecord(
        model_class=stock_class(model),  # type: ignore[arg-type]
        in_force=construction.rules.entries,
        modules=tuple(patched),
        refused=dict(resolution.refused),
        fusion_transforms=plan.transforms,
        functions=tuple((each.name, full_name(each.replacement), each.callers) for each in functions.replaced),
        rules=(
            *((rule, tuple(names)) for rule, names in rules.items()),
            *((f"function_mapping[{each.keys[0][1]!r}]", (each.name,)) for each in functions.replaced),
        ),
    )
    paths = {id(module): path for path, module in reversed(modules)}  # the first of several
    outermost = [(paths[id(each.module)], each) for each in built if each.outermost and id(each.module) in paths]
    return outcome, record, tuple(outermost), models


@dataclass(frozen=True, eq=False, kw_only=True)
class Selected(Constructed):
    """The conversions of the load are known.

    Attributes:
        stock: the conversions of transformers, without what the call renames.
        key_mapping: that, before anything else.
    """

    stock: tuple[WeightTransform, ...]
    conversions: SelectedConversions
    key_mapping: Mapping[str, str] | None = None


def select(
    constructed: Constructed, stock: list[WeightTransform], key_mapping: Mapping[str, str] | None
) -> tuple[Selected, list[WeightTransform]]:
    """The conversions of the load, and those that transformers runs: before the quantizer adapts them."""
    first = len(key_mapping or ())  # what the user's key_mapping says runs first and is never filtered
    record = constructed.record
    own = tuple(stock[first:])
    conversions = select_conversions(own, record.patchers, record.fusion_transforms, record.replacements())
    if constructed.runtime_layout:  # what transformers converts has been converted; a part may be read out of a whole
        kept_names = tuple(item for item in conversions.kept if not isinstance(item, WeightConverter))
        conversions = replace(conversions, kept=kept_names)
    selected = Selected(**vars(constructed), stock=own, conversions=conversions, key_mapping=key_mapping)
    return selected, [*stock[:first], *conversions.kept]


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded(Selected):
    """The weights have been read, or would have been.

    Attributes:
        info: what transformers knows of the load: missing, unexpected and mismatched keys, errors of conversions.
        routing: where each tensor of the checkpoint goes.
        disk_index: where transformers finds what the device map puts on the disk.
    """

    info: Any
    routing: Routing = field(default_factory=Routing)
    disk_index: dict[str, Any] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Finalized(Loaded):
    """The rest of the model has its values as well."""


#: Where a load has come to -> the seam that leads on from there.
_LEADS_ON: dict[type[Request], str] = {
    Constructed: "get_model_conversion_mapping",
    Selected: "convert_and_load_state_dict_in_model",
    Loaded: "PreTrainedModel._finalize_model_loading",
}


def put_down(load: Constructed) -> None:
    """Put down on the model what was done, by which it is saved, and what is loaded into it later is judged."""
    keep_record(load.models, load.record)
    if isinstance(load, Loaded):
        carry_routes(load.model, load.record.routes, load.record.paths_of_replacements)


def finish(load: Constructed) -> None:
    """Add to the record what is known at the end, and warn of what is not as requested.

    Raises:
        PatcherError: transformers has gone around one of the steps, so the weights aren't what was requested.
    """
    diagnostics = load.diagnostics
    if type(load) is not Finalized:
        if not distributed_checkpoint(load.path, load.options):
            raise not_called(_LEADS_ON[type(load)])
        put_down(load)  # torch.distributed has read it
        lenient = [entry for entry in load.own if not entry.patcher.strict]
        diagnostics = diagnostics.adding_unused(lenient, load.outcome, load.model_class.__name__)
    total = time.perf_counter() - load.started
    seconds = {"construction": load.seconds, "reading": total - load.seconds, "total": total}
    record = record_of(load.model) or load.record  # an adapter may have been loaded, too
    load.model.__dict__[RECORD] = replace(record, seconds=seconds, warnings=diagnostics.warnings)
    diagnostics.warn()


def finish_by_hand(construction: Construction, model: PreTrainedModel) -> None:
    """Fuse a model that was made without a checkpoint, `Model(config)` or `from_config`, and put that down."""
    fuse_standing_modules(construction, model)
    construction.outcome, record, _, models = seen(construction, model)
    keep_record(models, record)
