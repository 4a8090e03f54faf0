"""A patcher, a model class and a config, to what happens: swaps, fusions, refusals, conversions. A pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import stock_conversions
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import DisableTorchFunction, mark_original_class, named_modules, original_class
from patcher.construction.class_rules import ClassRules, Match
from patcher.construction.construction import Construction, rebuilt
from patcher.construction.gates import building, cover_new_classes
from patcher.construction.in_force import InForce
from patcher.construction.lock import construction_lock
from patcher.construction.meta_init import NoValues
from patcher.display.shown import folded
from patcher.errors import PatchConflictError
from patcher.functions.models import NO_FUNCTIONS, Functions, find_functions, full_name, swap_functions
from patcher.fusions.base import Fusion
from patcher.fusions.families import fusion_named, is_builtin, name_or_fusion
from patcher.fusions.finding import discover
from patcher.fusions.fused_module import FusedModule, fuse, fuse_all, takes_modules
from patcher.layouts.carried import fused_weights
from patcher.layouts.layouts import Layout
from patcher.layouts.transforms import describe, select_conversions
from patcher.spec.forward_of import shown_name
from patcher.spec.patcher import Patcher


@dataclass(frozen=True, eq=False)
class FusionPlan:
    """What the fusions of a resolution amount to, for those that carry it out.

    Attributes:
        by_fusion: fusion -> the paths that it fuses.
        refused: fusion -> the paths that it leaves alone, and why.
        rebuilt: the paths whose modules are built again as the fused class; others are fused in place.
        layouts: path -> which parameters of the module become which.
        transforms: the conversions of fusions that aren't layouts of one module.
    """

    by_fusion: Mapping[str | Fusion, tuple[str, ...]] = field(default_factory=dict)
    refused: Mapping[str | Fusion, Mapping[str, str]] = field(default_factory=dict)
    rebuilt: frozenset[str] = frozenset()
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    transforms: tuple[WeightTransform, ...] = ()

    @property
    def by_path(self) -> dict[str, str | Fusion]:
        """The paths that are fused, each with its fusion."""
        return {path: fusion for fusion, paths in self.by_fusion.items() for path in paths}


@dataclass(frozen=True, eq=False)
class Resolution:
    """What a patcher does to one model.

    >>> from patcher import Patcher
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    >>> resolution = Patcher(fusions="gate_up").resolve(LlamaForCausalLM, config)
    >>> sorted(resolution.fused)
    ['model.layers.0.mlp', 'model.layers.1.mlp']

    Attributes:
        classes: original class -> replacement, of what the class mapping replaces.
        replaced: path -> replacement, module by module.
        fused: path -> the class that a fusion builds there.
        refused: path -> why a fusion that names the module leaves it alone.
        dropped: the stock conversions that are left out.
        added: the conversions that come in front.
        original_classes: path -> the class that stood there, of what is replaced or fused.
        functions: the functions that are replaced, and the classes that call them.
    """

    classes: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    replaced: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    fused: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[WeightTransform, ...] = ()
    added: tuple[WeightTransform, ...] = ()
    original_classes: Mapping[str, type[nn.Module]] = field(default_factory=dict, repr=False)
    fusion_plan: FusionPlan = field(default_factory=FusionPlan, repr=False)
    functions: Functions = field(default=NO_FUNCTIONS, repr=False)

    def __str__(self) -> str:
        lines = [f"{name}: {shown_name(cls)}" for name, cls in folded(self.replaced.items(), "(root)")]
        lines += [f"{name}: fused as {cls.__qualname__}" for name, cls in folded(self.fused.items(), "(root)")]
        lines += [f"{name}: not fused, {reason}" for name, reason in folded(self.refused.items(), "(root)")]
        lines += [
            f"{each.name}: {full_name(each.replacement)}, called by {', '.join(each.callers)}"
            for each in self.functions.replaced
        ]
        lines += [f"drops {describe(transform)}" for transform in self.dropped]
        lines += [f"adds {describe(transform)}" for transform in self.added]
        return "\n".join(lines) or "changes nothing"


NO_CHANGE = Resolution()


def skeleton(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device, as transformers builds it: modules, names and shapes, no weight."""
    return _skeleton(model_class, config, ())[0]


