"""Replacements that the tests put in place of Llama's classes: some are subclasses, some only look alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from patcher import Patcher
from tests.tiny import tiny_inputs


class OwnMLP(nn.Module):
    """Computes what `LlamaMLP` does, and is none."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class OtherMLP(OwnMLP):
    pass


class ThirdMLP(OwnMLP):
    pass


class OwnNorm(LlamaRMSNorm):
    pass


class OtherNorm(LlamaRMSNorm):
    pass


class OwnLayer(LlamaDecoderLayer):
    pass


OWN = Patcher({"LlamaMLP": OwnMLP})


def classes(model: nn.Module) -> dict[str, int]:
    """The names of the MLP and norm classes in a model, and how many objects there are of each."""
    found: dict[str, int] = {}
    for module in model.modules():
        name = type(module).__name__
        if name.endswith(("MLP", "Norm")):
            found[name] = found.get(name, 0) + 1
    return found


@torch.no_grad()
def same_output(model: Any, stock: Any) -> bool:
    """Whether two models compute the same."""
    inputs = tiny_inputs(stock.config)
    return torch.allclose(model.eval()(**inputs)[0], stock.eval()(**inputs)[0], atol=1e-5)
