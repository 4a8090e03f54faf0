"""How an adapter of the layers of transformers is put onto the layers of a fused model."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.adapters import PREFIX, is_all_linear, is_targeted, linear_names, rank_and_alpha
from patcher.errors import InvalidPatcherError, PatchedWeightsError, warn
from patcher.loading.adapters.configs import for_layers_here
from patcher.loading.adapters.experts import asked_parameters, check_new, onto_experts
from patcher.loading.adapters.layers import Layers, layers_of
from patcher.loading.adapters.lora import MAGNITUDE, NAMES, JoinedAdapter, have_one_input
from patcher.loading.adapters.refusals import check_biases, check_kind, check_saved_modules, check_training, new_text
from patcher.loading.record import record_of
from patcher.patterns import compress
from patcher.resolution.resolution import skeleton


@dataclass(frozen=True, eq=False)
class AdapterPlan:
    """How an adapter of the layers of transformers is put onto a fused model.

    Attributes:
        config: that of the adapter here.
        adapters: layer -> its adapter, of those that are made of several.
        weights: its tensors, with those of single experts in the place of those of stacks.
    """

    layers: Layers
    config: Any
    adapters: Mapping[str, JoinedAdapter]
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ReadAdapter:
    """An adapter that is being loaded: its tensors, by their names in the model of transformers."""

    model: nn.Module
    weights: Mapping[str, torch.Tensor]
    is_trained: bool


#: The adapter that this thread is loading.
READING: ContextVar[ReadAdapter | None] = ContextVar("patcher_adapter", default=None)


@contextmanager
def reading(adapter: ReadAdapter) -> Iterator[None]:
    token = READING.set(adapter)
    try:
        yield
    finally:
        READING.reset(token)


def plan_adapter(model: nn.Module, config: Any, read: ReadAdapter | None) -> AdapterPlan | None:
    """How an adapter is put onto a model; None if it names no layer that only transformers has.

    Args:
        config: that of the adapter. It is not changed.
        read: what is being loaded, None if the adapter is a new one.

    Raises:
        InvalidPatcherError: the adapter can't be what it is on the layers of transformers.
        PatchedWeightsError: a tensor of it has no place.
    """
    layers = layers_of(model)
    if not layers:
        return None
    check_saved_modules(config, layers)
    if not hasattr(config, "target_modules"):
        return None
    if read is None:
        targeted = linear_names(config, model) if is_all_linear(config) else _targeted(config, layers.here)
        check_new(config, layers.stacks, targeted)
        if not config.inference_mode:
            check_biases(config, layers, targeted)
    if is_all_linear(config):
        if read is None:
            return None  # whatever is linear here
        config = copy.copy(config)
        config.target_modules = _all_linear_in_transformers(model, config)
    asked = _targeted(config, (name for name, (layer, _) in layers.parts.items() if layers.is_joined(layer)))
    lost = _targeted(config, (name for name in layers.others if name in layers.gone))
    if not asked and not lost and not (layers.stacks and read is not None):
        return None
    if asked or lost:
        check_kind(config, layers, asked, lost)
    if read is None and not config.inference_mode:
        raise InvalidPatcherError(new_text(config, layers, asked))
    weights, adapted, shared = _of_experts(model, config, layers, read)
    found = by_part(layers, weights)
    settings: dict[str, dict[int, tuple[int, float]]] = {}
    for name in asked:
        layer, number = layers.parts[name]
        if read is None or name in found:
            settings.setdefault(layer.path, {})[number] = rank_and_alpha(config, name)
    adapters = {}
    for path, own in settings.items():
        parts = layers.joined[path].parts
        tensors = [found[part.path] for part in parts if part.path in found]
        one_input = len(tensors) == len(parts) and have_one_input(tensors)
        adapters[path] = JoinedAdapter.of(layers.joined[path], own, bool(config.use_rslora), one_input)
    others = (name for name in layers.here if not layers.is_made_of_others(name))
    adapted |= {name: rank_and_alpha(config, name) for name in _targeted(config, others)}
    if read is not None:
        if read.is_trained:
            check_training(layers, adapters, shared)
        if not getattr(config, "target_parameters", None) or layers.stacks:
            _check_places(model, {*adapted, *asked, *_around(config, layers)}, weights)
    adapted |= {path: (adapter.rank, adapter.alpha) for path, adapter in adapters.items()}
    return AdapterPlan(layers, for_layers_here(config, layers, adapted), adapters, weights)


def _targeted(config: Any, names: Iterable[str]) -> list[str]:
    return [name for name in names if is_targeted(config, name)]


def _of_experts(
    model: nn.Module, config: Any, layers: Layers, read: ReadAdapter | None
) -> tuple[Mapping[str, torch.Tensor], dict[str, tuple[int, float]], list[str]]:
    """The tensors of an adapter with those of single experts, the ranks of these, and the stacks of one `A`."""
    if read is None:
        return {}, {}, []
    asked = {stack: rank_and_alpha(config, stack.parameter) for stack in asked_parameters(config, layers.stacks)}
    weights, adapted, shared = onto_experts(asked, read.weights, bool(getattr(config, "use_rslora", False)))
    own = {path for key in weights if (path := split_key(key)[0]) in layers.of_experts and path not in adapted}
    return weights, adapted | {path: rank_and_alpha(config, path) for path in _targeted(config, sorted(own))}, shared


def _around(config: Any, layers: Layers) -> Iterator[str]:
    """The paths under which peft has the adapters of parameters."""
    for target in getattr(config, "target_parameters", None) or ():
        for name in layers.here:
            owner, _, _ = target.rpartition(".")
            if not owner or f".{name}".endswith(f".{owner}"):
                yield from (name, f"{name}.base_layer", f"{name}.base_layer.base_layer")


def _all_linear_in_transformers(model: nn.Module, config: Any) -> set[str]:
    record = record_of(model)
    if record is None or not isinstance(model, PreTrainedModel):
        return linear_names(config, model)
    return linear_names(config, skeleton(record.model_class, model.config))


def _check_places(model: nn.Module, adapted: Collection[str], weights: Mapping[str, torch.Tensor]) -> None:
    check_unexpected(model, [key for key in weights if (place := split_key(key))[1] and place[0] not in adapted])


def is_strict(model: nn.Module) -> bool:
    record = record_of(model)
    return record is None or any(patcher.strict for patcher in record.patchers)


def check_unexpected(model: nn.Module, unexpected: list[str]) -> None:
    """Say which tensors of an adapter have found no place.

    Raises:
        PatchedWeightsError: the model was patched strictly.
    """
    if unexpected:
        text = f"The adapter has tensors for which {type(model).__name__} has no place:\n" + "\n".join(
            f"  {key}" for key in compress(key.removeprefix(PREFIX) for key in sorted(unexpected))
        )
        if is_strict(model):
            raise PatchedWeightsError(text)
        warn(text)


def by_part(layers: Layers, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Layer of transformers -> name -> tensor, of those that are parts of others here."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in weights.items():
        path, kind = split_key(key)
        if path in layers.parts and kind in NAMES:
            found.setdefault(path, {})[kind] = value
    return found


def split_key(key: str) -> tuple[str, str]:
    """The path of a layer, and the name of one of its tensors in a file."""
    path, dot, kind = key.removeprefix(PREFIX).partition(".lora_")
    kind = f"lora_{kind}" if dot else ""
    return path, kind.removesuffix(".weight") if kind.startswith(MAGNITUDE) else kind
