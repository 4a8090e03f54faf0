"""How a forward uses stacked weights, and the same forward with a list of linear layers in the place of each stack.

```text
gate_up = current_state @ self.gate_up_proj[expert_idx] + self.gate_up_proj_bias[expert_idx]
out = F.linear(gated, self.down_proj[expert_idx])
```

becomes

```text
gate_up = self.gate_up_proj[expert_idx](current_state)
out = self.down_proj[expert_idx](gated)
```

and nothing else changes: routing, activation, types and the order of additions are the model's own. A use of a stack
that isn't listed here is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from torch import nn

from patcher.compat.models import EXPERTS_HOME
from patcher.fusions.methods import Method, NotUnderstoodError, read_method, self_of
from patcher.source.trees import code_of

_LINEAR = ("F.linear", "nn.functional.linear", "torch.nn.functional.linear", "functional.linear")


@dataclass(frozen=True)
class Stack:
    """A stacked weight.

    Attributes:
        name: the parameter, of shape (experts, out, in), or (experts, in, out) where it is transposed.
        transposed: the input stands on its left: `x @ weight`.
        bias: the parameter that holds the biases, (experts, out), if there is one.
    """

    name: str
    transposed: bool = False
    bias: str = ""


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
    method = read_method("forward", function)
    if method.node.decorator_list:
        raise NotUnderstoodError("forward is decorated", 1)
    if any(name != "__class__" for name in function.__code__.co_freevars):
        raise NotUnderstoodError("forward uses variables of the function around it", 1)
    return method


def sequential(method: Method, weights: Mapping[str, str]) -> tuple[tuple[Stack, ...], str]:
    """The stacks that a forward multiplies with, and its source with lists of linear layers in their places.

    Args:
        weights: the stacked parameters -> the parameter with the biases, or "".

    Raises:
        NotUnderstoodError: a stack is used in another way.
    """
    this = self_of(method.node, "self")
    edit = _Edit(this, weights)
    module = MetadataWrapper(cst.parse_module(method.source)).visit(edit)
    if not edit.mentioned:
        raise NotUnderstoodError("its forward uses no stacked weight")
    for place, name in edit.mentioned.items():
        if place not in edit.understood:
            why = f"{this}.{name} is used as something else than the weight of one expert"
            raise NotUnderstoodError(why, place[0])
    stacks = []
    for name, bias in weights.items():
        if name not in edit.transposed:
            continue
        if len(edit.transposed[name]) > 1:
            raise NotUnderstoodError(f"{this}.{name} is multiplied from both sides")
        if bias and edit.products[name] != edit.with_bias[name]:
            raise NotUnderstoodError(f"{this}.{name} is used with and without {bias}")
        (transposed,) = edit.transposed[name]
        stacks.append(Stack(name, transposed, bias))
    return tuple(stacks), module.code


class _Edit(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, this: str, weights: Mapping[str, str]) -> None:
        super().__init__()
        self._this = this
        self._weights = dict(weights)
        self._names = {*weights, *(bias for bias in weights.values() if bias)}
        #: (line, column) -> name of each mention of a stack, and the places of those that were understood
        self.mentioned: dict[tuple[int, int], str] = {}
        self.understood: set[tuple[int, int]] = set()
        self.transposed: dict[str, set[bool]] = {}
        self.products: Counter[str] = Counter()
        self.with_bias: Counter[str] = Counter()

    # What is mentioned.

    def _mention(self, node: cst.CSTNode) -> str:
        """The name of the stack that `node` is, `self.name`, or ""."""
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == self._this:
            return node.attr.value if node.attr.value in self._names else ""
        return ""

    def _at(self, node: cst.CSTNode) -> tuple[int, int]:
        start = self.get_metadata(PositionProvider, node).start
        return (start.line, start.column)

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802
        if name := self._mention(node):
            self.mentioned[self._at(node)] = name

    def _expert(self, node: cst.BaseExpression) -> tuple[cst.Subscript | None, str, str]:
        """`self.name[index]`: the node, the name and the index."""
        if not isinstance(node, cst.Subscript) or len(node.slice) != 1:
            return None, "", ""
        (element,) = node.slice
        name = self._mention(node.value)
        if not name or not isinstance(element.slice, cst.Index) or element.slice.star:
            return None, "", ""
        return node, name, code_of(element.slice.value).strip()

    def _understand(self, node: cst.CSTNode, name: str, transposed: bool) -> None:
        self.understood.add(self._at(node))
        self.transposed.setdefault(name, set()).add(transposed)
        self.products[name] += 1

    def _understand_bias(self, node: cst.BaseExpression, name: str, index: str) -> bool:
        """Whether `node` is the bias that belongs to `self.name[index]`."""
        bias, bias_name, bias_index = self._expert(node)
        if bias is None or bias_name != self._weights[name] or bias_index != index:
            return False
        self.understood.add(self._at(bias.value))
        self.with_bias[name] += 1
        return True

    # What is rewritten.

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        function = code_of(original_node.func.with_changes(lpar=[], rpar=[]))
        arguments = original_node.args
        if any(argument.star for argument in arguments):
            return updated_node
        if function in _LINEAR and len(arguments) in (2, 3):
            return self._linear(original_node, updated_node)
        if function == "torch.bmm" and len(arguments) == 2 and not any(argument.keyword for argument in arguments):
            return self._all_at_once(original_node, updated_node)
        if isinstance(original_node.func, cst.Attribute) and original_node.func.attr.value == "size":
            stack = original_node.func.value  # of self.weight.size(0)
            if self._mention(stack) and len(arguments) == 1 and code_of(arguments[0].value) == "0":
                return self._length(stack, updated_node)
        return updated_node

    def _linear(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        keywords = [argument.keyword.value if argument.keyword else "" for argument in original.args]
        if any(keywords[:2]) or (len(keywords) == 3 and keywords[2] not in ("", "bias")):
            return updated
        expert, name, index = self._expert(original.args[1].value)
        if expert is None or name not in self._weights:
            return updated
        if len(original.args) == 3 and not self._understand_bias(original.args[2].value, name, index):
            return updated
        self._understand(expert.value, name, transposed=False)
        return _call(updated.args[1].value, updated.args[0].value, updated)

    def leave_BinaryOperation(  # noqa: N802
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        if isinstance(original_node.operator, cst.MatrixMultiply):
            expert, name, _ = self._expert(original_node.right)
            if expert is None or name not in self._weights:
                return updated_node
            self._understand(expert.value, name, transposed=True)
            return _call(updated_node.right, updated_node.left, updated_node)
        if isinstance(original_node.operator, cst.Add) and isinstance(original_node.left, cst.BinaryOperation):
            _, name, index = self._expert(original_node.left.right)
            is_product = isinstance(original_node.left.operator, cst.MatrixMultiply) and name in self._weights
            if is_product and self._understand_bias(original_node.right, name, index):
                return updated_node.left.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)
        return updated_node

    def _all_at_once(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """`torch.bmm(x, self.weight)`: every expert has its own part of the input."""
        weight, transposed = original.args[1].value, True
        if isinstance(weight, cst.Call) and code_of(weight).endswith(".transpose(1, 2)"):
            assert isinstance(weight.func, cst.Attribute)
            weight, transposed = weight.func.value, False
        name = self._mention(weight)
        if name not in self._weights:
            return updated
        self._understand(weight, name, transposed)
        parts = f"zip({self._this}.{name}, {code_of(updated.args[0].value)})"
        new = cst.parse_expression(f"torch.stack([expert(part) for expert, part in {parts}])")
        return new.with_changes(lpar=updated.lpar, rpar=updated.rpar)

    def leave_Subscript(  # noqa: N802
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.BaseExpression:
        # self.weight.shape[0]
        value = original_node.value
        if isinstance(value, cst.Attribute) and value.attr.value == "shape" and self._mention(value.value):
            (element,) = original_node.slice[:1]
            if isinstance(element.slice, cst.Index) and code_of(element.slice.value) == "0":
                return self._length(value.value, updated_node)
        return updated_node

    def _length(self, stack: cst.BaseExpression, updated: Any) -> cst.BaseExpression:
        self.understood.add(self._at(stack))
        length = cst.parse_expression(f"len({self._this}.{self._mention(stack)})")
        return length.with_changes(lpar=updated.lpar, rpar=updated.rpar)

    def leave_Comparison(  # noqa: N802
        self, original_node: cst.Comparison, updated_node: cst.Comparison
    ) -> cst.BaseExpression:
        # A list of layers is None as little as the parameter was.
        (target, *more) = original_node.comparisons
        is_none = isinstance(target.comparator, cst.Name) and target.comparator.value == "None"
        if self._mention(original_node.left) and is_none and not more:
            self.understood.add(self._at(original_node.left))
        return updated_node


def _call(function: cst.BaseExpression, argument: cst.BaseExpression, place: Any) -> cst.Call:
    return cst.Call(function, [cst.Arg(argument)], lpar=place.lpar, rpar=place.rpar)
