"""An adapter of the layers of transformers, read onto the layers of a fused model."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.adapters import (
    PREFIX,
    base_model,
    base_weight,
    inner_modules,
    is_all_linear,
    is_lora,
    is_targeted,
    is_tuner_layer,
    kind_of,
    linear_names,
    lora_layer,
    rank_and_alpha,
    unusual_setting,
)
from patcher.errors import InvalidPatcherError, PatchedWeightsError, warn
from patcher.loading.adapters.configs import for_layers_here
from patcher.loading.adapters.experts import asked_parameters, check_new, onto_experts, ranks_of_stacks
from patcher.loading.adapters.layers import JoinedLayer, Layers, layers_of
from patcher.loading.adapters.lora import MAGNITUDE, NAMES, A, JoinedAdapter, have_one_input, join
from patcher.loading.adapters.training import refuse_training
from patcher.loading.record import record_of
from patcher.patterns import compress
from patcher.resolution.resolution import skeleton

#: On a layer with adapters: name -> how its adapter of that name was made of those of several layers.
JOINED = "_patcher_adapters"

_UNFUSED = "load the model without the fusion"


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
    _check_saved_modules(config, layers)
    if not hasattr(config, "target_modules"):
        return None
    if read is None and layers.stacks:
        targeted = linear_names(config, model) if is_all_linear(config) else _targeted(config, layers.here)
        check_new(config, layers.stacks, targeted)
    if is_all_linear(config):
        if read is None:
            return None  # whatever is linear here
        config = copy.copy(config)
        config.target_modules = _all_linear_in_transformers(model, config)
    asked = _targeted(config, (name for name in layers.parts if name in layers.gone))
    lost = _targeted(config, (name for name in layers.others if name in layers.gone))
    if not asked and not lost and not (layers.stacks and read is not None):
        return None
    if asked or lost:
        _check_kind(config, layers, asked, lost)
    if read is None and not config.inference_mode:
        raise InvalidPatcherError(_new_text(config, layers, asked))
    weights, adapted, shared = _of_experts(model, config, layers, read)
    found = _by_part(layers, weights)
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
    others = [name for name in layers.here if name not in layers.joined and name not in layers.of_experts]
    adapted |= {name: rank_and_alpha(config, name) for name in _targeted(config, others)}
    if read is not None:
        if read.is_trained:
            _check_training(layers, adapters, shared)
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
    own = {path for key in weights if (path := _split(key)[0]) in layers.of_experts and path not in adapted}
    return weights, adapted | {path: rank_and_alpha(config, path) for path in _targeted(config, sorted(own))}, shared


def _around(config: Any, layers: Layers) -> Iterator[str]:
    """The paths under which peft has the adapters of parameters."""
    for target in getattr(config, "target_parameters", None) or ():
        for name in layers.here:
            owner, _, _ = target.rpartition(".")
            if not owner or f".{name}".endswith(f".{owner}"):
                yield from (name, f"{name}.base_layer", f"{name}.base_layer.base_layer")


def put_down(model: nn.Module, name: str, plan: AdapterPlan | None) -> None:
    """Have the layers of a model know how their adapter of that name was made, and refuse to train it if need be."""
    for _, module in inner_modules(model):
        if name in module.__dict__.get(JOINED, ()):  # another one that had this name
            module.__dict__[JOINED] = {key: value for key, value in module.__dict__[JOINED].items() if key != name}
    for path, adapter in plan.adapters.items() if plan is not None else ():
        layer = lora_layer(model.get_submodule(path), name)
        layer.__dict__[JOINED] = {**layer.__dict__.get(JOINED, {}), name: adapter}
        if not adapter.is_trainable:
            assert plan is not None
            parts = [plan.layers.joined[path].parts[part.number].path for part in adapter.parts]
            refuse_training(layer, name, path, parts)


def settle_magnitudes(model: nn.Module, name: str, plan: AdapterPlan) -> None:
    """Have the rows of DoRA that no adapter changes be those of the weight in the type in which peft computes them."""
    for path, adapter in plan.adapters.items():
        joined, layer = plan.layers.joined[path], lora_layer(model.get_submodule(path), name)
        if name in layer.lora_magnitude_vector:
            weight, rows = layer.lora_magnitude_vector[name].weight, magnitudes(layer, name)
            for number in set(range(len(joined.parts))) - {part.number for part in adapter.parts}:
                weight.data[joined.parts[number].rows] = rows[joined.parts[number].rows].to(weight)


def joined_adapter(layer: nn.Module, name: str) -> JoinedAdapter | None:
    """How the adapter of a layer was made, None if it was made for the layer itself."""
    found: JoinedAdapter | None = layer.__dict__.get(JOINED, {}).get(name)
    return found


def onto_layers(
    model: nn.Module, name: str, weights: Mapping[str, torch.Tensor], config: Any = None
) -> dict[str, torch.Tensor]:
    """The tensors of an adapter that stands in a model, from a file of it or of one for the layers of transformers.

    Args:
        weights: by their names in files, with or without the prefix that peft puts there.
        config: that of the adapter.

    Raises:
        PatchedWeightsError: they don't fit.
    """
    base = base_model(model)
    layers = layers_of(base)
    prefix = PREFIX if any(key.startswith(PREFIX) for key in weights) else ""
    result = {key.removeprefix(PREFIX): value for key, value in weights.items()}
    if layers.stacks:
        asked = ranks_of_stacks(base, config, layers.stacks, name)
        result, _, _ = onto_experts(asked, result, bool(getattr(config, "use_rslora", False)))
    found = _by_part(layers, result)
    for path, joined in layers.joined.items():
        layer = lora_layer(base.get_submodule(path), name)
        own = {number: found[part.path] for number, part in enumerate(joined.parts) if part.path in found}
        if layer is None or not own or not layers.is_joined(joined):
            continue
        adapter = joined_adapter(layer, name) or _trained_here(joined, own, layer, name)
        adapter, made = join(joined, adapter, own, lambda at=layer: magnitudes(at, name))
        layer.__dict__[JOINED] = {**layer.__dict__.get(JOINED, {}), name: adapter}
        taken = {joined.parts[number].path for number in own}
        result = {key: value for key, value in result.items() if _split(key)[0] not in taken}
        result |= {f"{path}.{kind}": value for kind, value in made.items()}
    wrapped = {path for path, module in inner_modules(base) if is_tuner_layer(module)}
    result = _with_joined_biases(base, layers, wrapped, result)
    return {f"{prefix}{key}": value for key, value in result.items()}


def joined_tensors(model: nn.Module, plan: AdapterPlan) -> tuple[AdapterPlan, dict[str, torch.Tensor]]:
    """The tensors of an adapter that is yet to be put onto a model, by the names of the layers there.

    Raises:
        PatchedWeightsError: they don't fit.
    """
    found = _by_part(plan.layers, plan.weights)
    result = {key: value for key, value in plan.weights.items() if _split(key)[0] not in found}
    adapters = {}
    for path, adapter in plan.adapters.items():
        joined = plan.layers.joined[path]
        own = {number: found[part.path] for number, part in enumerate(joined.parts) if part.path in found}
        layer = model.get_submodule(path)
        adapters[path], made = join(joined, adapter, own, lambda at=layer: _row_norms(base_weight(at)))
        result |= {f"{path}.{kind}": value for kind, value in made.items()}
    return replace(plan, adapters=adapters), _with_joined_biases(model, plan.layers, adapters, result)


def named_in_model(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Tensors under the names of parameters: with that of the adapter."""
    result = {}
    for key, value in tensors.items():
        path, dot, kind = key.partition(".lora_")
        if not dot:
            result[key] = value
            continue
        matrix, dot, last = kind.partition(".")
        if matrix == "magnitude_vector":
            last = "weight"
        result[f"{path}.lora_{matrix}.{name}{last and f'.{last}'}"] = value
    return result


