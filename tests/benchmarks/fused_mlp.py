"""A patcher that joins two projections, for the benchmarks."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Concatenate, LlamaConfig, WeightConverter

from patcher import Patcher


class FusedMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


PATCHER = Patcher(
    {"LlamaMLP": FusedMLP},
    extra_weight_conversions=WeightConverter(
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], operations=[Concatenate(dim=0)]
    ),
)
