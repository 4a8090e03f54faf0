"""Adapters that may not be trained: what is joined of several would become another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.patterns import compress


@dataclass(frozen=True)
class TrainingRefused:
    """A hook on a matrix of an adapter: while it is used, it has the matrix refuse a gradient.

    A hook of a module is copied and pickled with it, one of a tensor is not.
    """

    path: str
    parts: tuple[str, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        weight: Any = module.weight
        if torch.is_grad_enabled() and weight.requires_grad and self not in (weight._backward_hooks or {}).values():
            weight.register_hook(self.refuse)

    def refuse(self, gradient: torch.Tensor) -> None:
        raise InvalidPatcherError(
            f"The adapter of {self.path} is made of those of {', '.join(compress(self.parts))}, and is being trained: "
            "that would fill the zeros between them, and train another adapter. Load the model without the fusion of "
            "this layer to go on with it."
        )


def refuse_training(layer: Any, name: str, path: str, parts: Sequence[str]) -> None:
    """Have an adapter of a layer raise where it is trained, now or later."""
    for matrices in (layer.lora_A, layer.lora_B):
        matrices[name].register_forward_pre_hook(TrainingRefused(path, tuple(parts)))
