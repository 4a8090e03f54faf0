"""How a forward uses stacked weights, and the same forward with linear layers of the experts in their place.

```text
gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
out = gated @ self.down_proj[expert_idx] + self.down_proj_bias[expert_idx]
```

becomes

```text
gate, up = self[expert_idx].gate_proj(current_state), self[expert_idx].up_proj(current_state)
out = self[expert_idx].down_proj(gated)
```

and nothing else changes: routing, activation, types and the order of additions are the model's own. A use of a stack
that isn't listed here is refused.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType

import libcst as cst
from libcst.metadata import MetadataWrapper
from torch import nn

from patcher.compat.models import EXPERTS_HOME
from patcher.fusions.experts.gate_splits import Methods
from patcher.fusions.experts.loops import attribute_of
from patcher.fusions.experts.products import ByExperts
from patcher.fusions.methods import Method, NotUnderstoodError, read_function, self_of


@dataclass(frozen=True)
class Stack:
    """A stacked weight.

    Attributes:
        name: the parameter, of shape (experts, out, in), or (experts, in, out) where it is transposed.
        parts: the layers that each expert has of it, in the order of their rows; "" where it is the expert itself.
        transposed: the input stands on its left: `x @ weight`.
        interleaved: the rows of the parts take turns; otherwise one part comes after the other.
        bias: the parameter that holds the biases, (experts, out), if there is one.
        counted: the forward asks it for the number of experts.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    bias: str = ""
    counted: bool = False


def forward_of(cls: type[nn.Module]) -> Method:
    """The forward of a class of experts with its source: the eager one, which transformers wraps to choose others.

    Raises:
        NotUnderstoodError: there is no source, or something else is wrapped around it.
    """
    found = next(base.__dict__["forward"] for base in cls.__mro__ if "forward" in base.__dict__)
    function = found
    if getattr(found, "__globals__", {}).get("__name__") == EXPERTS_HOME:
        function = found.__wrapped__
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise NotUnderstoodError("forward is wrapped by something that its source doesn't show")
    method = read_function(function)
    if method.node.decorator_list:
        raise NotUnderstoodError("forward is decorated", 1)
    if any(name != "__class__" for name in function.__code__.co_freevars):
        raise NotUnderstoodError("forward uses variables of the function around it", 1)
    return method


def _cast(function: ast.FunctionDef, this: str, name: str, line: int) -> str:
    """The weight of one expert in another type, as a line has it: `self.up[number].float()`; "" if it has none."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Subscript(value=stack), attr="float" | "double" | "to")) if (
                node.lineno == line and attribute_of(this, stack) == name
            ):
                return ast.unparse(node)
    return ""


def by_experts(source: str, weights: Mapping[str, str], methods: Methods) -> tuple[tuple[Stack, ...], str]:
    """The stacks that a forward multiplies with, and its source with linear layers of the experts in their places.

    Args:
        source: the forward.
        weights: the stacked parameters -> the parameter with the biases, or "".
        methods: the methods of the class.

    Raises:
        NotUnderstoodError: a stack is used in another way.
    """
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    this = self_of(function, "self")
    edit = ByExperts(this, weights, function, methods)
    module = MetadataWrapper(cst.parse_module(source)).visit(edit)
    if not edit.mentioned:
        raise NotUnderstoodError("its forward uses no stacked weight")
    for place, name in edit.mentioned.items():
        if place not in edit.understood:
            why = f"{this}.{name} is used as something else than the weight of one expert"
            if cast := _cast(function, this, name, place[0]):
                why = f"{cast} is multiplied, and a linear layer of an expert computes in the type of its weight"
            raise NotUnderstoodError(why, place[0])
    stacks = []
    for name, bias in weights.items():
        if name not in edit.transposed:
            continue
        if len(edit.transposed[name]) > 1:
            raise NotUnderstoodError(f"{this}.{name} is multiplied from both sides")
        if bias and edit.products[name] != edit.with_bias[name]:
            raise NotUnderstoodError(f"{this}.{name} is used with and without {bias}")
        if len(edit.splits.get(name, ())) > 1:
            raise NotUnderstoodError(f"{this}.{name} is cut into gate and up in several ways")
        (transposed,) = edit.transposed[name]
        (split,) = edit.splits.get(name, {None})
        parts = split.parts if split else (edit.part(name),)
        interleaved = split is not None and split.interleaved
        stacks.append(Stack(name, parts, transposed, interleaved, bias, name in edit.counted))
    layers = Counter(part for stack in stacks for part in stack.parts)
    if twice := [part for part, times in layers.items() if times > 1]:
        raise NotUnderstoodError(f"{this} has several stacks that would be called {twice[0]}")
    return tuple(stacks), module.code
