"""The products of stacked weights in a forward, and what stands in their places: an edit of its syntax tree."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import ParentNodeProvider, PositionProvider

from patcher.fusions.experts.gate_splits import Methods, Split, handed_on, in_halves, is_chunk, splits_of
from patcher.fusions.methods import NotUnderstoodError, names_in
from patcher.source.trees import code_of

LINEAR = ("F.linear", "nn.functional.linear", "torch.nn.functional.linear", "functional.linear")

#: Stacks whose product is cut into gate and up.
GATE_AND_UP = ("gate_up_proj", "gate_up", "w13", "input_linear")
#: What a linear layer is called that is made of a stack of another name.
ROLES = {
    **dict.fromkeys(("gate_proj", "gate", "w1"), "gate_proj"),
    **dict.fromkeys(("up_proj", "up", "v1", "w3"), "up_proj"),
    **dict.fromkeys(("down_proj", "down", "w2", "output_linear"), "down_proj"),
}


class ByExperts(cst.CSTTransformer):
    """Puts the layers of experts in the place of stacks, and notes what it has seen of them.

    Args:
        this: what the forward calls its first parameter.
        weights: the stacked parameters -> the parameter with the biases, or "".
        function: the forward.
        methods: the methods of the class.

    Raises:
        NotUnderstoodError: a product isn't seen to be cut into gate and up.
    """

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self, this: str, weights: Mapping[str, str], function: ast.FunctionDef, methods: Methods) -> None:
        super().__init__()
        self._this = this
        self._weights = dict(weights)
        self._names = {*weights, *(bias for bias in weights.values() if bias)}
        self._function = function
        self._methods = methods
        #: (line, column) -> name of each mention of a stack, and the places of those that were understood
        self.mentioned: dict[tuple[int, int], str] = {}
        self.understood: set[tuple[int, int]] = set()
        self.transposed: dict[str, set[bool]] = {}
        self.splits: dict[str, set[Split]] = {}
        self.counted: set[str] = set()
        self.products: Counter[str] = Counter()
        self.with_bias: Counter[str] = Counter()
        #: products that are cut in halves where they stand -> the two
        self._halves: dict[cst.CSTNode, list[cst.BaseExpression]] = {}

    # What is mentioned.

    def part(self, name: str) -> str:
        """The layer that a stack becomes which isn't cut."""
        return "" if set(self._weights) == {name} == {"weight"} else ROLES.get(name, name)

    def _mention(self, node: cst.CSTNode) -> str:
        """The name of the stack that `node` is, `self.name`, or ""."""
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == self._this:
            return node.attr.value if node.attr.value in self._names else ""
        return ""

    def _at(self, node: cst.CSTNode) -> tuple[int, int]:
        start = self.get_metadata(PositionProvider, node).start
        return (start.line, start.column)

    def _parent(self, node: cst.CSTNode) -> cst.CSTNode:
        parent: cst.CSTNode = self.get_metadata(ParentNodeProvider, node)
        return parent

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

    # How a product is cut into gate and up.

    def _split(self, product: cst.BaseExpression, name: str) -> Split | None:
        """How a product of the stack is cut in two; None for stacks that aren't.

        Raises:
            NotUnderstoodError: it isn't seen to be cut.
        """
        if name not in GATE_AND_UP:
            return None
        parent = self._parent(product)
        line = self._at(product)[0]
        found: set[Split] = set()
        try:
            if isinstance(parent, cst.Arg):
                call = self._parent(parent)
                assert isinstance(call, cst.Call)
                node = ast.parse(code_of(call).strip(), mode="eval").body
                assert isinstance(node, ast.Call)
                found = handed_on(node, list(call.args).index(parent), self._this, self._methods)
            elif chunk := self._chunk_of(product):
                found = {in_halves(_assignment(self._parent(chunk)))}
            elif isinstance(parent, cst.Assign):
                target = parent.targets[0].target
                if isinstance(target, cst.Name) and len(parent.targets) == 1:
                    found = splits_of(self._function, target.value, self._methods)
        except NotUnderstoodError as error:
            raise NotUnderstoodError(str(error), line) from error
        if len(found) != 1:
            how = "in several ways" if found else "in a way that isn't known"
            raise NotUnderstoodError(f"the product with {self._this}.{name} is cut into gate and up {how}", line)
        self.splits.setdefault(name, set()).update(found)
        return next(iter(found))

    def _chunk_of(self, product: cst.BaseExpression) -> cst.Call | None:
        """The call `product.chunk(2, dim=-1)`."""
        attribute = self._parent(product)
        call = self._parent(attribute) if isinstance(attribute, cst.Attribute) else None
        if not isinstance(call, cst.Call) or call.func is not attribute:
            return None
        node = ast.parse(code_of(call).strip(), mode="eval").body
        return call if isinstance(node, ast.Call) and is_chunk(node) else None

    # What is rewritten.

    def _product(
        self, product: cst.BaseExpression, name: str, index: str, argument: cst.BaseExpression, place: Any
    ) -> cst.BaseExpression:
        """What stands in the place of the product of one expert.

        Args:
            product: what it was, with the bias.
            argument: what is multiplied.
            place: the node whose parentheses it gets.
        """
        split = self._split(product, name)
        expert = f"{self._this}[{index}]"
        given = code_of(argument.with_changes(lpar=[], rpar=[]) if isinstance(argument, cst.Name) else argument)
        if split is None:
            part = self.part(name)
            return _expression(f"{expert}.{part}({given})" if part else f"{expert}({given})", place)
        again = given
        if not isinstance(argument, cst.Name):  # evaluated once
            again = "expert_input"
            while again in names_in(self._function):
                again += "_"
            given = f"{again} := {given}"
        parts = [f"{expert}.{part}({value})" for part, value in zip(split.parts, (given, again), strict=True)]
        if self._chunk_of(product):
            self._halves[product] = [cst.parse_expression(part) for part in parts]
        return _expression(_joined(split, parts), place)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        function = code_of(original_node.func.with_changes(lpar=[], rpar=[]))
        arguments = original_node.args
        if any(argument.star for argument in arguments):
            return updated_node
        if function in LINEAR and len(arguments) in (2, 3):
            return self._linear(original_node, updated_node)
        if function == "torch.bmm" and len(arguments) == 2 and not any(argument.keyword for argument in arguments):
            return self._all_at_once(original_node, updated_node)
        if isinstance(original_node.func, cst.Attribute):
            owner = original_node.func.value
            if owner in self._halves:
                return cst.Tuple([cst.Element(part) for part in self._halves[owner]], lpar=[], rpar=[])
            # self.weight.size(0)
            sized = original_node.func.attr.value == "size" and len(arguments) == 1
            if sized and self._mention(owner) and code_of(arguments[0].value) == "0":
                return self._length(owner, updated_node)
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
        return self._product(original, name, index, updated.args[0].value, updated)

    def leave_BinaryOperation(  # noqa: N802
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        if isinstance(original_node.operator, cst.MatrixMultiply):
            expert, name, index = self._expert(original_node.right)
            if expert is None or name not in self._weights:
                return updated_node
            self._understand(expert.value, name, transposed=True)
            whole = self._parent(original_node)
            if not isinstance(whole, cst.BinaryOperation) or not self._is_biased(whole, original_node, name, index):
                whole = original_node
            return self._product(whole, name, index, updated_node.left, updated_node)
        product = original_node.left
        if isinstance(product, cst.BinaryOperation) and isinstance(product.operator, cst.MatrixMultiply):
            _, name, index = self._expert(product.right)
            if name in self._weights and self._is_biased(original_node, product, name, index):
                self._understand_bias(original_node.right, name, index)
                return updated_node.left.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)
        return updated_node

    def _is_biased(self, whole: cst.BinaryOperation, product: cst.BaseExpression, name: str, index: str) -> bool:
        """Whether it is the product of an expert, and its bias added to it."""
        _, bias, place = self._expert(whole.right)
        added = isinstance(whole.operator, cst.Add) and whole.left is product
        return added and bool(bias) and (bias, place) == (self._weights[name], index)

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
        split = self._split(original, name)
        own = self.part(name)
        parts = [f"expert.{part}(part)" if part else "expert(part)" for part in (split.parts if split else (own,))]
        given = f"zip({self._this}, {code_of(updated.args[0].value)})"
        each = _joined(split, parts) if split else parts[0]
        if self._chunk_of(original):
            self._halves[original] = [
                cst.parse_expression(f"torch.stack([{part} for expert, part in {given}])") for part in parts
            ]
        return _expression(f"torch.stack([{each} for expert, part in {given}])", updated)

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
        self.counted.add(self._mention(stack))
        return _expression(f"len({self._this})", updated)

    def leave_Comparison(  # noqa: N802
        self, original_node: cst.Comparison, updated_node: cst.Comparison
    ) -> cst.BaseExpression:
        # A stack that there is isn't None.
        (target, *more) = original_node.comparisons
        is_none = isinstance(target.comparator, cst.Name) and target.comparator.value == "None"
        if self._mention(original_node.left) and is_none and not more:
            self.understood.add(self._at(original_node.left))
            return cst.Name(str(isinstance(target.operator, cst.IsNot | cst.NotEqual)))
        return updated_node

    def leave_BooleanOperation(  # noqa: N802
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        right, was = updated_node.right, original_node.right
        neutral = "False" if isinstance(updated_node.operator, cst.Or) else "True"
        if isinstance(was, cst.Comparison) and isinstance(right, cst.Name) and right.value == neutral:
            return updated_node.left
        return updated_node


def _joined(split: Split, parts: Sequence[str]) -> str:
    """The product of the whole stack, of those of its parts."""
    both = ", ".join(parts)
    return f"torch.stack(({both}), dim=-1).flatten(-2)" if split.interleaved else f"torch.cat(({both}), dim=-1)"


def _expression(text: str, place: Any) -> cst.BaseExpression:
    return cst.parse_expression(text).with_changes(lpar=place.lpar, rpar=place.rpar)


def _assignment(node: cst.CSTNode) -> ast.Assign:
    """The assignment that a node is.

    Raises:
        NotUnderstoodError: it is none.
    """
    if isinstance(node, cst.Assign):
        (statement,) = ast.parse(code_of(node).strip()).body
        assert isinstance(statement, ast.Assign)
        return statement
    raise NotUnderstoodError("the two parts of a product have no names")