def _skeleton(
    model_class: type[PreTrainedModel], config: PretrainedConfig, entries: Iterable[InForce]
) -> tuple[PreTrainedModel, Functions]:
    """The same with what mappings put into it, and the functions that are replaced."""
    config = deepcopy(config)
    if isinstance(config.dtype, str):  # as a file has it, and as saving leaves it
        config.dtype = getattr(torch, config.dtype)
    construction = Construction(ClassRules(entries), is_skeleton=True)
    # include_buffers=True is only `torch.device("meta")`: accelerate's one way that other threads don't see
    alone = construction_lock.held_for(model_class.__name__)
    with alone, building(construction), init_empty_weights(include_buffers=True), NoValues():
        return model_class(config), construction.functions or NO_FUNCTIONS


def resolve(patcher: Patcher, model_class: type[PreTrainedModel], config: PretrainedConfig) -> Resolution:
    """See `Patcher.resolve`."""
    entries = (InForce(patcher, "resolve()"),)
    model, functions = _skeleton(model_class, config, entries)
    resolution = resolve_standing(entries, model, functions)
    transforms, replaced = resolution.fusion_plan.transforms, resolution.replaced.items()
    selected = select_conversions(stock_conversions(model), [patcher], transforms, replaced)
    return replace(
        resolution,
        dropped=tuple(dict.fromkeys(transform for transform, _ in selected.dropped)),
        added=tuple(each.transform for each in selected.added),
    )


def resolve_in_force(
    entries: Iterable[InForce], model_class: type[PreTrainedModel], config: PretrainedConfig
) -> Resolution:
    """What several patchers do to one model, the innermost first, but for its conversions."""
    entries = tuple(entries)
    return resolve_standing(entries, *_skeleton(model_class, config, entries))


def resolve_standing(
    entries: tuple[InForce, ...],
    model: PreTrainedModel,
    functions: Functions = NO_FUNCTIONS,
) -> Resolution:
    """What several patchers do to a model on the meta device, with what their mappings put into it."""
    modules = dict(named_modules(model))
    #: those of parts that were loaded by themselves, or of a model that is resolved again
    already = {path: carried for path, module in modules.items() if (carried := fused_weights(module)) is not None}
    replaced = {
        path: unrebound(type(module))
        for path, module in modules.items()
        if original_class(module) is not None and path not in already
    }
    rules = ClassRules(entries)
    matches = {cls: rules.match(cls) for module in modules.values() if (cls := original_class(module)) is not None}

    fused: dict[str, type[nn.Module]] = {}
    refused: dict[str, str] = {}
    claimed: dict[str, str | Fusion] = {}
    by_fusion: dict[str | Fusion, tuple[str, ...]] = {}
    refused_by: dict[str | Fusion, Mapping[str, str]] = {}
    transforms: list[WeightTransform] = []
    layouts: dict[str, tuple[Layout, ...]] = {}
    for named in dict.fromkeys(fusion for entry in entries for fusion in entry.patcher.fusions):
        fusion = fusion_named(named)
        found = discover(fusion, model)
        for path in found.matches:
            if path in claimed:
                raise PatchConflictError(f"The fusions {claimed[path]!r} and {named!r} both claim {path}; use one.")
            if path in replaced:
                mapping = (
                    "class mapping" if rules.match_path(path, type(found.matches[path])) is None else "module mapping"
                )
                raise PatchConflictError(
                    f"The fusion {named!r} claims {path}, which the {mapping} replaces by "
                    f"{replaced[path].__qualname__}; take one of them away."
                )
            claimed[path] = named
        kept = {path: each.layouts for path, each in already.items() if each.fusion == name_or_fusion(fusion)}
        fused |= {path: unrebound(type(modules[path])) for path in kept}
        layouts |= kept
        refused.update(found.refused)
        refused_by[named] = found.refused
        by_fusion[named] = (*kept, *found.matches)
        fused |= found.classes
        layouts |= found.layouts
        if found.matches:
            transforms += fusion.make_transforms(model.config, MappingProxyType(dict(found.matches)))

    return Resolution(
        classes=MappingProxyType({cls: match.replacement for cls, match in matches.items() if match is not None}),
        replaced=MappingProxyType(replaced),
        fused=MappingProxyType(fused),
        refused=MappingProxyType({path: reason for path, reason in refused.items() if path not in fused}),
        functions=functions,
        original_classes=MappingProxyType(
            {path: original_class(modules[path]) or type(modules[path]) for path in (*replaced, *fused)}
        ),
        fusion_plan=FusionPlan(
            by_fusion=MappingProxyType(by_fusion),
            refused=MappingProxyType(refused_by),
            rebuilt=frozenset(path for path, cls in fused.items() if not takes_modules(cls)),
            layouts=MappingProxyType({path: found for path, found in layouts.items() if found}),
            transforms=tuple(transforms),
        ),
    )


