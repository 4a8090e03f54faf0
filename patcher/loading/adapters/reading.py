"""An adapter of the layers of transformers, read onto the layers of a fused model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from patcher.compat.adapters import PREFIX, base_model, base_weight, inner_modules, is_tuner_layer, lora_layer
from patcher.errors import PatchedWeightsError
from patcher.loading.adapters.experts import onto_experts, ranks_of_stacks
from patcher.loading.adapters.layers import JoinedLayer, Layers, layers_of
from patcher.loading.adapters.lora import A, JoinedAdapter, have_one_input, join
from patcher.loading.adapters.planning import AdapterPlan, by_part, split_key
from patcher.loading.adapters.training import refuse_training

#: On a layer with adapters: name -> how its adapter of that name was made of those of several layers.
JOINED = "_patcher_adapters"


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
    found = by_part(layers, result)
    for path, joined in layers.joined.items():
        layer = lora_layer(base.get_submodule(path), name)
        own = {number: found[part.path] for number, part in enumerate(joined.parts) if part.path in found}
        if layer is None or not own or not layers.is_joined(joined):
            continue
        adapter = joined_adapter(layer, name) or _trained_here(joined, own, layer, name)
        adapter, made = join(joined, adapter, own, partial(magnitudes, layer, name))
        layer.__dict__[JOINED] = {**layer.__dict__.get(JOINED, {}), name: adapter}
        taken = {joined.parts[number].path for number in own}
        result = {key: value for key, value in result.items() if split_key(key)[0] not in taken}
        result |= {f"{path}.{kind}": value for kind, value in made.items()}
    wrapped = {path for path, module in inner_modules(base) if is_tuner_layer(module)}
    result = _with_joined_biases(base, layers, wrapped, result)
    return {f"{prefix}{key}": value for key, value in result.items()}


def joined_tensors(model: nn.Module, plan: AdapterPlan) -> tuple[AdapterPlan, dict[str, torch.Tensor]]:
    """The tensors of an adapter that is yet to be put onto a model, by the names of the layers there.

    Raises:
        PatchedWeightsError: they don't fit.
    """
    found = by_part(plan.layers, plan.weights)
    result = {key: value for key, value in plan.weights.items() if split_key(key)[0] not in found}
    adapters = {}
    for path, adapter in plan.adapters.items():
        joined = plan.layers.joined[path]
        own = {number: found[part.path] for number, part in enumerate(joined.parts) if part.path in found}
        layer = model.get_submodule(path)
        adapters[path], made = join(joined, adapter, own, partial(_norms_of, layer))
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


def _norms_of(layer: nn.Module) -> torch.Tensor:
    return _row_norms(base_weight(layer))


def _row_norms(weight: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.norm(weight.detach(), dim=1)
    return norms.to(weight.dtype)


def _trained_here(joined: JoinedLayer, own: Mapping[int, Mapping[str, torch.Tensor]], layer: Any, name: str) -> Any:
    """How an adapter that was made for a joined layer is made of parts: they have one `A`."""
    rank, alpha = layer.r[name], layer.lora_alpha[name]
    listed = [own[number] for number in sorted(own)]
    if len(own) < len(joined.parts) or not have_one_input(listed) or listed[0][A].shape[0] != rank:
        raise PatchedWeightsError(
            f"{joined.path} has an adapter {name!r} of rank {rank} of its own, and what is loaded into it has "
            f"{', '.join(f'{joined.parts[n].path}: {tuple(t[A].shape)}' for n, t in own.items())}, which is no "
            "adapter that was trained on it. Load it under another name, with load_adapter()."
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
            found: Any = model.get_submodule(owner)
            value = (found.get_base_layer() if is_tuner_layer(found) else found).get_parameter(last)
            value, start = value.detach().to("cpu", copy=True), 0
            for number in numbers:
                size = joined.parts[number].size
                if number in keys:
                    value[start : start + size] = weights.pop(keys[number])
                start += size
            weights[f"{owner}.base_layer.{last}" if owner in wrapped else key] = value
    return weights
