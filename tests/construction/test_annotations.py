"""Annotations may name what only a type checker imports; on Python 3.14 without quotes or a `__future__` import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import patcher
from patcher import Patcher, forward_of
from tests.support import shared
from tests.support.replacements import same_output
from tests.support.tiny import tiny_llama_config
from tests.support.written_modules import written_module

TEXT = """
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP


class Block(LlamaMLP):
    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Linear(nn.Linear):
    def __init__(self, in_features: Size, out_features: Size, bias: Switch = True) -> None:
        super().__init__(in_features, out_features, bias)


class Norm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
"""

PATCHERS: dict[str, Callable[[Any], Patcher]] = {
    "class": lambda own: Patcher(class_mapping={"LlamaMLP": own.Block}),
    "path": lambda own: Patcher(module_mapping={"model.layers.*.mlp.down_proj": own.Linear}),
    "forward": lambda own: Patcher(class_mapping={"LlamaRMSNorm": forward_of(own.Norm)}),
    "function": lambda own: Patcher(function_mapping={"rotate_half": own.rotate_half}),
}


@pytest.mark.parametrize("made", PATCHERS.values(), ids=PATCHERS)
def test_annotations_are_not_evaluated(made: Callable[[Any], Patcher], tmp_path: Path) -> None:
    future = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    own = made(written_module(future + TEXT, tmp_path / "annotated.py"))
    folder = shared.checkpoint(tiny_llama_config())
    assert patcher.plan(folder, own).ok
    assert not patcher.diff(folder, own).problems
    stock = LlamaForCausalLM.from_pretrained(folder)
    assert same_output(LlamaForCausalLM.from_pretrained(folder, patcher=own), stock)
    assert same_output(own.apply(stock), stock)
    assert patcher.verify(folder, own, quick=True)
