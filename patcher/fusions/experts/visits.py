"""The loop over experts, changed in which experts it visits: all in training, or all with all tokens."""

from __future__ import annotations

import ast

import libcst as cst

from patcher.fusions.experts.loops import ExpertLoop, TokenChoice, without_rows
from patcher.fusions.methods import NotUnderstoodError, names_in
from patcher.source.trees import code_of


def visiting_all_in_training(source: str, this: str, loop: ExpertLoop) -> str:
    """The source of a forward whose loop visits every expert where `every_expert_runs` says so."""
    module = cst.parse_module(source).visit(_InTraining(this, loop))
    return _with_incomplete(module, this, loop).code


def visiting_all_with_all_tokens(source: str, this: str, loop: ExpertLoop) -> str:
    """The source of a forward in which every expert computes every token, and those that didn't choose it get nothing.

    Raises:
        NotUnderstoodError: the loop doesn't choose tokens by itself, or needs its choice for something else as well.
    """
    if loop.choice is None:
        raise NotUnderstoodError("all_tokens=True: the caller chooses the tokens of each expert", loop.line)
    _check_writes(ast.parse(source), loop)
    weights = "expert_weights"
    while weights in names_in(ast.parse(source)):
        weights += "_"
    module = cst.parse_module(source).visit(_WithAllTokens(this, loop, loop.choice, weights))
    module = _with_incomplete(module, this, loop)
    for name in (loop.choice.hit, loop.choice.mask, loop.choice.position, loop.choice.token):
        if name in names_in(ast.parse(module.code)):
            raise NotUnderstoodError(f"all_tokens=True: {name} is used besides the choice of tokens", loop.line)
    return module.code


def _check_writes(tree: ast.AST, loop: ExpertLoop) -> None:
    """Raise if the loop may write into what it is given: into a copy of some rows before, into all of them here."""
    body = (statement for found in ast.walk(tree) if isinstance(found, ast.For) for statement in found.body)
    for node in (inner for statement in body for inner in ast.walk(statement)):
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        writes = name.endswith("_") and not name.endswith("__") and name != "index_add_"
        if isinstance(node, ast.Call | ast.AugAssign) and (writes or isinstance(node, ast.AugAssign)):
            raise NotUnderstoodError("all_tokens=True: the loop changes something in place", node.lineno)


def _is_over(node: cst.For, iterable: str) -> bool:
    return isinstance(node.iter, cst.Name) and node.iter.value == iterable


def _tested(node: cst.If) -> ast.expr:
    return ast.parse(code_of(node.test).strip(), mode="eval").body


class _OfNumbers(cst.CSTTransformer):
    """A loop that runs over the numbers of experts themselves, in whatever tensors the model's own has them."""

    def __init__(self, this: str, loop: ExpertLoop) -> None:
        super().__init__()
        self._this = this
        self._loop = loop

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        match ast.parse(code_of(original_node).strip()).body:
            case [ast.Assign(targets=[ast.Name(id=name)])] if name in self._loop.numbers:
                if name == self._loop.target:
                    return cst.RemoveFromParent()
                assigned = cst.parse_statement(f"{name} = {self._loop.target}")
                return updated_node.with_changes(body=cst.ensure_type(assigned, cst.SimpleStatementLine).body)
        return updated_node


class _InTraining(_OfNumbers):
    def __init__(self, this: str, loop: ExpertLoop) -> None:
        super().__init__(this, loop)
        self._hit = loop.choice.hit if loop.choice else ""
        self._mask = f"{loop.choice.mask}[{loop.target}]" if loop.choice else ""

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        if not _is_over(original_node, self._hit):
            return updated_node
        # Here, and in no method: one that is given a tensor and gives it back is a graph of its own for torch.compile.
        # On the CPU, where looking an expert up by its number doesn't wait for an accelerator each time.
        numbers = f"range(len({self._this})) if {self._this}.every_expert_runs() else {self._hit}.flatten().cpu()"
        return updated_node.with_changes(iter=cst.parse_expression(numbers))

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If:  # noqa: N802
        if not without_rows(_tested(original_node)):
            return updated_node
        # In this order: whether there are rows isn't known while a program is exported.
        test = f"not {self._this}.every_expert_runs() and {code_of(updated_node.test)}"
        return updated_node.with_changes(test=cst.parse_expression(test))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        # A number gives the mask of one expert without the dimension that a tensor of one number gives it.
        if self._mask and code_of(original_node) == f"{self._mask}.squeeze(0)":
            return cst.ensure_type(updated_node.func, cst.Attribute).value
        return updated_node


