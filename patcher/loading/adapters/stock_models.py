"""An adapter with the names of joined layers, as others may have saved it, on a model that has none of them.

What `peft` saves of a fused model through the hook has the names of transformers. A file that was written in another
way, tensor by tensor, may have those of the model in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.adapters import PREFIX, inner_modules, is_lora, is_targeted, rank_and_alpha
from patcher.errors import InvalidPatcherError
from patcher.fusions.gate_up import GateUp
from patcher.fusions.qkv import QKV
from patcher.loading.adapters.configs import for_stock_layers
from patcher.loading.adapters.layers import Layers, layers_by
from patcher.loading.adapters.lora import NAMES, A, separate
from patcher.loading.adapters.planning import split_key
from patcher.patterns import compress
from patcher.resolution.resolution import resolve
from patcher.spec.patcher import Patcher

#: What joined layers are called.
_NAMES = frozenset(f"{prefix}{family.joined_name}" for family in (QKV, GateUp) for prefix in ("", "fused_"))


def names_joined_layers(model: nn.Module, config: Any) -> bool:
    """Whether the config of an adapter may be for joined layers, of which a model has none."""
    targets = getattr(config, "target_modules", None)
    listed = targets if isinstance(targets, set | list | tuple) else ()
    names = {target.rpartition(".")[2] for target in listed} & _NAMES
    if not names or not is_lora(config) or not isinstance(model, PreTrainedModel):
        return False
    return names.isdisjoint(path.rpartition(".")[2] for path, _ in inner_modules(model))


def config_for_stock_model(model: Any, config: Any) -> Any:
    """The config of an adapter of joined layers, for a model that has the layers of transformers."""
    layers = _joined_layers(model)
    adapted: dict[str, tuple[int, float]] = {}
    for path, joined in layers.joined.items():
        if is_targeted(config, path):
            adapted |= dict.fromkeys((part.path for part in joined.parts), rank_and_alpha(config, path))
    adapted |= {name: rank_and_alpha(config, name) for name in layers.here if is_targeted(config, name)}
    return for_stock_layers(config, layers, adapted, {})


def weights_for_stock_model(model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, those of joined layers as those of the layers that transformers has.

    Raises:
        InvalidPatcherError: it isn't known what layers the joined ones are made of.
    """
    result = {key.removeprefix(PREFIX): value for key, value in weights.items()}
    owners = {path for key in result if (path := split_key(key)[0]).rpartition(".")[2] in _NAMES}
    if not owners or not isinstance(model, PreTrainedModel) or owners & {path for path, _ in inner_modules(model)}:
        return dict(weights)
    layers = _joined_layers(model)
    if unknown := owners - set(layers.joined):
        raise InvalidPatcherError(
            f"The adapter is for {', '.join(compress(sorted(unknown)))}, which {type(model).__name__} doesn't have, "
            "and of what layers of it these are made isn't known: load the model with the patcher of the adapter."
        )
    for path in sorted(owners):
        joined = layers.joined[path]
        own = {kind: result.pop(key) for kind in NAMES if (key := f"{path}.{kind}") in result}
        for number, (_, _, tensors) in separate(joined, None, own, own[A].shape[0], 1.0).items():
            result |= {f"{joined.parts[number].path}.{kind}": value for kind, value in tensors.items()}
    return {f"{PREFIX}{key}": value for key, value in result.items()}


def _joined_layers(model: PreTrainedModel) -> Layers:
    layouts = resolve(Patcher(fusions=["qkv", "gate_up"]), type(model), model.config).fusion_plan.layouts
    return layers_by(layouts, tuple(path for path, _ in inner_modules(model)))