def replace_functions(construction: Construction, model: PreTrainedModel) -> None:
    """Have the modules of a model call the replacements, before it is initialised and anything is fused."""
    layers = tuple(tuple(entry.patcher.function_mapping.items()) for entry in construction.rules.entries)
    construction.functions = find_functions(model, layers) if any(layers) else NO_FUNCTIONS
    swap_functions(model, construction.functions)


# --- fusions at work: while a model is built, what is fused is so in place, or built again ---------------------------


def keep_arguments(construction: Construction) -> None:
    """Have constructor arguments kept, if modules may be built again: of families that aren't ours it isn't known."""
    patchers = [entry.patcher for entry in construction.rules.entries]
    if any(each.module_mapping or not all(map(is_builtin, each.fusions)) for each in patchers):
        construction.arguments = {}
        cover_new_classes(construction.rules)


def _resolved(construction: Construction, model: PreTrainedModel) -> Resolution:
    """What is fused of a model whose modules are constructed."""
    entries = construction.rules.entries
    if construction.resolution is None and any(entry.patcher.fusions for entry in entries):
        with DisableTorchFunction():  # nothing is made here, and each look at a tensor would pass through modes
            construction.resolution = resolve_standing(entries, model, construction.functions)
    return construction.resolution or NO_CHANGE


def rebuild_fused_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Put modules of the fused classes in place of those that were built, before the model looks at its parts."""
    if construction.arguments is None:
        return
    resolution = _resolved(construction, model)
    fused: dict[int, nn.Module] = {}
    # The outer ones first: building those builds what is inside of them once more.
    for path in sorted(resolution.fusion_plan.rebuilt, key=lambda path: path.count(".")):
        cls = resolution.fused[path]
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        module: Any = parent._modules.get(name)
        if type(module) is cls:
            continue  # of a part that was loaded separately
        new = fused.get(id(module))
        if new is None:
            fusion = resolution.fusion_plan.by_path[path]
            entry = next(each for each in construction.rules.entries if fusion in each.patcher.fusions)
            match = Match(fusion, cls, entry, type(module), "fusions")
            new = fused[id(module)] = rebuilt(construction, path, module, match)
        parent._modules[name] = new


def fuse_standing_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Fuse the constructed modules of a model: with initial values, or on the meta device in a load."""
    resolution = _resolved(construction, model)
    plan, classes, fusions = resolution.fusion_plan, resolution.fused, resolution.fusion_plan.by_path
    modules = {path: model.get_submodule(path) for path in classes if path not in plan.rebuilt}
    # Not those of a part that was loaded separately.
    left = [path for path, module in modules.items() if unrebound(type(module)) is not classes[path]]
    in_place = [path for path in left if issubclass(classes[path], FusedModule)]
    fuse_all([(fusions[path], modules[path], classes[path], plan.layouts.get(path, ())) for path in in_place])
    for path in left:
        module = model.get_submodule(path)
        if path not in in_place:
            module = fuse(fusions[path], module, classes[path], plan.layouts.get(path, ()))
            parent_path, _, name = path.rpartition(".")
            model.get_submodule(parent_path)._modules[name] = module
        mark_original_class(module, resolution.original_classes[path])
