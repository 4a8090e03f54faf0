"""Fusions at work: while a model is built, what its resolution says is fused in place, or built again."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.modeling_code import unrebound
from patcher.compat.models import DisableTorchFunction, mark_original_class
from patcher.construction.class_rules import Match
from patcher.construction.construction import Construction
from patcher.construction.gates import cover_new_classes
from patcher.construction.modules_by_path import rebuilt
from patcher.fusions.families import is_builtin
from patcher.fusions.fused_module import FusedModule, fuse, fuse_all
from patcher.resolution.resolution import NO_CHANGE, Resolution, resolve_standing


def keep_arguments(construction: Construction) -> None:
    """Have constructor arguments kept, if modules may be built again: of families that aren't ours it isn't known."""
    patchers = [entry.patcher for entry in construction.rules.entries]
    if any(each.module_mapping or not all(map(is_builtin, each.fusions)) for each in patchers):
        construction.arguments = {}
        cover_new_classes(construction.rules)


def resolve_fusions(construction: Construction, model: PreTrainedModel) -> None:
    """Resolve what is fused of a model whose modules are constructed, unless that is known."""
    entries = construction.rules.entries
    if construction.resolution is None and any(entry.patcher.fusions for entry in entries):
        with DisableTorchFunction():  # nothing is made here, and each look at a tensor would pass through modes
            construction.resolution = resolve_standing(entries, model, construction.functions)


def rebuild_fused_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Put modules of the fused classes in place of those that were built, before the model looks at its parts."""
    if construction.arguments is None:
        return
    resolve_fusions(construction, model)
    resolution: Resolution = construction.resolution or NO_CHANGE
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
    resolve_fusions(construction, model)
    resolution: Resolution = construction.resolution or NO_CHANGE
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
