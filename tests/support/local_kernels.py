"""A repository of the `kernels` package in a folder: layers in pure torch, which run anywhere."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["written_kernels"]

CODE = """
import torch
from torch import nn


class Norm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float
    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class InferenceNorm(Norm):
    has_backward = False


class Zeros(nn.Module):
    def forward(self, hidden_states):
        return torch.zeros_like(hidden_states)


class Built(nn.Module):
    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class BuiltLayout(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class layers:
    Norm = Norm
    InferenceNorm = InferenceNorm
    Zeros = Zeros
    Built = Built
"""


def written_kernels(root: Path) -> Path:
    """Write the repository into a folder."""
    variant = root / "build" / "torch-universal"
    variant.mkdir(parents=True)
    metadata = {"name": "pure-norm", "id": "pure_norm_of_tests", "version": 1, "license": "Apache-2.0"}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"python-depends": [], "backend": {"type": "cpu"}}))
    (variant / "__init__.py").write_text(CODE)
    return root
