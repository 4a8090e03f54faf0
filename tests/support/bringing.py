"""Replacements that bring their conversions, and experts in other layouts than those of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Concatenate, LlamaConfig, WeightConverter
from transformers.core_model_loading import MergeModulelist, WeightRenaming

from tests.support.replacements import JoinedMLP


class BringingMLP(JoinedMLP):
    """Gate and up projection in one, and what makes it of two."""

    conversion_mapping: ClassVar[Any] = [
        WeightConverter(["gate_proj.weight", "up_proj.weight"], ["gate_up_proj.weight"], operations=[Concatenate(0)])
    ]


class TurnedMLP(nn.Module):
    """The same tensors in another order, and the last one under another name."""

    conversion_mapping: ClassVar[Any] = [
        WeightConverter(["up_proj.weight", "gate_proj.weight"], ["up_gate.weight"], operations=[Concatenate(0)]),
        WeightRenaming("^down_proj", "out"),
    ]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.up_gate = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.out = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.up_gate(x).chunk(2, dim=-1)
        return self.out(nn.functional.silu(gate) * up)


class _Experts(nn.Module):
    """Visits the experts of Mixtral one by one."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number in range(self.count):
            token, rank = torch.where(indices == number)
            result.index_add_(0, token, self.expert(number, x[token]) * weights[token, rank, None])
        return result


class ExpertLinears(_Experts):
    """Each expert as three Linear layers, under names of its own."""

    conversion_mapping: ClassVar[Any] = [
        WeightRenaming(r"^(\d+)\.w1", r"gate.\1"),
        WeightRenaming(r"^(\d+)\.w2", r"down.\1"),
        WeightRenaming(r"^(\d+)\.w3", r"up.\1"),
    ]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count, wide, narrow = config.num_local_experts, config.intermediate_size, config.hidden_size
        self.gate = nn.ModuleList(nn.Linear(narrow, wide, bias=False) for _ in range(self.count))
        self.up = nn.ModuleList(nn.Linear(narrow, wide, bias=False) for _ in range(self.count))
        self.down = nn.ModuleList(nn.Linear(wide, narrow, bias=False) for _ in range(self.count))

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return self.down[number](nn.functional.silu(self.gate[number](x)) * self.up[number](x))


class ExpertStack(_Experts):
    """As transformers stacks them, under other names."""

    conversion_mapping: ClassVar[Any] = [
        WeightConverter(
            ["*.w1.weight", "*.w3.weight"], ["gate_up"], operations=[MergeModulelist(dim=0), Concatenate(dim=1)]
        ),
        WeightConverter(["*.w2.weight"], ["down"], operations=[MergeModulelist(dim=0)]),
    ]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count, wide, narrow = config.num_local_experts, config.intermediate_size, config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(self.count, 2 * wide, narrow))
        self.down = nn.Parameter(torch.empty(self.count, narrow, wide))

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = nn.functional.linear(x, self.gate_up[number]).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down[number])
