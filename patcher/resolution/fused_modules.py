"""Fusions at work: while a model is built, what its resolution says is fused where it stands, or built again."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher.compat.modeling_code import unrebound
from patcher.compat.models import DisableTorchFunction, mark_original_class
from patcher.construction.class_rules import Match
from patcher.construction.construction import Construction
from patcher.construction.in_force import InForce
from patcher.construction.init_hooks import cover_new_classes
from patcher.errors import PatchConstructionError
from patcher.fusions.families import fusion_named
from patcher.fusions.fused_module import fuse
from patcher.resolution.resolution import (
    NO_CHANGE,
    Resolution,
    needs_skeleton,
    resolve_in_force,
    resolve_standing,
)

_ADVICE = "Leave it out of the fusion: its modules=... say which it takes."


def prepare(construction: Construction, model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Resolve what becomes of the modules of a model whose construction begins, and have their arguments kept.

    Where it can wait until these are there, it does: a skeleton takes as long as the model.
    """
    patchers = [entry.patcher for entry in construction.rules.entries]
    acts = any(each.fusions or each.module_mapping or each.function_mapping for each in patchers)
    # What is built by hand may be given parts that are patched already, so it can't be looked at afterwards.
    if not construction.is_skeleton and acts and (construction.by_hand or needs_skeleton(patchers)):
        resolution = construction.resolution = resolve_in_force(construction.rules.entries, model_class, config)
        rebuilt = (resolution.original_classes[path] for path in resolution.fusion_plan.rebuilt)
        construction.recorded = resolution.recorded.union(map(unrebound, rebuilt))
    if construction.recorded:
        cover_new_classes(construction.recorded)


def rebuild_fused_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Put modules of the fused classes in place of those that were built, before the model looks at its parts."""
    resolution: Resolution = construction.resolution or NO_CHANGE
    fused: dict[int, nn.Module] = {}
    # The outer ones first: building those builds what is inside of them once more.
    for path, cls in sorted(resolution.fused.items(), key=lambda item: item[0].count(".")):
        if path not in resolution.fusion_plan.rebuilt:
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        module = parent._modules.get(name)
        if type(module) is cls:
            continue  # of a part that was loaded by itself
        if module is None or id(module) not in construction.arguments:
            found = "nothing" if module is None else f"a {type(module).__qualname__}"
            raise PatchConstructionError(
                f"{path} was to be fused as {cls.__qualname__}, but the model has {found} there: it is built "
                f"otherwise than its skeleton on the meta device. {_ADVICE}"
            )
        new = fused.get(id(module))
        if new is None:
            _, args, kwargs = construction.arguments[id(module)]
            key, entry = _fusion_of(construction, path)
            match = Match(key, cls, entry, type(module), "fusions")
            new = fused[id(module)] = construction.build_in_place_of(module, type(module), match, args, kwargs)
        parent._modules[name] = new


def fuse_when_all_stand(construction: Construction, model: PreTrainedModel) -> None:
    """Resolve and fuse the modules of a model that a load has built on the meta device, if that has waited."""
    if construction.by_hand or construction.is_skeleton or construction.resolution is not None:
        return
    entries = construction.rules.entries
    if any(entry.patcher.fusions for entry in entries):
        with DisableTorchFunction():  # nothing is made here, and each look at a tensor would pass through modes
            construction.resolution = resolve_standing(entries, model, functions=construction.functions)
        fuse_standing_modules(construction, model)


def fuse_standing_modules(construction: Construction, model: PreTrainedModel) -> None:
    """Fuse the modules that stand and have their initial values."""
    resolution: Resolution = construction.resolution or NO_CHANGE
    for path in resolution.fused:
        if path in resolution.fusion_plan.rebuilt:
            continue
        module = model.get_submodule(path)
        original, cls = resolution.original_classes[path], resolution.fused[path]
        key, _ = _fusion_of(construction, path)
        if type(module) is cls:
            continue  # of a part that was loaded by itself, or of a model that calls `post_init` again
        if type(module) is not original:
            raise PatchConstructionError(
                f"{path} was to be fused as {cls.__qualname__}, but the model has a {type(module).__qualname__} "
                f"there, not a {original.__qualname__}: it is built otherwise than its skeleton on the meta device. "
                f"{_ADVICE}"
            )
        fused = fuse(fusion_named(key), module, cls, resolution.fusion_plan.layouts.get(path, ()))
        mark_original_class(fused, original)
        if fused is not module:
            parent_path, _, name = path.rpartition(".")
            model.get_submodule(parent_path)._modules[name] = fused


def _fusion_of(construction: Construction, path: str) -> tuple[Any, InForce]:
    """The fusion that takes the module at `path`, and the patcher that asks for it."""
    for fusion, paths in construction.resolution.fusion_plan.by_fusion.items():
        if path in paths:
            return fusion, next(entry for entry in construction.rules.entries if fusion in entry.patcher.fusions)
    raise KeyError(path)
