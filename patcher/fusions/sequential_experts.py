"""`sequential_experts`: stacked expert weights as lists of linear layers, which quantizers and adapters understand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from patcher.conversions.layouts import Layout
from patcher.fusions.base import Fusion
from patcher.fusions.finding import Surroundings
from patcher.fusions.fused_module import FusedModule, fused_class_of
from patcher.fusions.rewrite import compile_subclass
from patcher.fusions.stacks import Stack, forward_of, sequential
from patcher.fusions.tracing import NotUnderstoodError
from patcher.fusions.understanding import located


@dataclass(frozen=True)
class Unstack(Layout):
    """One matrix for each expert."""

    transposed: bool = False

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [matrix.t().contiguous() if self.transposed else matrix for matrix in tensors[0].unbind()]

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        stack = torch.stack(list(tensors))
        return [stack.transpose(1, 2).contiguous() if self.transposed else stack]


class ListedExperts(FusedModule):
    """What the rewritten classes have in common."""

    _stacks: ClassVar[tuple[Stack, ...]]


class SequentialExperts(Fusion):
    """Each stack of expert weights, `(experts, out, in)` -> an `nn.ModuleList` of `nn.Linear` of the same name.

    `experts.gate_up_proj[i]` is then the gate and up projection of expert i, a plain `nn.Linear`, and
    `experts.down_proj[i]` the down projection. The forward is the model's eager one, whatever
    `experts_implementation` says: the others (`grouped_mm`, `batched_mm`, ...) need stacks.
    """

    name = "sequential_experts"

    def is_fusable(self, module: nn.Module) -> bool:
        return bool(_weights_of(module)) and not self.refusal(module)

    def refusal(self, module: nn.Module) -> str:
        if not _weights_of(module):
            return "it has no stacked weights"
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        try:
            fused_class_of(self, module)
        except NotUnderstoodError as error:
            return str(error)
        return ""

    def is_asked(self, path: str, module: nn.Module) -> bool:
        return bool(_weights_of(module))

    def obstacle(self, path: str, module: nn.Module, surroundings: Surroundings) -> str | None:
        return self.refusal(module) or surroundings.sharing(path, module, "the module") or None

    def is_told(self, path: str, module: nn.Module) -> bool:
        """Many modules with parameters of three dimensions have tables of positions."""
        return "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()

    def layouts(self, module: nn.Module) -> Iterator[Layout]:
        for stack in fused_class_of(self, module)._stacks:  # type: ignore[attr-defined]
            numbers = range(module._parameters[stack.name].shape[0])  # type: ignore[union-attr]
            yield Unstack(stack.name, tuple(f"{stack.name}.{number}.weight" for number in numbers), (), stack.transposed)
            if stack.bias:
                yield Unstack(stack.bias, tuple(f"{stack.name}.{number}.bias" for number in numbers))

    def recipe(self, module: nn.Module) -> tuple[tuple[str, str], ...]:
        if isinstance(module, ListedExperts):
            return module._made_by[2]  # type: ignore[return-value]
        return tuple(_weights_of(module).items())

    def make_class(self, original_cls: type[nn.Module], recipe: Any) -> type[nn.Module]:
        return _compile(original_cls, dict(recipe))


def _weights_of(module: nn.Module) -> dict[str, str]:
    """The stacked parameters of a module, and the parameter that holds the biases of each, or ""."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    biases = {name: f"{name}_bias" for name in own}
    return {
        name: biases[name] if biases[name] in own and own[biases[name]].dim() == 2 else ""
        for name, parameter in own.items()
        if parameter.dim() == 3 and type(module).__module__.partition(".")[0] != "torch"
    }


def _compile(original: type[nn.Module], weights: Mapping[str, str]) -> type[nn.Module]:
    method = forward_of(original)
    try:
        stacks, source = sequential(method, weights)
    except NotUnderstoodError as error:
        raise located(error, method) from error
    listed = " and ".join(stack.name for stack in stacks)
    cls = compile_subclass(
        f"Sequential{original.__name__}",
        f"{original.__name__} with lists of linear layers as {listed}. Rewritten by patcher from {method.at(1)}.",
        (ListedExperts, original),
        [(method, source)],
    )
    cls.__qualname__ = f"Sequential{original.__qualname__.rsplit('.', 1)[-1]}"
    cls._stacks = stacks
    return cls
