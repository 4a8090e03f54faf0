"""One load as five steps, each a function from the frozen result before it to its own.

    Request -> Constructed -> Selected -> Loaded -> Finalized -> the record on the model

Each result has all that those before it have. Where a load is, its exact class says.

`request` is made when `from_pretrained` is called, `construct` ends when the modules stand on the meta device,
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

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import distributed_checkpoint, partitions_parameters
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import follow_no_split_names, named_modules, original_class, state_tensors, stock_class
from patcher.compat.parallel import sizes
from patcher.compat.seams import not_called
from patcher.construction.class_rules import ClassRules
from patcher.construction.construction import Construction, Placed
from patcher.construction.in_force import InForce, Matched, in_force_for, tell_blocks
from patcher.construction.init_hooks import building
from patcher.construction.meta_init import NoValues
from patcher.errors import InvalidPatcherError, PatchConstructionError, PatcherError
from patcher.expressions import Expressions
from patcher.functions.models import full_name
from patcher.fusions.base import Fusion
from patcher.layouts.selection import SelectedConversions, converts, select_conversions
from patcher.loading.checks import Diagnostics
from patcher.loading.initial_values import ParameterTraits
from patcher.loading.record import RECORD, PatchRecord, Replaced, keep_record, record_of
from patcher.loading.routes import Routing
from patcher.loading.stock_view import carry_routes
from patcher.patterns import matches_path
from patcher.resolution.resolution import NO_CHANGE, Resolution
from patcher.spec.fingerprints import check_pins


@dataclass(frozen=True)
class DryRun:
    """A load that stops before it reads.

    Attributes:
        unknown: the keys of the checkpoint whose shapes nobody knows.
        has_checkpoint: whether there is one; without it conversions and weights are not judged.
        runtime_layout: whether it has the parameters of the model as they are.
    """

    unknown: frozenset[str] = frozenset()
    has_checkpoint: bool = True
    runtime_layout: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What a call of `from_pretrained` asks for.

    Attributes:
        in_force: all patchers that the load meets, the innermost first.
        own: those of them that this very load brings.
        path: what is loaded.
        options: the keyword arguments of `from_pretrained`.
        runtime_layout: whether the checkpoint has the parameters of the model as they are.
    """

    model_class: type[PreTrainedModel]
    in_force: tuple[InForce, ...] = ()
    own: tuple[InForce, ...] = ()
    path: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dry_run: DryRun | None = None
    runtime_layout: bool = False
    started: float = field(default_factory=time.perf_counter)

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
    return Request(
        model_class=model_class,
        in_force=in_force,
        own=own,
        path=path,
        options=options,
        dry_run=dry_run,
        runtime_layout=dry_run is not None and dry_run.runtime_layout,
    )


def check_supported(entries: tuple[InForce, ...], path: Any, options: Mapping[str, Any]) -> None:
    """Raise for what patchers, or their conversions, are not yet known to survive.

    Raises:
        InvalidPatcherError: with what can be done instead.
    """
    if entries and partitions_parameters():
        raise InvalidPatcherError(
            "A patcher was asked for while DeepSpeed ZeRO-3 is on, which partitions each parameter as soon as it is "
            "made and reads weights in a way of its own: no patcher follows that. Load the model before the ZeRO-3 "
            "config is made (HfDeepSpeedConfig, or TrainingArguments with deepspeed=), or use ZeRO stage 2."
        )
    if not any(map(brings_conversions, entries)):
        return
    asked = [name for name in ("device_mesh",) if options.get(name)]
    if sizes(options.get("distributed_config")).stages > 1:
        asked.append("a distributed_config with pp_size")
    if distributed_checkpoint(path, options):
        asked.append(f"the distributed checkpoint in {path}")
    if asked:
        raise InvalidPatcherError(
            f"A patcher with weight conversions was asked for together with {', '.join(asked)}, which is not "
            "supported. Load the model without the patcher, save it with save_pretrained, and load that with it."
        )


