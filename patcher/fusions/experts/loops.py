"""The loop over experts in a forward: which experts it visits, and which tokens each of them is given.

```text
mask = one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
for expert_idx in hit:
    expert_idx = expert_idx[0]
    if expert_idx == self.num_experts:
        continue
    top_k_pos, token_idx = torch.where(mask[expert_idx])
    current = self.up_proj[expert_idx](hidden_states[token_idx])
    final.index_add_(0, token_idx, current * top_k_weights[token_idx, top_k_pos, None])
```

Such a loop gives an expert that isn't hit no rows and adds none of it, so visiting it changes nothing. It is read here
piece by piece: what isn't as above is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from patcher.fusions.experts.loop_effects import check_effects
from patcher.fusions.methods import NotUnderstoodError


@dataclass(frozen=True)
class TokenChoice:
    """How a loop chooses the tokens of an expert, by the names of its variables.

    Attributes:
        hit: the numbers of the experts that have tokens, over which the loop runs.
        mask: (experts, choices, tokens), one where a token's choice is the expert.
        chosen: the experts that tokens choose, (tokens, choices).
        weights: what these weigh.
        position: which choice of its tokens the expert is.
        token: the tokens that choose the expert.
    """

    hit: str
    mask: str
    chosen: str
    weights: str
    position: str
    token: str


@dataclass(frozen=True)
class ExpertLoop:
    """The loop in which the experts of a forward run.

    Attributes:
        line: where it starts.
        target: the variable of the loop.
        numbers: the variables that hold the number of the expert, the target among them.
        choice: how it chooses tokens; None where it visits all experts anyway, with what the caller gives each.
        beyond: attributes of the module that are compared with the number: what has this number is no expert.
        complete: attributes of the module; experts from this number on don't run.
    """

    line: int
    target: str
    numbers: frozenset[str]
    choice: TokenChoice | None
    beyond: frozenset[str] = field(default=frozenset())
    complete: frozenset[str] = field(default=frozenset())


def expert_loop(function: ast.FunctionDef, this: str, stacks: Sequence[str]) -> ExpertLoop | None:
    """The loop that runs the experts; None where a forward runs them all at once.

    Args:
        function: the forward.
        this: what it calls its first parameter.
        stacks: the parameters that hold the weights of all experts.

    Raises:
        NotUnderstoodError: there is a loop that isn't known to give an expert without tokens nothing to do.
    """
    reading = _Reading(function, this, stacks)
    uses = [node for node in ast.walk(function) if reading.is_one_expert(node)]
    if not uses:
        return None
    loops = [reading.loop_around(use) for use in uses]
    for use, loop in zip(uses, loops, strict=True):
        if loop is None or loop is not loops[0]:
            why = "the weight of one expert is used outside of one loop over the experts"
            raise NotUnderstoodError(why, getattr(use, "lineno", None))
    assert loops[0] is not None
    return reading.read(loops[0], uses)


class _Reading:
    def __init__(self, function: ast.FunctionDef, this: str, stacks: Sequence[str]) -> None:
        self.function = function
        self.this = this
        self.stacks = stacks
        self.parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}

    # What there is.

    def is_stack(self, node: ast.AST) -> bool:
        return self.attribute(node) in self.stacks

    def attribute(self, node: ast.AST) -> str:
        return attribute_of(self.this, node)

    def is_one_expert(self, node: ast.AST) -> bool:
        """Whether it is `self.stack[...]`, and no shape."""
        return isinstance(node, ast.Subscript) and self.is_stack(node.value)

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """A node and what it is in, outwards."""
        while node in self.parents:
            yield node, self.parents[node]
            node = self.parents[node]

    def loop_around(self, node: ast.AST) -> ast.For | None:
        """The loop in whose body a node is."""
        for inner, outer in self.above(node):
            if isinstance(outer, ast.For) and inner in outer.body:
                return outer
        return None

    def uses(self, name: str) -> list[ast.Name]:
        return [node for node in ast.walk(self.function) if isinstance(node, ast.Name) and node.id == name]

    def assigned(self, name: str) -> list[ast.expr]:
        """What is assigned to a variable, in the order of the source."""
        found = [
            node
            for node in ast.walk(self.function)
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]
        ]
        if len(found) != sum(isinstance(use.ctx, ast.Store) for use in self.uses(name)):
            raise NotUnderstoodError(f"{name} is assigned in a way that isn't understood", self.uses(name)[0].lineno)
        return [node.value for node in sorted(found, key=lambda node: node.lineno)]

    # What it means.

    def read(self, loop: ast.For, uses: Sequence[ast.AST]) -> ExpertLoop:
        if loop.orelse or not isinstance(loop.target, ast.Name):
            raise NotUnderstoodError("the loop over the experts has an else, or several variables", loop.lineno)
        numbers = {loop.target.id}
        known = 1
        for statement in loop.body:
            if isinstance(statement, ast.Assign) and (name := _number(statement, loop.target.id)):
                numbers.add(name)
                known += 1
        if len([use for name in numbers for use in self.uses(name) if isinstance(use.ctx, ast.Store)]) != known:
            raise NotUnderstoodError("the number of the expert is changed", loop.lineno)
        beyond, complete = set[str](), set[str]()
        guards = self._guards(loop, numbers, beyond)
        for use in uses:
            complete |= self._conditions(use, loop, numbers)
            self._check_number(use, numbers)
        choice = None
        if not (isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range"):
            choice = self._choice(loop, numbers, guards)
        elif guards:
            raise NotUnderstoodError("the loop over all experts leaves some out", loop.lineno)
        return ExpertLoop(
            loop.lineno, loop.target.id, frozenset(numbers), choice, frozenset(beyond), frozenset(complete)
        )

    def _check_number(self, use: ast.AST, numbers: set[str]) -> None:
        assert isinstance(use, ast.Subscript)
        if not isinstance(use.slice, ast.Name) or use.slice.id not in numbers:
            what = ast.unparse(use.slice)
            raise NotUnderstoodError(f"{ast.unparse(use)}: {what} isn't the number that the loop is at", use.lineno)

    def _guards(self, loop: ast.For, numbers: set[str], beyond: set[str]) -> list[str]:
        """The variables without whose rows the loop goes on to the next expert."""
        guards = []
        for node in (each for statement in loop.body for each in ast.walk(statement)):
            if isinstance(node, ast.Break | ast.Return | ast.While | ast.For | ast.Try):
                raise NotUnderstoodError("the loop over the experts may end early", node.lineno)
            if not isinstance(node, ast.Continue):
                continue
            condition = self.parents[node]
            if not isinstance(condition, ast.If) or condition.body != [node] or condition not in loop.body:
                raise NotUnderstoodError("the loop leaves out experts under a condition that isn't known", node.lineno)
            test = condition.test
            if name := without_rows(test):
                guards.append(name)
            elif (compared := _compared(test, numbers, ast.Eq)) is not None and (name := self.attribute(compared)):
                beyond.add(name)
            else:
                why = f"the loop leaves out experts under a condition that isn't known, {ast.unparse(test)}"
                raise NotUnderstoodError(why, node.lineno)
        return guards

    def _conditions(self, use: ast.AST, loop: ast.For, numbers: set[str]) -> set[str]:
        """The attributes that bound the numbers for which a weight is used."""
        found = set[str]()
        for inner, outer in self.above(use):
            if outer is loop:
                return found
            if isinstance(outer, ast.If) and inner in outer.orelse:
                tests = outer.test.values if isinstance(outer.test, ast.BoolOp) else [outer.test]
                either = not isinstance(outer.test, ast.BoolOp) or isinstance(outer.test.op, ast.Or)
                for test in tests:
                    compared = _compared(test, numbers, ast.GtE)
                    if either and compared is not None and (name := self.attribute(compared)):
                        found.add(name)
                    elif not (either and self._is_none(test)):
                        why = f"experts run under a condition that isn't known, not ({ast.unparse(outer.test)})"
                        raise NotUnderstoodError(why, outer.lineno)
            elif isinstance(outer, ast.If | ast.IfExp | ast.BoolOp | ast.Lambda | ast.comprehension | ast.With):
                raise NotUnderstoodError("the weight of an expert is used under a condition", use.lineno)  # type: ignore[attr-defined]
        raise AssertionError

    def _is_none(self, test: ast.AST) -> bool:
        """`self.stack is None`, which no stack is."""
        match test:
            case ast.Compare(left=stack, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
                return self.is_stack(stack)
        return False

    def _choice(self, loop: ast.For, numbers: set[str], guards: list[str]) -> TokenChoice:
        line = loop.lineno
        if not isinstance(loop.iter, ast.Name):
            raise NotUnderstoodError(f"the loop runs over {ast.unparse(loop.iter)}, not known to be experts", line)
        hit = loop.iter.id
        made = self.assigned(hit)
        if len(made) != 1 or ".nonzero(" not in ast.unparse(made[0]):
            raise NotUnderstoodError(f"the loop runs over {hit}, not known to be the experts that have tokens", line)
        position, token, mask = self._places(loop, numbers)
        if mask not in {node.id for node in ast.walk(made[0]) if isinstance(node, ast.Name)}:
            raise NotUnderstoodError(f"{hit} isn't made of {mask}", line)
        chosen = self._chosen(mask, line)
        weights = self._weights(position, token)
        for name, most in {position: 1, token: 1, chosen: 0, weights: 0}.items():
            stores = [use for use in self.uses(name) if isinstance(use.ctx, ast.Store)]
            if len(stores) > most:
                raise NotUnderstoodError(f"{name} is assigned in a way that isn't known", stores[-1].lineno)
        self._check_tokens(token, position, loop)
        check_effects(self.function, loop)
        if any(name != token for name in guards):
            raise NotUnderstoodError("the loop leaves out experts by something else than their tokens", line)
        return TokenChoice(hit, mask, chosen, weights, position, token)

    def _places(self, loop: ast.For, numbers: set[str]) -> tuple[str, str, str]:
        """(position, token, mask) of `position, token = torch.where(mask[number])`."""
        for statement in loop.body:
            match statement:
                case ast.Assign(
                    targets=[ast.Tuple(elts=[ast.Name(id=position), ast.Name(id=token)])],
                    value=ast.Call(func=function, args=[where]),
                ) if ast.unparse(function) == "torch.where":
                    if isinstance(where, ast.Call) and ast.unparse(where).endswith(".squeeze(0)"):
                        assert isinstance(where.func, ast.Attribute)
                        where = where.func.value
                    match where:
                        case ast.Subscript(value=ast.Name(id=mask), slice=ast.Name(id=number)) if number in numbers:
                            return position, token, mask
        raise NotUnderstoodError("the loop isn't seen to choose the tokens of an expert from a mask", loop.lineno)

    def _chosen(self, mask: str, line: int) -> str:
        """The experts that a mask is made of."""
        first, *changes = self.assigned(mask)
        texts = [ast.unparse(change) for change in changes]
        turned = "permute(2, 1, 0)"
        if ast.unparse(first).endswith(f".{turned}"):
            assert isinstance(first, ast.Call)
            assert isinstance(first.func, ast.Attribute)
            first, texts = first.func.value, [*texts, f"{mask}.{turned}"]
        match first:
            case ast.Call(func=function, args=[ast.Name(id=chosen), *_]) if ast.unparse(function).endswith(
                "one_hot"
            ) and texts == [f"{mask}.{turned}"]:
                return chosen
        raise NotUnderstoodError(f"{mask} isn't understood as a mask of the tokens of each expert", line)

    def _weights(self, position: str, token: str) -> str:
        """The variable that is read at `[token, position, None]`, wherever a position is used."""
        names = set()
        for use in self.uses(position):
            if isinstance(use.ctx, ast.Store):
                continue
            read = self.parents[self.parents[use]]
            if not isinstance(read, ast.Subscript) or ast.unparse(read.slice) != f"({token}, {position}, None)":
                raise NotUnderstoodError(
                    f"{position} is used for something else than the weight of tokens", use.lineno
                )
            names.add(ast.unparse(read.value))
        if len(names) != 1 or not (name := names.pop()).isidentifier():
            raise NotUnderstoodError("one variable should weigh the tokens of all experts")
        return name

    def _check_tokens(self, token: str, position: str, loop: ast.For) -> None:
        """Every use of the tokens is one that none of them leave without effect."""
        for use in self.uses(token):
            parent = self.parents[use]
            inside = self.loop_around(use) is loop
            match parent:
                case _ if not inside:
                    pass
                case ast.Tuple() if isinstance(use.ctx, ast.Store):
                    continue
                case ast.Tuple(elts=[_, ast.Name(id=name), ast.Constant(value=None)]) if name == position:
                    continue
                case ast.Subscript(value=ast.Name(), ctx=ast.Load()) if parent.slice is use:
                    continue
                case ast.Call(func=ast.Attribute(value=ast.Name(), attr="index_add_"), keywords=[]) if (
                    [*map(ast.unparse, parent.args[:2])] == ["0", token]
                    and len(parent.args) == 3
                    and isinstance(self.parents[parent], ast.Expr)
                ):
                    continue
                case ast.Attribute(attr="numel") if without_rows(self.parents[self.parents[parent]]) == token:
                    continue
            raise NotUnderstoodError(f"{token} is used in a way that isn't known", use.lineno)


def attribute_of(this: str, node: ast.AST) -> str:
    """`name` of `self.name`, or ""."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == this:
        return node.attr
    return ""


def without_rows(test: ast.AST) -> str:
    """The name in `name.numel() == 0`, or ""."""
    match test:
        case ast.Compare(
            left=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="numel")),
            ops=[ast.Eq()],
            comparators=[ast.Constant(value=0)],
        ):
            return name
    return ""


def _number(statement: ast.Assign, target: str) -> str:
    """The name that gets the number which the loop is at, or ""."""
    forms = {f"{target}[0]", f"{target}.item()", f"int({target}.item())", f"int({target}[0])", f"int({target})"}
    (name,) = statement.targets if len(statement.targets) == 1 else (None,)
    return name.id if isinstance(name, ast.Name) and ast.unparse(statement.value) in forms else ""


def _compared(test: ast.AST, numbers: set[str], operator: type[ast.cmpop]) -> ast.expr | None:
    """What the number of the expert is compared with."""
    match test:
        case ast.Compare(left=ast.Name(id=name), ops=[found], comparators=[other]):
            return other if name in numbers and isinstance(found, operator) else None
    return None
