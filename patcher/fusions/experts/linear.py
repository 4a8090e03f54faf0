"""The forward of experts as linear layers, by the declaration of their class."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import inspect
from textwrap import dedent
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from patcher.compat.standing_alone import ListedExperts
from patcher.errors import InvalidPatcherError
from patcher.fusions import FusedModule
from patcher.fusions.experts.matrices import Matrices

#: The attributes that a class declares, by transformers' decorator or in its body.
DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


class _MemberSources:
    """Name -> source of the members that a class of linear experts adds to its original."""

    def __get__(self, instance: Any, cls: type[LinearExperts]) -> dict[str, str]:
        sources: dict[str, str] = {}
        for base in cls.__mro__:
            members = vars(base).items() if issubclass(base, LinearExperts) else ()
            for name, value in members:
                if name in DECLARED:
                    sources.setdefault(name, f"{name} = {value!r}\n")
                elif isinstance(value, FunctionType) and name not in sources and name != "forward_of_all_tokens":
                    source = dedent(inspect.getsource(value))
                    sources[name] = source.replace(f"def {value.__name__}(", f"def {name}(", 1)
        return sources


class LinearExperts(FusedModule, ListedExperts):
    """Experts as transformers' `@use_experts_implementation` declares them, with a linear layer for each matrix.

    They compute the eager forward of such a class. The declared attributes (`has_gate`, `is_concatenated`, ...),
    `_apply_gate`, `act_fn` and `post_expert_norm` are those of the original class, looked up when they are used.
    """

    _rewritten: ClassVar[Any] = _MemberSources()

    #: Attribute with a number of experts -> the stack with so many.
    counts: ClassVar[dict[str, str]] = {"num_experts": "down_proj"}
    #: Whether stacks may have different numbers of experts, so that the last experts lack layers.
    may_be_incomplete: ClassVar[bool] = False
    #: Whether there is a forward in which every expert computes every token.
    gives_all_tokens: ClassVar[bool] = True

    @classmethod
    def stacks(cls, module: Any) -> list[Matrices]:
        """Return the layouts of the stacks of a module.

        Raises:
            InvalidPatcherError: the module lacks an attribute that its class declares.
        """
        owner: Any = cls if hasattr(cls, "has_gate") else module
        if missing := [name for name in DECLARED if not hasattr(owner, name)]:
            raise InvalidPatcherError(f"it has no {missing[0]}: its __init__ doesn't call that of the declared class")
        required = ["_apply_gate" if owner.has_gate else "act_fn"]
        required += ["post_expert_norm"] if getattr(module, "has_post_expert_norm", False) else []
        if missing := [name for name in required if not callable(getattr(module, name, None))]:
            raise InvalidPatcherError(f"it has no {missing[0]}, which a forward by its declaration calls")
        first, layers = ("gate_up_proj", ("gate_proj", "up_proj")) if owner.has_gate else ("up_proj", ("up_proj",))
        stacks = []
        for name, parts in ((first, layers), ("down_proj", ("down_proj",))):
            interleaved = len(parts) > 1 and not owner.is_concatenated
            weights = tuple(f"{part}.weight" for part in parts)
            stacks.append(Matrices((name,), layers=weights, transposed=owner.is_transposed, interleaved=interleaved))
            if owner.has_bias:
                biases = tuple(f"{part}.bias" for part in parts)
                stacks.append(Matrices((f"{name}_bias",), layers=biases, interleaved=interleaved))
        return stacks

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = self.empty_output(hidden_states, top_k_weights)
        # (experts, choices, tokens). An index of `len(self)` isn't an expert.
        mask = nn.functional.one_hot(top_k_index, len(self) + 1).permute(2, 1, 0)[: len(self)]
        # Indices on the CPU, as each lookup of an expert would wait for an accelerator. Not in a method of its own,
        # which torch.compile would trace as a separate graph.
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero() if not self.every_expert_runs() else None
        for expert_idx in range(len(self)) if hit is None else hit.flatten().cpu():
            position, token = torch.where(mask[expert_idx])
            rows = self[expert_idx](hidden_states[token], self.run_expert) * top_k_weights[token, position, None]
            output.index_add_(0, token, rows.to(output.dtype))
        return output.to(hidden_states.dtype)

    def forward_of_all_tokens(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = self.empty_output(hidden_states, top_k_weights)
        # (tokens, experts). An index of `len(self)` isn't an expert.
        weights = top_k_weights.new_zeros(top_k_weights.shape[0], len(self) + 1)
        weights = weights.scatter_add(1, top_k_index, top_k_weights)
        for expert_idx in range(len(self)):
            weight = weights[:, expert_idx, None]
            rows = (self[expert_idx](hidden_states, self.run_expert) * weight).to(output.dtype)
            # Not only a weight of zero: the output of an expert that wasn't chosen may overflow.
            output.add_(rows.masked_fill(weight == 0, 0))
        return output.to(hidden_states.dtype)

    def run_expert(self, expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if self.has_gate:
            gate, up = expert.gate_proj(rows), expert.up_proj(rows)
            both = torch.cat((gate, up), -1) if self.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
            rows = self._apply_gate(both)
        else:
            rows = self.act_fn(expert.up_proj(rows))
        rows = expert.down_proj(rows)
        # since transformers 5.23
        return self.post_expert_norm(rows) if getattr(self, "has_post_expert_norm", False) else rows

    def empty_output(self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)