def brings_conversions(entry: InForce) -> bool:
    """Whether a patcher in force changes how weights are read."""
    return bool(entry.patcher.fusions) or converts(entry.patcher)


@dataclass(frozen=True, eq=False, kw_only=True)
class Constructed(Request):
    """The modules stand, on meta; no weight has been read."""

    rules: ClassRules
    model: PreTrainedModel
    models: list[tuple[str, PreTrainedModel]]
    outermost: Placed
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
        PatcherError: transformers has not come by the place where the modules are fused.
        UnmatchedPatchError: a class key or a fusion has matched nothing.
    """
    started = time.perf_counter()
    rules = ClassRules(asked.in_force)
    construction = Construction(rules, on_meta=asked.dry_run is not None)
    with building(construction), NoValues():
        yield
    model = check_stands(construction, asked.model_class)
    if construction.resolution is None and any(entry.patcher.fusions for entry in asked.in_force):
        raise not_called("patch_output_recorders")
    matched, record, outermost, models = seen(construction, model)
    strict = [entry for entry in asked.own if entry.patcher.strict]  # of the others all is said at the end, at once
    diagnostics = Diagnostics(goes_on=asked.dry_run is not None).adding_matches(
        strict, matched, asked.model_class.__name__, conversions=False
    )
    done(
        Constructed(
            **vars(asked),
            rules=rules,
            model=model,
            models=models,
            outermost=outermost,
            record=record,
            traits=ParameterTraits.of(model, outermost),
            matched=matched,
            diagnostics=diagnostics,
            seconds=time.perf_counter() - started,
        )
    )


def check_stands(construction: Construction, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """The model that was built, if it has gone through all that a model is patched at.

    Raises:
        PatchConstructionError: it has not.
    """
    model = construction.root
    if model is None:
        raise PatchConstructionError(
            f"What is built as {model_class.__name__} doesn't call PreTrainedModel.__init__, so no load can "
            "follow it: derive it from PreTrainedModel, and call super().__init__(config)."
        )
    if not construction.stands:
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


def seen(construction: Construction, model: PreTrainedModel) -> tuple[Matched, PatchRecord, Placed, Any]:
    """What was matched and done, the outermost replacements, and the models; blocks around it are told."""
    resolution: Resolution = construction.resolution or NO_CHANGE
    chosen = {id(built.module): not built.entry.is_registry for built in construction.built}
    modules = list(named_modules(model))  # once: walks are a good part of what a load of ours takes longer
    replaced = [
        Replaced(path, original, unrebound(type(module)), chosen.get(id(module), True))
        for path, module in modules
        if (original := original_class(module)) is not None
    ]
    matched = construction.matched | Matched(
        classes=frozenset(stock_class(module).__name__ for _, module in modules),
        refused=frozenset(
            (fusion, path, reason)
            for fusion, found in resolution.fusion_plan.refused.items()
            for path, reason in found.items()
        ),
    )
    keys = _asked_paths(construction, resolution)
    if keys or construction.rules.has_paths:
        matched |= Matched(
            keys=frozenset(key for key, took in keys.items() if took), paths=frozenset(path for path, _ in modules)
        )
    matched |= _declared_as_new(construction, model)
    if any("." in key for entry in construction.rules.entries for key in entry.patcher.class_mapping):
        matched |= Matched(places=frozenset((path, stock_class(module).__name__) for path, module in modules))
    tell_blocks(matched)
    # Backwards, so that of a module with several paths the first one comes last.
    models = [(path, module) for path, module in reversed(modules) if isinstance(module, PreTrainedModel)]
    follow_no_split_names((each for _, each in models), ((item.original, item.replacement) for item in replaced))
    record = PatchRecord(
        model_class=stock_class(model),  # type: ignore[arg-type]
        in_force=construction.rules.entries,
        replaced=tuple(replaced),
        fused={item.path: (item.original, item.replacement) for item in replaced if item.path in resolution.fused},
        fusions={fusion: paths for fusion, paths in resolution.fusion_plan.by_fusion.items() if paths},
        layouts=dict(resolution.fusion_plan.layouts),
        refused=dict(resolution.refused),
        fusion_transforms=resolution.fusion_plan.transforms,
        functions=tuple(
            (each.name, full_name(each.replacement), each.callers) for each in resolution.functions.replaced
        ),
    )
    paths = {id(module): path for path, module in reversed(modules)}  # the first of several
    outermost = [(paths[id(each.module)], each) for each in construction.outermost_built if id(each.module) in paths]
    return matched, record, tuple(outermost), models


def _declared_as_new(construction: Construction, model: PreTrainedModel) -> Matched:
    """The expressions of `new_weights` that name something which the model holds."""
    asked = [(entry, text) for entry in construction.rules.entries for text in entry.patcher.new_weights]
    if not asked:
        return Matched()
    names = frozenset(state_tensors(model))
    found = Expressions(text for _, text in asked).found_among(names)
    return Matched(frozenset((entry, "new_weights", text) for entry, text in asked if text in found), parameters=names)


def _asked_paths(
    construction: Construction, resolution: Resolution
) -> dict[tuple[InForce, str, tuple[Fusion, str]], bool]:
    """Each path that a fusion is asked for, as a key of `Matched`, and whether the fusion took a module there."""
    return {
        (entry, "modules", (fusion, pattern)): any(
            matches_path(pattern, path) for path in resolution.fusion_plan.by_fusion.get(fusion, ())
        )
        for entry in construction.rules.entries
        for fusion in entry.patcher.fusions
        if isinstance(fusion, Fusion)
        for pattern in fusion.modules
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class Selected(Constructed):
    """The conversions of the load are known.

    Attributes:
        key_mapping: what the call renames before anything else.
        initialized: the keys that were given initial values, with the shape that the checkpoint has there, and their
            own; None where it lacks them.
    """

    conversions: SelectedConversions
    key_mapping: Mapping[str, str] | None = None
    initialized: Mapping[str, tuple[torch.Size, torch.Size] | None] = field(default_factory=dict)


def select(
    constructed: Constructed, stock: list[WeightTransform], key_mapping: Mapping[str, str] | None
) -> tuple[Selected, list[WeightTransform]]:
    """The conversions of the load, and those that transformers runs: before the quantizer adapts them."""
    asked = len(key_mapping or ())  # what the user's key_mapping asks for runs first and is never filtered
    record = constructed.record
    conversions = select_conversions(stock[asked:], record.patchers, record.fusion_transforms, record.replacements())
    if constructed.runtime_layout:  # what transformers converts has been converted; a part may be read out of a whole
        kept_names = tuple(item for item in conversions.kept if not isinstance(item, WeightConverter))
        conversions = replace(conversions, kept=kept_names)
    selected = Selected(**vars(constructed), conversions=conversions, key_mapping=key_mapping)
    return selected, [*stock[:asked], *conversions.kept]


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
    """Add to the record what is known at the end, and warn of what is not as it was asked for.

    Raises:
        PatcherError: transformers has gone around one of the steps, so the weights aren't what was asked for.
    """
    diagnostics = load.diagnostics
    if type(load) is not Finalized:
        if not distributed_checkpoint(load.path, load.options):
            raise not_called(_LEADS_ON[type(load)])
        put_down(load)  # torch.distributed has read it
        lenient = [entry for entry in load.own if not entry.patcher.strict]
        diagnostics = diagnostics.adding_matches(lenient, load.matched, load.model_class.__name__)
    total = time.perf_counter() - load.started
    seconds = {"construction": load.seconds, "reading": total - load.seconds, "total": total}
    record = record_of(load.model) or load.record  # an adapter may have been loaded, too
    load.model.__dict__[RECORD] = replace(record, seconds=seconds, warnings=diagnostics.warnings)
    diagnostics.warn()


def finish_by_hand(construction: Construction, model: PreTrainedModel) -> None:
    """Put down on a model what was done that was made without a checkpoint: `Model(config)`, or `from_config`."""
    construction.matched, record, outermost, models = seen(construction, model)
    ParameterTraits.of(model, outermost)
    keep_record(models, record)
