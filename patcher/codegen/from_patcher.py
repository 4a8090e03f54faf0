"""A runtime `Patcher` as a config: the readable file of what it does to the models of one modeling module."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher.codegen.checkpoint_methods import add_conversions, module_classes
from patcher.codegen.dependencies import RUNTIME, Dependencies
from patcher.codegen.joined_projections import join_projections
from patcher.codegen.listed_experts import list_experts
from patcher.codegen.owning_classes import Owners, built_by_config
from patcher.codegen.registration import PatchRegistration
from patcher.codegen.spec import create_patch_from_external
from patcher.codegen.to_patcher import MADE
from patcher.compat.conversions import stock_conversions
from patcher.fusions.joined import JoinedProjections
from patcher.fusions.patch_embeddings import LinearPatchEmbedding
from patcher.fusions.sequential_experts import ListedExperts
from patcher.patterns import find_key, hits, nearest
from patcher.resolution.resolution import Resolution, resolve, skeleton

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher

__all__ = ["describe_patcher"]


def describe_patcher(
    described: PatchRegistration, patcher: Patcher, model_class: type[PreTrainedModel], config: PretrainedConfig | None
) -> None:
    """Have a config do what a patcher does; see `PatchConfig.from_patcher`."""
    modeling = importlib.import_module(described.source_module)
    if vars(modeling).get(model_class.__name__) is not model_class:
        raise described.error(
            "from_patcher() needs a model class that its module has by its name, and "
            f"{modeling.__name__} has no such {model_class.__name__!r}. Give a class of a modeling file."
        )
    if config is None:
        config = model_class.config_class()
    replaced = _replaced_classes(patcher, modeling, described)
    stock = skeleton(model_class, config)
    resolution: Resolution | None = None
    own: dict[str, type[nn.Module]] = {}
    if patcher.fusions:  # otherwise there is nothing to resolve
        resolution = resolve(patcher.replace(class_mapping=replaced, alternatives=()), model_class, config)
        own = _classes_of_others(resolution, stock, modeling, described)
    _check_builders(resolution, replaced, stock, described)
    targets = {cls: name for name, cls in (*replaced.items(), *own.items())}
    dependencies = Dependencies(described, modeling, targets)
    for name, cls in sorted(replaced.items()):
        _replace(described, name, cls, dependencies, "")
    for name, cls in sorted(own.items()):
        _replace(described, name, cls, dependencies, "fused")
    if resolution is not None:
        _write_fused(resolution, patcher, stock, modeling, described)
    if not described.patches:
        raise described.error(f"{patcher!r} changes no class of {modeling.__name__}.")
    transforms = resolution.fusion_plan.transforms if resolution is not None else ()
    converted = (*transforms, *patcher.extra_weight_conversions)
    declared = (*patcher.filtered_weight_conversion_patterns, *patcher.new_weights, *patcher.dropped_weights)
    # Stock conversions transformers gives to its own classes only, and so not to those of a file.
    if converted or declared or stock_conversions(stock, legacy=False):
        kept = patcher.replace(class_mapping={}, alternatives=(), fusions=(), extra_weight_conversions=converted)
        add_conversions(described, kept)


def _check_builders(
    resolution: Resolution | None,
    replaced: dict[str, type[nn.Module]],
    stock: PreTrainedModel,
    described: PatchRegistration,
) -> None:
    """Nothing that changes may stand in a part that the file leaves to an Auto class: that builds the original."""
    modules = dict(stock.named_modules(remove_duplicate=False))
    changed = {path for path, module in modules.items() if type(module).__name__ in replaced}
    changed.update(resolution.fused if resolution is not None else ())
    for path in sorted(changed):
        if part := built_by_config(modules, path):
            name = type(modules[part]).__name__
            raise described.error(
                f"{path} changes, and {part} around it is built by from_config() of an Auto class, "
                f"which gives the {name} of transformers, not that of the file. Call from_patcher() with {name}, or "
                "load with the patcher itself."
            )


def _replaced_classes(
    patcher: Patcher, modeling: ModuleType, described: PatchRegistration
) -> dict[str, type[nn.Module]]:
    """Class of the module -> replacement, for every class key of the patcher."""
    own = module_classes(modeling)
    found: dict[str, type[nn.Module]] = {}
    hit: set[str] = set()
    for name in own:
        key = find_key(name, patcher.class_mapping)
        if key is not None:
            found[name] = patcher.class_mapping[key]
            hit.update(hits(name, patcher.class_mapping))
    for group in patcher.alternatives:
        if hit.intersection(group):
            hit.update(group)
    for key in patcher.class_mapping:
        if key not in hit:
            near = nearest(key, own)
            hint = f"Nearest: {', '.join(near)}. " if near else ""
            raise described.error(
                f"no class of {modeling.__name__} matches the class key {key!r}. "
                f"{hint}A generated file holds the classes of one "
                "module: for a class of another one call from_patcher() with a model of that module."
            )
    return found


#: What is written by itself: fused classes of the families, and the convolutions that one of them takes.
_WRITTEN = (JoinedProjections, ListedExperts, LinearPatchEmbedding)


def _write_fused(
    resolution: Resolution,
    patcher: Patcher,
    stock: PreTrainedModel,
    modeling: ModuleType,
    described: PatchRegistration,
) -> None:
    """The code of what the families of this package fuse."""
    if not resolution.fused:
        refused = "; ".join(sorted(set(resolution.refused.values()))[:3])
        raise described.error(
            f"the fusions {list(patcher.fusions)!r} find nothing to fuse in "
            f"{type(stock).__name__}{': ' + refused if refused else ''}."
        )
    owners = Owners(described, stock, module_classes(modeling))
    by_class: dict[type[nn.Module], dict[str, type[nn.Module]]] = {}
    for path, cls in resolution.fused.items():
        if issubclass(cls, LinearPatchEmbedding):
            owner, part = owners.part(path, resolution.fused, resolution.refused)
            described.add_import(RUNTIME, names=[cls.__name__])
            name = part.removeprefix("self.")
            owners.add(owner, f"{part} = {cls.__name__}.of({part})", f"{name} is a matrix product")
        elif issubclass(cls, _WRITTEN):
            by_class.setdefault(resolution.original_classes[path], {})[path] = cls
    for original, fused in sorted(by_class.items(), key=lambda item: item[0].__name__):
        _check_home(next(iter(fused)), original, modeling, described)
        write = list_experts if issubclass(next(iter(fused.values())), ListedExperts) else join_projections
        write(owners, original, fused, resolution.refused)
    owners.write()


def _check_home(path: str, original: type[nn.Module], modeling: ModuleType, described: PatchRegistration) -> None:
    if module_classes(modeling).get(original.__name__) is not original:
        raise described.error(
            f"a fusion takes {path}, a {original.__name__} of {original.__module__}, which is "
            f"not defined in {modeling.__name__}. Call from_patcher() with a model of that module."
        )


def _classes_of_others(
    resolution: Resolution,
    stock: PreTrainedModel,
    modeling: ModuleType,
    described: PatchRegistration,
) -> dict[str, type[nn.Module]]:
    """Class of the module -> the class of a fusion that isn't ours: it takes its place, so that of all its objects."""
    found: dict[str, type[nn.Module]] = {}
    for path, cls in resolution.fused.items():
        if issubclass(cls, _WRITTEN):
            continue
        original = resolution.original_classes[path]
        _check_home(path, original, modeling, described)
        if found.setdefault(original.__name__, cls) is not cls:
            raise described.error(
                f"{original.__name__} is fused in more than one way in {type(stock).__name__}, "
                "and a file has one way for a class. Load with the patcher itself."
            )
    for path, module in stock.named_modules():
        if found.get(type(module).__name__) is not None and path not in resolution.fused:
            reason = resolution.refused.get(path, "")
            raise described.error(
                f"{path} is not fused{f' ({reason})' if reason else ''}, and others of its class, "
                f"{type(module).__name__}, are: a file has one forward for a class. Load with the patcher itself."
            )
    return found


def _replace(
    described: PatchRegistration, name: str, cls: type[nn.Module], dependencies: Dependencies, description: str
) -> None:
    if MADE in cls.__module__:
        raise described.error(
            f"the replacement of {name} was made by to_patcher() of a config. Use that config: "
            "generate(), write(), or include() in another one."
        )
    home = cls.__module__.split(".")[0]
    if home in ("torch", "transformers") and "<locals>" not in cls.__qualname__:
        described.patches.append(create_patch_from_external(name, cls.__module__, cls.__qualname__, description))
        return
    asked = f"from_patcher(), for {cls.__qualname__},"
    described.replace_class(name, cls, description, dependencies.bring(cls, asked))
