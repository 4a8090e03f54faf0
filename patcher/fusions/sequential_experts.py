"""`sequential_experts`: stacked weights of experts as linear layers of each expert, for quantizers and adapters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.fusions import Decision, Fusion, Surroundings
from patcher.fusions.experts.adapters import linear_experts
from patcher.fusions.experts.linear import LinearExperts
from patcher.fusions.experts.matrices import Matrices


class SequentialExperts(Fusion):
    """Each expert as linear layers of its own: `experts.3.gate_proj`, `experts.3.up_proj`, `experts.3.down_proj`.

    >>> from transformers import MixtralConfig
    >>> from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    >>> from patcher.fusions import SequentialExperts
    >>> experts = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=2))
    >>> SequentialExperts().is_fusable(experts)
    True
    >>> [layout.layers for layout in SequentialExperts().layouts(experts)]
    [('gate_proj.weight', 'up_proj.weight'), ('down_proj.weight',)]

    These names are the same for all architectures, whatever the order of their stacks; a module with one stack called
    `weight` becomes a list of linear layers. The class declares the order of a stack, by the decorator of transformers
    or by attributes in its body. The experts are indexed like an `nn.ModuleList`, and hooks run on an expert as on its
    layers. The forward is the eager one, whatever `experts_implementation` is: the others (`grouped_mm`,
    `batched_mm`, ...) need stacks.

    In training an expert without tokens runs on zero rows, so that its gradient is zero and not None; so does each in
    an exported program, which has no data-dependent loop.

    Args:
        modules: path patterns of the modules to fuse, as reports print them.
        all_tokens: every expert computes every token, and the weight of a token that didn't choose it is zero. Then
            no size depends on the data: for `torch.compile(fullgraph=True)`, for `torch.export`, and for calibration,
            where hooks on the layers of every expert see every token.
    """

    name = "sequential_experts"
    subject = "weights of experts that are stacked in one parameter of three dimensions"

    all_tokens = False

    def __init__(self, modules: str | Iterable[str] = (), *, all_tokens: bool = False) -> None:
        super().__init__(modules)
        if not isinstance(all_tokens, bool):
            raise InvalidPatcherError(f"SequentialExperts: all_tokens is True or False, found {all_tokens!r}.")
        if all_tokens:
            self.all_tokens = True

    def is_fusable(self, module: nn.Module) -> bool:
        return not self.refusal(module)

    def refusal(self, module: nn.Module) -> str:
        if not _has_stacks(module):
            return "it has no stacked weights"
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        linear = linear_experts(type(module))
        if isinstance(linear, str):
            return linear
        if self.all_tokens and not linear.gives_all_tokens:
            return "all_tokens=True: the caller chooses the tokens of each expert"
        return _mismatch(module, linear)

    def layouts(self, module: nn.Module) -> Iterator[Matrices]:
        linear: Any = type(module) if isinstance(module, LinearExperts) else linear_experts(type(module))
        yield from linear.stacks(module)

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        linear: Any = linear_experts(original_cls)
        if isinstance(linear, str):
            raise InvalidPatcherError(f"{self.name} can't fuse {original_cls.__qualname__}: {linear}.")
        forward: Any = inspect.getattr_static(original_cls, "forward")
        doc = f"{original_cls.__name__} with linear layers for each expert."
        made_from = {"forward": (forward, inspect.unwrap(forward).__code__)}
        body = {"__doc__": doc, "__module__": __name__, "_made_from": made_from}
        if self.all_tokens:
            body["forward"] = linear.forward_of_all_tokens
        name = f"{'AllTokens' if self.all_tokens else 'Sequential'}{original_cls.__name__}"
        return type(name, (linear, original_cls), body)

    def decide(self, path: str, module: nn.Module, surroundings: Surroundings) -> Decision | None:
        if not _has_stacks(module):
            return None
        if reason := self.refusal(module) or surroundings.sharing(path, module, "the module"):
            # Other modules with three-dimensional parameters mostly have position embeddings.
            is_told = "expert" in path.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
            return Decision(refusal=reason if is_told else f"if it has experts: {reason}", is_told=is_told)
        return Decision(tuple(self.layouts(module)))


def _has_stacks(module: nn.Module) -> bool:
    is_modeling = type(module).__module__.partition(".")[0] != "torch"
    return is_modeling and any(tensor is not None and tensor.dim() == 3 for tensor in module._parameters.values())


def _mismatch(module: Any, linear: type[LinearExperts]) -> str:
    """Why a module doesn't match the declaration of its class, "" if it does."""
    if members := [name for name in ("__len__", "__getitem__", "__iter__") if hasattr(module, name)]:
        return f"it has {members[0]} of its own"
    if digits := [member for member in (*module._modules, *module._parameters) if member.isdigit()]:
        return f"it has {digits[0]} already, which an expert would be called"
    stacks = {name for name, value in module._parameters.items() if value is not None}
    try:
        layouts = {layout.stock[0]: layout for layout in linear.stacks(module)}
        if stacks != layouts.keys():
            return f"it has the parameters {', '.join(sorted(stacks))}, and declares {', '.join(sorted(layouts))}"
        layouts = {name: layout.of(module) for name, layout in layouts.items()}
    except InvalidPatcherError as error:
        return str(error)
    expert_counts = {name: layout.stock_shapes[0][0] for name, layout in layouts.items()}
    for name, stack in linear.counts.items():
        if getattr(module, name, expert_counts[stack]) != expert_counts[stack]:
            return f"{name} is {getattr(module, name)}, and {stack} has {expert_counts[stack]} experts"
    if len(set(expert_counts.values())) > 1 and not linear.may_be_incomplete:
        return f"its stacks are of different numbers of experts: {expert_counts}"
    weights = [layout for layout in layouts.values() if layout.layers[0].endswith(".weight")]
    shapes = [f"{layout.stock[0]} of the shape {tuple(layout.stock_shapes[0])}" for layout in weights]
    for layout, shape in zip(weights[:-1], shapes, strict=False):  # those before the down projection
        if layout.fused_shapes()[0] != weights[-1].fused_shapes()[0][::-1]:
            return f"{shape} and {shapes[-1]} don't fit together as is_transposed={layout.transposed} has it"
    return ""
