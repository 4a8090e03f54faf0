"""Fusions at work: while a model is built, what its resolution says is built again as a fused class, or converted."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher.errors import PatchConstructionError
from patcher.fusions.base import fusion_named
from patcher.resolution import resolve_layers
from patcher.scope import ORIGINAL, Match, Scope, cover_new_classes

__all__ = ["convert_modules", "fuse_modules", "prepare_fusions"]


def prepare_fusions(scope: Scope, model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Resolve the fusions of a model whose construction begins, and have the arguments of its modules kept."""
    scope.resolution = None
    layers = list(scope.layers)
    if not any(layer.patcher.fusions for layer in layers):
        return
    scope.resolution = resolve_layers(layers, model_class, config)
    scope.recorded = frozenset(
        cls for path, cls in scope.resolution.originals.items() if path not in scope.resolution.converted
    )
    cover_new_classes()


def fuse_modules(scope: Scope, model: PreTrainedModel) -> None:
    """Put the fused modules in place of those that were built, before the model looks at its parts."""
    if scope.resolution is None:
        return
    fused: dict[int, nn.Module] = {}
    # The outer ones first: building those builds what is inside of them once more.
    for path, cls in sorted(scope.resolution.fused.items(), key=lambda item: item[0].count(".")):
        if path in scope.resolution.converted:
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        module = parent._modules.get(name)
        if module is None or id(module) not in scope.arguments:
            found = "nothing" if module is None else type(module).__name__
            raise PatchConstructionError(
                f"{path} was to be fused as {cls.__qualname__}, but the model has {found} there: it is built "
                "otherwise than its skeleton on the meta device. Leave it out of the fusion's target_modules_patterns."
            )
        new = fused.get(id(module))
        if new is None:
            _, args, kwargs = scope.arguments[id(module)]
            original = type(module)
            new = original.__new__(original)
            key, layer = scope.fusion_of(path)
            scope.build(new, original, Match(key, cls, layer), args, kwargs)
            new.train(module.training)
            fused[id(module)] = new
        parent._modules[name] = new


def convert_modules(scope: Scope, model: PreTrainedModel) -> None:
    """Convert the modules that stand and have their initial values, where a fusion can do that."""
    if scope.resolution is None:
        return
    for path in scope.resolution.converted:
        module = model.get_submodule(path)
        original, cls = scope.resolution.originals[path], scope.resolution.fused[path]
        if type(module) is not original:
            raise PatchConstructionError(
                f"{path} was to be fused as {cls.__qualname__}, but the model has a {type(module).__qualname__} "
                f"there, not a {original.__qualname__}: it is built otherwise than its skeleton on the meta device."
            )
        key, layer = scope.fusion_of(path)
        converted = fusion_named(key).convert(module, cls)
        assert converted is not None
        converted.__dict__[ORIGINAL] = original
        if converted is not module:
            parent_path, _, name = path.rpartition(".")
            model.get_submodule(parent_path)._modules[name] = converted
        for other in scope.layers[scope.layers.index(layer) :]:
            if key in other.patcher.fusions:
                other.matched.add(key)