def magnitudes(layer: Any, name: str) -> torch.Tensor:
    """What DoRA has for each row of a layer whose weight an adapter doesn't change, as peft computes it."""
    return _row_norms(base_weight(layer).to(layer.lora_A[name].weight.dtype))


def _row_norms(weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.norm(weight.detach(), dim=1).to(weight.dtype)


def _by_part(layers: Layers, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Layer of transformers -> name -> tensor, of those that are parts of others here."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in weights.items():
        path, kind = _split(key)
        if path in layers.parts and kind in NAMES:
            found.setdefault(path, {})[kind] = value
    return found


def _split(key: str) -> tuple[str, str]:
    """The path of a layer, and the name of one of its tensors in a file."""
    path, dot, kind = key.removeprefix(PREFIX).partition(".lora_")
    kind = f"lora_{kind}" if dot else ""
    return path, kind.removesuffix(".weight") if kind.startswith(MAGNITUDE) else kind


def _trained_here(joined: JoinedLayer, own: Mapping[int, Mapping[str, torch.Tensor]], layer: Any, name: str) -> Any:
    """How an adapter that was made for a joined layer is made of parts: they have one `A`."""
    rank, alpha = layer.r[name], layer.lora_alpha[name]
    listed = [own[number] for number in sorted(own)]
    if len(own) < len(joined.parts) or not have_one_input(listed) or listed[0][A].shape[0] != rank:
        raise PatchedWeightsError(
            f"{joined.path} has an adapter {name!r} of rank {rank} of its own, and what is loaded into it has "
            f"{', '.join(f'{joined.parts[n].path}: {tuple(t[A].shape)}' for n, t in own.items())}, which is no adapter "
            "that was trained on it. Load it under another name, with load_adapter()."
        )
    return JoinedAdapter.whole(joined, rank, alpha)


def _with_joined_biases(
    model: nn.Module, layers: Layers, wrapped: Collection[str], weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of an adapter with the biases of parts, which `bias=` has had trained, in those of joined layers.

    Args:
        wrapped: the paths of the layers that have, or will have, an adapter around them.
    """
    for joined in layers.joined.values():
        for key, numbers in joined.biases:
            keys = {
                number: full
                for number in numbers
                for kind in ("base_layer.bias", "bias")
                if (full := f"{joined.parts[number].path}.{kind}") in weights and layers.is_joined(joined)
            }
            if not keys:
                continue
            owner, _, last = key.rpartition(".")
            found = model.get_submodule(owner)
            value = (found.get_base_layer() if is_tuner_layer(found) else found).get_parameter(last)
            value, start = value.detach().to("cpu", copy=True), 0
            for number in numbers:
                size = joined.parts[number].size
                if number in keys:
                    value[start : start + size] = weights.pop(keys[number])
                start += size
            weights[f"{owner}.base_layer.{last}" if owner in wrapped else key] = value
    return weights


def _all_linear_in_transformers(model: nn.Module, config: Any) -> set[str]:
    record = record_of(model)
    if record is None or not isinstance(model, PreTrainedModel):
        return linear_names(config, model)
    return linear_names(config, skeleton(record.model_class, model.config))


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


def _check_places(model: nn.Module, adapted: Collection[str], weights: Mapping[str, torch.Tensor]) -> None:
    check_unexpected(model, [key for key in weights if (place := _split(key))[1] and place[0] not in adapted])


def _check_training(layers: Layers, adapters: Mapping[str, JoinedAdapter], shared: list[str]) -> None:
    if shared:
        raise InvalidPatcherError(
            f"The adapter has one input matrix for both layers of each expert in {_listed(shared)}, and the model has "
            f"layers of their own in its place: is_trainable=True would train another adapter. To go on with it {_UNFUSED} "
            "of the experts."
        )
    if refused := [path for path, adapter in adapters.items() if not adapter.is_trainable]:
        parts = [part.path for path in refused for part in layers.joined[path].parts]
        raise InvalidPatcherError(
            f"The adapter has matrices of its own for {_listed(parts)}, which are rows of {_listed(refused)} here. Joined "
            "they compute the same, but training would fill the zeros between them, so is_trainable=True would train "
            f"another adapter. To go on with it {_UNFUSED} of these layers; or train a new adapter, with "
            f"target_modules={_names(refused)}."
        )


def _check_kind(config: Any, layers: Layers, asked: list[str], lost: list[str]) -> None:
    if lost:
        made = "; ".join(dict.fromkeys(layers.others[name] for name in lost[:2]))
        raise InvalidPatcherError(
            f"The adapter is for {_listed(lost)}, and the model has other layers in their place ({made}). What an "
            "adapter of the first is for these isn't known: load the model without the patcher."
        )
    joined = _listed(sorted({layers.parts[name][0].path for name in asked}))
    if not is_lora(config):
        raise InvalidPatcherError(
            f"The adapter is a {kind_of(config)} for {_listed(asked)}, which are rows of {joined} here. Only LoRA and "
            f"DoRA are the same on joined layers: {_UNFUSED} of these layers."
        )
    if setting := unusual_setting(config):
        raise InvalidPatcherError(
            f"The adapter has {setting}, and is for {_listed(asked)}, which are rows of {joined} here. With that setting "
            f"joined layers aren't known to compute the same: {_UNFUSED} of these layers."
        )


def _check_saved_modules(config: Any, layers: Layers) -> None:
    saved = list(getattr(config, "modules_to_save", None) or ())
    inner = [*layers.gone, *layers.joined]
    if found := [name for name in inner if any(re.match(rf"(^|.*\.){module}($|\..*)", name) for module in saved)]:
        raise InvalidPatcherError(
            f"modules_to_save={saved!r} means {_listed(found)}, of which the model has joined layers. A copy of a part of "
            f"one can't be trained: {_UNFUSED} of these layers, or leave them out of modules_to_save."
        )


def _new_text(config: Any, layers: Layers, asked: list[str]) -> str:
    joined = sorted({layers.parts[name][0].path for name in asked})
    others = [name for name in layers.here if name not in layers.joined and is_targeted(config, name)]
    return (
        f"A new adapter is asked for {_listed(asked)}, which are rows of {_listed(joined)} in this model: they have no "
        f"layers of their own to be adapted. Write target_modules={_names([*joined, *others])}; saved, the adapter is one "
        f"of the layers of transformers. Or {_UNFUSED} of these layers."
    )


def _names(paths: list[str]) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in paths})


def _listed(paths: list[str]) -> str:
    found = compress(paths)
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
