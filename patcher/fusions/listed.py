"""Experts as a list: each one a module of `nn.Linear`s, in a module that is indexed like an `nn.ModuleList`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import index
from typing import Any

import torch
from torch import nn

from patcher.compat.models import is_initialized, mark_initialized
from patcher.fusions.matrices import Matrices


class ListedExperts(nn.Module):
    """What rewritten classes of experts have in common: the experts are the children that have numbers as names.

    `experts[3].down_proj` is a linear layer of the fourth; `len(experts)`, and iteration, go by the experts.
    """

    def __len__(self) -> int:
        return sum(name.isdigit() for name in self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self[number] for number in range(len(self))])

    def __getitem__(self, number: Any) -> Any:
        """The expert of a number: an int, or a tensor of one, as loops over the experts that are hit have it."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        position = index(number)
        name = str(position + len(self) if position < 0 else position)
        if name not in self._modules:
            raise IndexError(f"expert {position} of {len(self)}")
        return self._modules[name]

    def every_expert_runs(self) -> bool:
        """Whether experts without tokens run too, on no rows.

        In training they do, so that their gradients are zero and not None: optimizers then treat them like the part of
        a stack that got no token, and processes that train together use the same parameters in the same order. Layers
        that are sharded one by one are gathered by all processes or by none, whatever the tokens of each.
        """
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            return True
        return any(hasattr(parameter, "placements") for parameter in self.parameters())

    def experts_to_run(self, hit: torch.Tensor) -> torch.Tensor:
        """The numbers of the experts that run, in the form of `hit`, the numbers of those that have tokens.

        On the CPU, where looking an expert up by its number doesn't wait for an accelerator each time.
        """
        if not self.every_expert_runs():
            return hit.cpu()
        return torch.arange(len(self), device="cpu").view(-1, *[1] * (hit.dim() - 1))

    def expert_weights(self, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What each token gives each expert, (tokens, experts): zero for those that it didn't choose.

        Args:
            chosen: the numbers of the experts that tokens choose, (tokens, choices). One that no expert has is nobody.
            weights: what they weigh, of the same shape.
        """
        nothing = weights.new_zeros(weights.shape[0], len(self) + 1)
        return nothing.scatter_add(1, chosen.clamp(max=len(self)), weights)

    def with_incomplete_experts(self, output: torch.Tensor) -> torch.Tensor:
        """The output, and nothing of the layers of experts that lack others and so never run."""
        if not self.every_expert_runs():
            return output
        most = max(len(expert._modules) for expert in self)
        for expert in self:
            layers: list[Any] = list(expert.children()) if len(expert._modules) < most else []
            for layer in layers:
                output = output + layer(output.new_zeros(0, layer.in_features)).sum().to(output.dtype)
        return output


class Moved:
    """What a class of listed experts has under the name of a stack, as modules around experts initialise stacks.

    It says that it is initialised. All else that is asked of it is an error.
    """

    def __init__(self, name: str, layers: Iterable[str]) -> None:
        parts = " and ".join(f"experts[i].{layer}" if layer else "experts[i]" for layer in layers)
        self._text = f"{name} of these experts is laid out as {parts}"
        mark_initialized(self)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._text}, and has no {name}: ask these")

    def __repr__(self) -> str:
        return f"<{self._text}>"


def list_experts(module: nn.Module, layouts: Iterable[Matrices]) -> None:
    """Put linear layers in the place of the stacks of a module that stands."""
    for layout in layouts:
        stack = module._parameters.pop(layout.stock[0])
        assert stack is not None
        for name, values in zip(layout.fused, layout.fuse([stack.detach()]), strict=True):
            path, _, kind = name.rpartition(".")
            layer = _layer(module, path)
            layer._parameters[kind] = _parameter(values, stack)
            if kind == "weight":
                layer.out_features, layer.in_features = values.shape
    # The model's `_init_weights` looks for the stacks of such a module; the linear layers have their own turn.
    mark_initialized(module)


def _layer(module: nn.Module, path: str) -> nn.Linear:
    """The linear layer at a path below the module, made if there is none yet."""
    *owners, name = path.split(".")
    for owner in owners:
        inner = module._modules.get(owner)
        if inner is None:
            inner = module._modules[owner] = nn.Module()
        module = inner
    if name not in module._modules:
        layer = nn.Linear.__new__(nn.Linear)  # its `__init__` gives values: seconds in vain for 30,000 experts
        nn.Module.__init__(layer)
        layer.register_parameter("weight", None)
        layer.register_parameter("bias", None)
        module._modules[name] = layer
    found = module._modules[name]
    assert isinstance(found, nn.Linear)
    return found


def _parameter(values: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    new = nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=like.requires_grad)
    if is_initialized(like):
        mark_initialized(new)
    return new
