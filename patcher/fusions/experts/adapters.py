"""The forwards of experts with linear layers: by the declaration of their class, or by an adapter."""

# mypy: disable-error-code="call-overload, no-any-return, no-untyped-call, operator, override"
from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from patcher.compat.models import is_of_experts_decorator
from patcher.fusions.experts.linear import DECLARED, LinearExperts
from patcher.fusions.experts.matrices import Matrices


class Gated(LinearExperts):
    """For a class without a declaration, with the defaults of transformers' decorator."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True


class SummedAsWeights(LinearExperts):
    def empty_output(self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states, dtype=top_k_weights.dtype)


class SummedInFloat32(LinearExperts):
    def empty_output(self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states, dtype=torch.float32)


class WithIdentities(LinearExperts):
    """The last experts return their input, though they have gate and up projections."""

    counts: ClassVar[dict[str, str]] = {"num_routed_experts": "down_proj", "total_experts": "gate_up_proj"}
    may_be_incomplete = True

    @classmethod
    def stacks(cls, module: Any) -> list[Matrices]:
        gate_and_up = Matrices(("gate_up_proj",), layers=("gate_proj.weight", "up_proj.weight"))
        return [gate_and_up, Matrices(("down_proj",), layers=("down_proj.weight",))]

    def run_expert(self, expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        gate, up = expert.gate_proj, expert.up_proj
        if "down_proj" in expert._modules:
            return expert.down_proj(self.act_fn(gate(rows)) * up(rows))
        unused = gate(rows[:0]).sum() + up(rows[:0]).sum()  # a gradient of zero, and not None
        return self.identity_expert(rows) + unused.to(rows.dtype)


class InEqualParts(LinearExperts):
    """The caller passes the same number of rows for each expert, in the order of the experts."""

    @classmethod
    def stacks(cls, module: Any) -> list[Matrices]:
        gate_and_up = Matrices(("gate_up_proj",), layers=("gate_proj.weight", "up_proj.weight"), transposed=True)
        return [gate_and_up, Matrices(("down_proj",), layers=("down_proj.weight",), transposed=True)]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.view(len(self), -1, self.hidden_size)
        rows = torch.stack([expert(part, self.run_expert) for expert, part in zip(self, rows, strict=True)])
        return rows.view(-1, self.hidden_size)

    def run_expert(self, expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        gate, up = expert.gate_proj(rows), expert.up_proj(rows)
        return expert.down_proj(up * self.act_fn(gate))

    forward_of_all_tokens: ClassVar[Any] = forward


class InParts(LinearExperts):
    """The caller passes the rows of each expert and their numbers. An expert is one linear layer."""

    counts: ClassVar[dict[str, str]] = {"num_experts": "weight"}
    gives_all_tokens = False

    @classmethod
    def stacks(cls, module: Any) -> list[Matrices]:
        return [Matrices(("weight",), layers=("weight",))]

    def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        parts = inputs.split(expert_size, dim=0)
        return torch.cat([self[expert_idx](parts[expert_idx]) for expert_idx in range(len(self))], dim=0)


class Shared(LinearExperts):
    """Every expert gets every token, and a weight for each."""

    counts: ClassVar[dict[str, str]] = {"n_shared_experts": "down_proj"}

    @classmethod
    def stacks(cls, module: Any) -> list[Matrices]:
        return [Matrices((name,), layers=(f"{name}.weight",)) for name in ("gate_proj", "up_proj", "down_proj")]

    def forward(self, hidden_states: torch.Tensor, gammas: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        gammas = gammas.reshape(-1, len(self), 1).transpose(0, 1)
        runs = [functools.partial(self.run_expert, weights=weights) for weights in gammas]
        down = torch.stack([expert(rows, run) for expert, run in zip(self, runs, strict=True)])
        return down.float().sum(dim=0).to(hidden_states.dtype).view(hidden_states.shape)

    def run_expert(self, expert: nn.Module, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = expert.gate_proj(rows), expert.up_proj(rows)
        return expert.down_proj(self.act_fn(gate) * up * weights)

    forward_of_all_tokens: ClassVar[Any] = forward


#: Class -> its form with linear layers, or why there isn't one.
ADAPTERS: dict[str, type[LinearExperts] | str] = {
    "inkling.modeling_inkling.InklingSharedExperts": Shared,
    "inkling2.modeling_inkling2.Inkling2Experts": SummedInFloat32,
    "jetmoe.modeling_jetmoe.JetMoeParallelExperts": InParts,
    "llama4.modeling_llama4.Llama4TextExperts": InEqualParts,
    "longcat_flash.modeling_longcat_flash.LongcatFlashExperts": WithIdentities,
    "nemotron_h.modeling_nemotron_h.NemotronHExperts": SummedAsWeights,
    "openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts": (
        "its forward computes in float32, and a linear layer of an expert computes in the type of its weight"
    ),
    "step3p7.modeling_step3p7.Step3p7Experts": Gated,
}

_HOW = (
    "Decorate the class that has it with use_experts_implementation of transformers, or set has_gate, has_bias, "
    "is_transposed and is_concatenated in its body and define _apply_gate(self, gate_up)"
)


def linear_experts(cls: type[nn.Module]) -> type[LinearExperts] | str:
    """Return the class with the forward for linear layers, or why there isn't one.

    A declaration is about the forward of the declaring class. Another one, of a subclass or assigned by another tool,
    may do anything, so the function that runs is checked at each call.
    """
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    adapter = ADAPTERS.get(f"{owner.__module__}.{owner.__qualname__}".removeprefix("transformers.models."))
    is_own = isinstance(forward, FunctionType) and forward.__code__.co_qualname == f"{owner.__qualname__}.forward"
    if is_of_experts_decorator(forward) and hasattr(forward, "__wrapped__"):
        return adapter or LinearExperts
    if is_own and adapter and forward.__globals__ is vars(sys.modules[owner.__module__]):
        return adapter
    if is_own and all(name in vars(owner) for name in DECLARED):
        return LinearExperts
    if adapter or any(_declares(base) for base in cls.__mro__):
        name = f"{forward.__qualname__} of {forward.__module__}"
        return f"what the class declares is about another forward than the one that runs, {name}. {_HOW}"
    return f"its class doesn't declare how forward uses the stacks. {_HOW}"


def _declares(cls: type) -> bool:
    return is_of_experts_decorator(vars(cls).get("__init__")) or all(name in vars(cls) for name in DECLARED)
