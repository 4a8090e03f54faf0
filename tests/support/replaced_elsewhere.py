"""Replacements as users write them: in a module of their own, with helpers, constants and imports of that module."""

from __future__ import annotations

import math as mathematics

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers.core_model_loading import ConversionOps
from transformers.models.llama.modeling_llama import LlamaMLP as Base

SCALE = 0.5


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A helper that uses another one and a constant."""
    return halved(x) * (1 / SCALE) ** 2


def halved(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class InheritingMLP(Base):
    """Builds on what it replaces, which it knows by another name."""

    def forward(self, x):
        return doubled(super().forward(x)) * mathematics.exp(0.0)


def sum(x: torch.Tensor) -> torch.Tensor:  # noqa: A001
    """A helper with the name of a builtin."""
    return x + x.sum(-1, keepdim=True)


class SummingMLP(Base):
    def forward(self, x):
        return sum(super().forward(x))


class JoinedMLP(nn.Module):
    """gate and up as one, as a user would write it."""

    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        # the gate comes first
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class AdaptedMLP(Base):
    """Has weights that no checkpoint has."""

    def __init__(self, config):
        super().__init__(config)
        self.adapter = nn.Parameter(torch.full((config.hidden_size,), 0.25))

    def forward(self, x):
        return super().forward(x) + self.adapter


class Negate(ConversionOps):
    """An operation of the user's own: the weights with the other sign."""

    def __init__(self, times: int = 1):
        self.times = times

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: tensor * (-1) ** self.times}

    @property
    def reverse_op(self):
        return Negate(self.times)


class NegatedMLP(Base):
    def __init__(self, config):
        super().__init__(config)
        self.negated = self.down_proj
        del self.down_proj

    def forward(self, x):
        return -self.negated(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
