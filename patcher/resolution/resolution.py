"""Resolve a patcher, a model class and a config to what happens: replacements, fusions, refusals, conversions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
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
from patcher.construction.construction import Construction, check_left_behind, rebuilt
from patcher.construction.gates import building, cover_new_classes
from patcher.construction.in_force import InForce
from patcher.construction.lock import construction_lock
from patcher.construction.meta_init import NoValues
from patcher.display.shown import folded
from patcher.errors import InvalidPatcherError, PatchConflictError, PatchConstructionError, PatcherError
from patcher.functions.models import NO_FUNCTIONS, Functions, find_functions, full_name, swap_functions
from patcher.fusions.base import Fusion
from patcher.fusions.families import fusion_named, is_builtin, name_or_fusion
from patcher.fusions.finding import Findings, discover
from patcher.fusions.fused_module import FusedModule, fuse_in_place, put_in_place, takes_modules
from patcher.layouts.carried import fused_layouts
from patcher.layouts.layouts import Layout
from patcher.layouts.transforms import describe, select_conversions
from patcher.patterns import inside
from patcher.source.reading import signature_of
from patcher.spec.forward_of import shown_name
from patcher.spec.patcher import Patcher


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
        classes: original class -> replacement, for classes that the class mapping replaces.
        replaced: path -> replacement, module by module.
        fused: path -> the fused class of the module.
        refused: path -> why a fusion that matches the module leaves it unchanged.
        dropped: the stock conversions that are dropped.
        added: the conversions that precede those of transformers.
        original_classes: path -> original class, for modules that are replaced or fused.
        functions: the functions that are replaced, and the classes that call them.
        fusions: path -> the fusion that fuses the module.
        refusals: fusion -> the modules that it leaves unchanged, and why.
        layouts: path -> the layouts of a fused module.
        transforms: the conversions of fusions that aren't layouts of one module.
    """

    classes: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    replaced: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    fused: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[WeightTransform, ...] = ()
    added: tuple[WeightTransform, ...] = ()
    original_classes: Mapping[str, type[nn.Module]] = field(default_factory=dict, repr=False)
    functions: Functions = field(default=NO_FUNCTIONS, repr=False)
    fusions: Mapping[str, str | Fusion] = field(default_factory=dict, repr=False)
    refusals: Mapping[str | Fusion, Mapping[str, str]] = field(default_factory=dict, repr=False)
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict, repr=False)
    transforms: tuple[WeightTransform, ...] = field(default=(), repr=False)

    @property
    def rebuilt(self) -> list[str]:
        """The paths of modules that are constructed again as the fused class, the outer ones first."""
        paths = [path for path, cls in self.fused.items() if not takes_modules(cls)]
        return sorted(paths, key=lambda path: path.count("."))

    def __str__(self) -> str:
        lines = [f"{name}: {shown_name(cls)}" for name, cls in folded(self.replaced.items(), "(root)")]
        lines += [f"{name}: fused as {cls.__qualname__}" for name, cls in folded(self.fused.items(), "(root)")]
        lines += [f"{name}: not fused, {reason}" for name, reason in folded(self.refused.items(), "(root)")]
        lines += [
            f"{function.name}: {full_name(function.replacement)}, called by {', '.join(function.callers)}"
            for function in self.functions.replaced
        ]
        lines += [f"drops {describe(transform)}" for transform in self.dropped]
        lines += [f"adds {describe(transform)}" for transform in self.added]
        return "\n".join(lines) or "changes nothing"


NO_CHANGE = Resolution()


