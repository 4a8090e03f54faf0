"""`siblings`: any linear layers of one module that are given one tensor, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from patcher.fusions import Decision, Projections, Surroundings, called_with


class Siblings(Projections):
    """One `joined_proj` in place of linear layers of a module that are given one tensor, whatever their names.

    `q_a_proj` and `kv_a_proj_with_mqa` of multi-head latent attention, the projections of a gated delta net, queries,
    keys and values with a gate, `gate_proj` and `up_proj`. Of a module in which several variables are given to several
    layers, the variable that most layers are given is taken.
    """

    name = "siblings"
    joined_name: ClassVar[str] = "joined_proj"
    subject = "two linear layers that are given one variable"

    def group_in(self, module: nn.Module) -> tuple[str, ...] | None:
        linear = _linear(module)
        groups = called_with(type(module), linear) if len(linear) > 1 else []
        return max(groups, key=len, default=None)

    def decided(self, modules: Mapping[str, nn.Module], surroundings: Surroundings) -> dict[str, Decision]:
        found = super().decided(modules, surroundings)
        for path in modules.keys() - found.keys():
            module = modules[path]
            if len(linear := _linear(module)) > 1:
                reason = f"no method of {type(module).__name__} calls two of {', '.join(linear)} with one variable"
                found[path] = Decision(refusal=reason, is_told=False)
        return found


def _linear(module: nn.Module) -> list[str]:
    return [name for name, child in module._modules.items() if type(child) is nn.Linear]
