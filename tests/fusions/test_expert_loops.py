"""What a forward of experts must look like to be rewritten; everything else is refused, with the line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patcher.fusions.sequential_experts import SequentialExperts

X, CHOSEN, WEIGHTS = torch.randn(5, 8), torch.randint(4, (5, 2)), torch.rand(5, 2)


class Experts(nn.Module):
    """The loop of transformers. Others change a line of it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: Any, chosen: Any, weights: Any) -> Any:
        final = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=self.num_experts + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            if expert == self.num_experts:
                continue
            place, token = torch.where(mask[expert])
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            current = F.linear(gate * up, self.down_proj[expert]) * weights[token, place, None]
            final.index_add_(0, token, current)
        return final


def changed(old: str, new: str, *more: str, **attributes: Any) -> Experts:
    """Experts whose forward has other lines."""
    source = inspect.getsource(Experts.forward)
    for before, after in zip((old, *more[::2]), (new, *more[1::2]), strict=True):
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return made(source, Experts, **attributes)


def made(source: str, base: type[nn.Module] = nn.Module, **attributes: Any) -> Any:
    """An object of a class with methods of which inspect finds the source."""
    from patcher.source.synthetic import module_of_text

    number = len([name for name in _made if name])
    _made.append(source)
    lines = inspect.cleandoc(source) if source.startswith("def") else source
    module = module_of_text(f"tests.fusions.made_{number}", f"class Made(Base):\n{_indented(lines)}\n", f"<made {number}>")
    vars(module).update(Base=base, torch=torch, F=F, Any=Any)
    exec(compile(module.__doc__ or f"class Made(Base):\n{_indented(lines)}\n", f"<made {number}>", "exec"), vars(module))
    experts = module.Made()
    vars(experts).update(attributes)
    return experts


_made: list[str] = []


def _indented(source: str) -> str:
    return source