def skeleton(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Construct the stock model on the meta device."""
    return patched_skeleton(model_class, config, ())[0]


def patched_skeleton(
    model_class: type[PreTrainedModel], config: PretrainedConfig, entries: Iterable[InForce]
) -> tuple[PreTrainedModel, Functions]:
    """Construct a model with the replacements of mappings on the meta device; return also the replaced functions."""
    check_constructor(model_class)
    config = deepcopy(config)
    if isinstance(config.dtype, str):  # as in a file, and after a save
        config.dtype = getattr(torch, config.dtype)
    construction = Construction(ClassRules(entries), is_skeleton=True)
    # include_buffers=True is only `torch.device("meta")`: the one way of accelerate that doesn't affect other threads
    lock = construction_lock.held_for(model_class.__name__)
    with lock, building(construction), init_empty_weights(include_buffers=True), NoValues():
        return model_class(config), construction.functions or NO_FUNCTIONS


def check_constructor(model_class: type[nn.Module]) -> None:
    """Raise for a model class that can't be constructed from a config alone, as stock is beside a patched model."""
    try:
        signature_of(model_class).bind(None)
    except TypeError as error:
        raise InvalidPatcherError(
            f"{model_class.__name__} has to be constructed from its config alone here, and {error}. Give the "
            "arguments of its __init__ after the config defaults, or read their values from the config."
        ) from None


def resolve(patcher: Patcher, model_class: type[PreTrainedModel], config: PretrainedConfig) -> Resolution:
    """See `Patcher.resolve`."""
    entries = (InForce(patcher, "resolve()"),)
    model, functions = patched_skeleton(model_class, config, entries)
    resolution = resolve_constructed(entries, model, functions)
    replaced = resolution.replaced.items()
    selected = select_conversions(stock_conversions(model), [patcher], resolution.transforms, replaced)
    return replace(
        resolution,
        dropped=tuple(dict.fromkeys(transform for transform, _ in selected.dropped)),
        added=tuple(item.transform for item in selected.added),
    )


def resolve_constructed(
    entries: tuple[InForce, ...], model: PreTrainedModel, functions: Functions = NO_FUNCTIONS
) -> Resolution:
    """Resolve several patchers for a model that contains the replacements of their mappings."""
    modules = dict(named_modules(model))
    #: modules that are fused already: of parts that were loaded separately, or of a model that is resolved again
    already = {path: carried for path, module in modules.items() if (carried := fused_layouts(module)) is not None}
    originals = {path: cls for path, module in modules.items() if (cls := original_class(module)) is not None}
    replaced = {path: unrebound(type(modules[path])) for path in originals if path not in already}
    rules = ClassRules(entries)
    matches = {cls: rules.match(cls) for cls in originals.values()}

    fused: dict[str, type[nn.Module]] = {}
    fusions: dict[str, str | Fusion] = {}
    claimed: dict[str, str | Fusion] = {}
    refusals: dict[str | Fusion, Mapping[str, str]] = {}
    transforms: list[WeightTransform] = []
    layouts: dict[str, tuple[Layout, ...]] = {}
    for request in dict.fromkeys(fusion for entry in entries for fusion in entry.patcher.fusions):
        fusion = fusion_named(request)
        findings, added = _found(fusion, model)
        transforms += added
        for path, module in findings.matches.items():
            stock = [name for layout in findings.layouts.get(path, ()) for name in layout.stock]
            for claim in (path, *map(inside(path).__add__, stock)):
                if (first := claimed.setdefault(claim, request)) != request:
                    raise PatchConflictError(f"The fusions {first!r} and {request!r} both claim {claim}; use one.")
            if path in replaced:
                mapping = "class mapping" if rules.match_path(path, type(module)) is None else "module mapping"
                raise PatchConflictError(
                    f"The fusion {request!r} claims {path}, which the {mapping} replaces by "
                    f"{replaced[path].__qualname__}; take one of them away."
                )
        kept = {path: carried.layouts for path, carried in already.items() if carried.fusion == name_or_fusion(fusion)}
        fusions |= dict.fromkeys((*kept, *findings.matches), request)
        fused |= {**{path: unrebound(type(modules[path])) for path in kept}, **findings.classes}
        layouts |= {**kept, **findings.layouts}
        refusals[request] = findings.refused

    refused = {path: reason for reasons in refusals.values() for path, reason in reasons.items() if path not in fused}
    return Resolution(
        classes=MappingProxyType({cls: match.replacement for cls, match in matches.items() if match is not None}),
        replaced=MappingProxyType(replaced),
        fused=MappingProxyType(fused),
        refused=MappingProxyType(refused),
        functions=functions,
        original_classes=MappingProxyType(
            {path: originals.get(path, type(modules[path])) for path in (*replaced, *fused)}
        ),
        fusions=MappingProxyType(fusions),
        refusals=MappingProxyType(refusals),
        layouts=MappingProxyType({path: layout for path, layout in layouts.items() if layout}),
        transforms=tuple(transforms),
    )


def _found(fusion: Fusion, model: PreTrainedModel) -> tuple[Findings, list[WeightTransform]]:
    """Return what a fusion finds in a model, and its conversions; a family may be of a user."""
    try:
        findings = discover(fusion, model)
        matches = MappingProxyType(dict(findings.matches))
        transforms = list(fusion.make_transforms(model.config, matches)) if matches else []
    except PatcherError:
        raise
    except Exception as error:
        raise PatchConstructionError(
            f"The fusion {fusion!r} can't be applied to {type(model).__name__}: {type(error).__name__}: {error}"
        ) from error
    for transform in transforms:
        if not isinstance(transform, WeightTransform):
            raise InvalidPatcherError(
                f"{fusion!r}.make_transforms() must return weight transforms, found {transform!r}."
            )
    return findings, transforms


def changes_modules(construction: Construction) -> bool:
    """Whether patchers change constructed modules otherwise than by families of ours: a load walks them only then."""
    patchers = [entry.patcher for entry in construction.rules.entries]
    return any(
        patcher.module_mapping or patcher.function_mapping or not all(map(is_builtin, patcher.fusions))
        for patcher in patchers
    )


def replace_functions(construction: Construction, model: PreTrainedModel) -> None:
    """Have the modules of a model call replaced functions, before it is initialised and fused."""
    layers = tuple(tuple(entry.patcher.function_mapping.items()) for entry in construction.rules.entries)
    construction.functions = find_functions(model, layers) if any(layers) else NO_FUNCTIONS
    swap_functions(model, construction.functions)


# --- fusions while a model is constructed: modules are fused in place, or constructed again --------------------------


def record_arguments(construction: Construction) -> None:
    """Record constructor arguments if modules may be constructed again, as families other than ours may require."""
    patchers = [entry.patcher for entry in construction.rules.entries]
    if any(patcher.module_mapping or not all(map(is_builtin, patcher.fusions)) for patcher in patchers):
        construction.arguments = {}
        cover_new_classes(construction.rules)


def _resolution_of(construction: Construction, model: PreTrainedModel) -> Resolution:
    """Return the resolution of a model whose modules are constructed."""
    entries = construction.rules.entries
    if construction.resolution is None and any(entry.patcher.fusions for entry in entries):
        with DisableTorchFunction():  # no tensor is created, and modes would slow down every access to one
            construction.resolution = resolve_constructed(entries, model, construction.functions or NO_FUNCTIONS)
    return construction.resolution or NO_CHANGE


def rebuild_fused_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Construct modules again as their fused classes, before the model uses its submodules."""
    if all(is_builtin(fusion) for entry in construction.rules.entries for fusion in entry.patcher.fusions):
        return
    if construction.resolution is not None:
        fusion = next(iter(construction.resolution.fusions.values()))
        raise PatchConstructionError(
            f"{type(model).__name__}.__init__ changes modules after post_init, where {fusion!r} has constructed some "
            "again. Let post_init be the last that it calls, or give the fused class a from_module."
        )
    resolution = _resolution_of(construction, model)
    if not resolution.rebuilt:
        construction.resolution = None  # its __init__ may still change the model
        return
    rebuilt_modules: dict[int, nn.Module] = {}
    before = list(named_modules(model))
    for path in resolution.rebuilt:  # constructing the outer ones constructs the inner ones again
        cls, fusion = resolution.fused[path], resolution.fusions[path]
        parent, _, name = path.rpartition(".")
        children = model.get_submodule(parent)._modules
        module: Any = children.get(name)
        if type(module) is cls:
            continue  # of a part that was loaded separately
        if id(module) not in rebuilt_modules:
            entry = next(entry for entry in construction.rules.entries if fusion in entry.patcher.fusions)
            match = Match(fusion, cls, entry, type(module), "fusions")
            rebuilt_modules[id(module)] = rebuilt(construction, path, module, match)
        children[name] = rebuilt_modules[id(module)]
    check_left_behind(before, model, resolution.fusions)


def fuse_constructed_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Fuse the constructed modules of a model, with initial values, or on the meta device in a load."""
    resolution = _resolution_of(construction, model)
    classes, fusions = resolution.fused, resolution.fusions
    if not classes:
        return
    before, rebuilt_paths = list(named_modules(model)), resolution.rebuilt
    modules = {path: model.get_submodule(path) for path in classes if path not in rebuilt_paths}
    # Modules of parts that were loaded separately are fused already.
    unfused = [path for path, module in modules.items() if unrebound(type(module)) is not classes[path]]
    in_place = [path for path in unfused if issubclass(classes[path], FusedModule)]
    names = {fusion: name_or_fusion(fusion) for fusion in dict.fromkeys(fusions.values())}
    layouts = {path: resolution.layouts.get(path, ()) for path in unfused}
    # Under `torch.device(...)` each access to a tensor goes through a mode; families of patcher don't need it.
    with DisableTorchFunction() if all(map(is_builtin, names)) else nullcontext():
        fuse_in_place((modules[path], layouts[path], type(modules[path]), names[fusions[path]]) for path in in_place)
    for path in unfused:
        module = model.get_submodule(path)
        if path in in_place:
            module.__class__ = classes[path]  # after all are fused: it has properties for the old names
        else:
            module = put_in_place(module, classes[path], layouts[path], names[fusions[path]])
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = module
        mark_original_class(module, resolution.original_classes[path])
    check_left_behind(before, model, fusions)
