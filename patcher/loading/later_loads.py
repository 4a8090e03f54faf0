"""What others load into a model after it was patched: adapters, by names of today or of old checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import copy_transform, stock_conversions
from patcher.compat.models import named_parameters
from patcher.layouts.carried import carriers
from patcher.loading.record import record_of
from patcher.loading.state_dicts import patched_models
from patcher.patterns import inside, is_number, without_numbers


def without_stacking(model: nn.Module, conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """Conversions of transformers but for those that stack layers which the patched model has one by one."""
    conversions = list(conversions)
    if record_of(model) is None:
        return conversions
    alike = {without_numbers(name): name for name in _parameters(model)}
    return [each for each in conversions if not any(_stacks(each, name) for name in alike.values())]


def listed_layers(model: nn.Module) -> set[str]:
    """The layers of a patched model that stock has as stacks in one parameter: those of experts."""
    names = {
        f"{inside(path)}{name}"
        for path, _, carried in carriers(model)
        for layout in carried.all
        if not any("." in name for name in layout.stock)
        for name in layout.fused
        if "." in name
    }
    for path, part, _ in patched_models(model):
        conversions = stock_conversions(part)
        alike: dict[str, list[str]] = {}
        for name in _parameters(part):
            alike.setdefault(without_numbers(name), []).append(name)
        for found in alike.values():
            if any(_stacks(each, found[0]) for each in conversions):
                names.update(f"{inside(path)}{name}" for name in found)
    layers = (name.rpartition(".")[0] for name in names)
    return {layer for layer in layers if is_number(layer.rpartition(".")[0].rpartition(".")[2])}


def _parameters(model: nn.Module) -> set[str]:
    """The parameters of a model by their names before anything was put around their layers."""
    return {name.replace(".base_layer.", ".") for name, _ in named_parameters(model)}


def _stacks(transform: WeightTransform, name: str) -> bool:
    """Whether a conversion takes a parameter of that name; it notes that it was used, so a copy is asked."""
    return isinstance(transform, WeightConverter) and copy_transform(transform).rename_source_key(name)[1] is not None
