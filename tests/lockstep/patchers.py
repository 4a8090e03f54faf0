"""The patchers of trials: fixed ones by name, and those for layers of any model, from the seed in their name."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Chunk, Transpose, WeightConverter, WeightTransform

from patcher import Patcher
from tests.support.replacements import JOINED, OwnLayer, OwnMLP, OwnNorm

FUSIONS: dict[str, Patcher] = {
    name: Patcher(fusions=name.split(", "), strict=False)
    for name in (
        "qkv, gate_up",
        "kv",
        "siblings",
        "qkv, sequential_experts",
        "qkv, gate_up, patch_embeddings, sequential_experts",
        "siblings, patch_embeddings, sequential_experts",
    )
}
#: of Llama
CLASSES: dict[str, Patcher] = {
    "classes": Patcher({"LlamaMLP": OwnMLP, "LlamaRMSNorm": OwnNorm}, strict=False),
    "a layer, fused": Patcher({"LlamaDecoderLayer": OwnLayer}, fusions=["qkv", "gate_up"], strict=False),
    "a conversion": JOINED,
    "a conversion, fused": JOINED | Patcher(fusions=["qkv"]),
}
OF_LAYERS = "other linear layers"
#: What models read besides the outputs of these layers, or tie.
NOT_REPLACED = ("lm_head", "decoder", "score", "classifier", "dt_proj")


class Derived(nn.Linear):
    """The same, of another class."""


class Turned(nn.Module):
    """A linear layer that holds its weight transposed."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(in_features, out_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight if self.bias is None else states @ self.weight + self.bias


class Halves(nn.Module):
    """A linear layer whose rows are those of two."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, out_features // 2, bias)
        self.second = nn.Linear(in_features, out_features // 2, bias)

    @property
    def weight(self) -> torch.Tensor:
        """Its dtype is what models read."""
        return self.first.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.first(states), self.second(states)), -1)


def patcher_named(name: str, model: Any) -> Patcher:
    """Return a patcher by its name: for the layers of a stock model, if it isn't one of the fixed.

    That one is strict, as weights that don't fit would be random.
    """
    if not name.startswith(OF_LAYERS):
        return (FUSIONS | CLASSES)[name]
    choice = Random(int(name.rpartition(" ")[2]))
    layers = dict(_replaceable(model))
    chosen = choice.sample(sorted(layers), min(len(layers), choice.randint(1, 3)))
    kinds = {name: choice.choice(_kinds(layers[name])) for name in chosen}
    conversions = [conversion for name, kind in kinds.items() for conversion in _conversions(name, kind)]
    fusions = choice.choice([[], [], ["siblings"], ["qkv"], ["sequential_experts"]])
    mapping = {f"**.{name}": kind for name, kind in kinds.items()}
    return Patcher(module_mapping=mapping, extra_weight_conversions=conversions, fusions=fusions)


def _kinds(layers: list[Any]) -> list[type[nn.Module]]:
    """Return what can take the place of layers: state dicts of square ones are ambiguous."""
    is_square = any(layer.in_features == layer.out_features for layer in layers)
    return [Derived, Halves] if is_square else [Derived, Halves, Turned]


def _replaceable(model: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the linear layers of names that no other ends with, as patterns of conversions may be found in it."""
    layers: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        layers.setdefault(path.rpartition(".")[2], []).append(module)
    for name, modules in layers.items():
        is_alone = not any(other.endswith(name) for other in layers if other != name)
        is_linear = all(type(module) is nn.Linear and module.out_features % 2 == 0 for module in modules)
        if is_alone and is_linear and len(name) > 1 and name not in NOT_REPLACED:
            yield name, modules


def _conversions(name: str, kind: type[nn.Module]) -> Iterator[WeightTransform]:
    if kind is Turned:
        yield WeightConverter([f"{name}.weight"], [f"{name}.weight"], [Transpose(0, 1)])
    if kind is Halves:
        for key in ("weight", "bias"):
            yield WeightConverter([f"{name}.{key}"], [f"{name}.first.{key}", f"{name}.second.{key}"], [Chunk(0)])
