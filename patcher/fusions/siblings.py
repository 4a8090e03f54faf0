"""`siblings`: linear layers of one module that get the same tensor, joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from patcher.fusions import Decision, Projections, Surroundings, called_with


class Siblings(Projections):
    """One `joined_proj` in place of linear layers of a module that get the same tensor, whatever their names.

    For example `q_a_proj` and `kv_a_proj_with_mqa` of multi-head latent attention, the projections of a gated delta
    net, queries, keys and values with a gate, `gate_proj` and `up_proj`. If there are several such groups in a module,
    the largest is joined.
    """

    name = "siblings"
    joined_name: ClassVar[str] = "joined_proj"
    subject = "two linear layers that are given one variable"

    def group_in(self, module: nn.Module) -> tuple[str, ...] | None:
        linear = _linear(module)
        groups = called_with(type(module), linear) if len(linear) > 1 else []
        return max(groups, key=len, default=None)

    def decide_all(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        decisions = super().decide_all(modules, surroundings)
        for path in modules.keys() - decisions.keys():
            module = modules[path]
            if len(linear := _linear(module)) > 1:
                reason = f"no method of {type(module).__name__} calls two of {', '.join(linear)} with one variable"
                decisions[path] = Decision(refusal=reason, is_told=False)
        return decisions


def _linear(module: nn.Module) -> list[str]:
    return [name for name, child in module._modules.items() if type(child) is nn.Linear]