class _WithAllTokens(_OfNumbers):
    def __init__(self, this: str, loop: ExpertLoop, choice: TokenChoice, weights: str) -> None:
        super().__init__(this, loop)
        self._choice = choice
        self._name = weights
        self._weight = f"{weights}[:, {loop.target}, None]"

    def leave_For(  # noqa: N802
        self, original_node: cst.For, updated_node: cst.For
    ) -> cst.For | cst.FlattenSentinel[cst.BaseStatement]:
        if not _is_over(original_node, self._choice.hit):
            return updated_node
        made = f"{self._name} = {self._this}.expert_weights({self._choice.chosen}, {self._choice.weights})"
        every = updated_node.with_changes(iter=cst.parse_expression(f"range(len({self._this}))"))
        return cst.FlattenSentinel([cst.parse_statement(made), every])

    def leave_If(  # noqa: N802
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.If | cst.RemovalSentinel:
        # Every expert has rows, and the loop ends before numbers that no expert has.
        body = original_node.body.body
        ends = len(body) == 1 and isinstance(body[0], cst.SimpleStatementLine)
        test = _tested(original_node)
        beyond = {f"{number} == {self._this}.{name}" for number in self._loop.numbers for name in self._loop.beyond}
        if ends and not original_node.orelse and (without_rows(test) or ast.unparse(test) in beyond):
            return cst.RemoveFromParent()
        return updated_node

    def leave_With(  # noqa: N802
        self, original_node: cst.With, updated_node: cst.With
    ) -> cst.With | cst.RemovalSentinel:
        return updated_node if updated_node.body.body else cst.RemoveFromParent()

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        choice = self._choice
        match ast.parse(code_of(original_node).strip()).body:
            case [ast.Assign(targets=[ast.Name(id=name)])] if name in (choice.mask, choice.hit):
                return cst.RemoveFromParent()
            case [ast.Assign(targets=[ast.Tuple(elts=[_, ast.Name(id=name)])])] if name == choice.token:
                return cst.RemoveFromParent()
        return super().leave_SimpleStatementLine(original_node, updated_node)

    def leave_Subscript(  # noqa: N802
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.BaseExpression:
        index = ast.parse(code_of(original_node), mode="eval").body
        assert isinstance(index, ast.Subscript)
        if ast.unparse(index.slice) == self._choice.token:
            return updated_node.value
        if ast.unparse(index.slice) == f"({self._choice.token}, {self._choice.position}, None)":
            return cst.parse_expression(self._weight)
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        function = original_node.func
        if not isinstance(function, cst.Attribute) or function.attr.value != "index_add_":
            return updated_node
        rows = updated_node.args[2].value
        text = code_of(rows)
        if not isinstance(rows, cst.Name | cst.Call | cst.Attribute | cst.Subscript) and not rows.lpar:
            text = f"({text})"
        # Not the product with a weight of zero alone: an expert that wasn't chosen may overflow.
        kept = f"{text}.masked_fill({self._weight} == 0, 0)"
        attribute = cst.ensure_type(updated_node.func, cst.Attribute).with_changes(attr=cst.Name("add_"))
        return updated_node.with_changes(func=attribute, args=[cst.Arg(cst.parse_expression(kept))])


def _with_incomplete(module: cst.Module, this: str, loop: ExpertLoop) -> cst.Module:
    """Where experts may lack layers, those that they have take part in what the forward returns."""
    return module.visit(_Returning(this)) if loop.complete else module


class _Returning(cst.CSTTransformer):
    def __init__(self, this: str) -> None:
        super().__init__()
        self._this = this

    def leave_Return(self, original_node: cst.Return, updated_node: cst.Return) -> cst.Return:  # noqa: N802
        if updated_node.value is None:
            return updated_node
        value = f"{self._this}.with_incomplete_experts({code_of(updated_node.value)})"
        return updated_node.with_changes(value=cst.parse_expression(value))
