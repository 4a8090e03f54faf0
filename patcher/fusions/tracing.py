"""Which projections of a method receive the very same value: proved on its source, or refused with the line.

The method is run on symbols. A value is known (a constant), or it is a symbol of its own; two projections read one
input where they are called with one symbol. What can't be followed makes a new symbol, so a doubt ends in a refusal,
never in a wrong fusion.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from patcher.source.call_sites import positional_parameters


class NotUnderstoodError(Exception):
    """What stands in the way, and the line of the method's source where it does."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


#: What an attribute may be so that a branch can be decided by it.
Constant = None | bool | int | float | str


@dataclass(frozen=True)
class Guards:
    """What is assumed of a call; the rewritten method checks it and leaves other calls to the original.

    Attributes:
        none: parameters that are None.
        same: parameters that are all one object.
        attributes: attribute of the module -> value.
        identities: children of the module that are `nn.Identity`.
    """

    none: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    attributes: tuple[tuple[str, Constant], ...] = ()
    identities: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.none or self.same or self.attributes or self.identities)


@dataclass(frozen=True, eq=False)
class _Suite:
    """A block of statements inside of a compound statement.

    Attributes:
        undecided: it runs only under a condition that nothing decides.
        barrier: it belongs to a `with`: what is computed inside must not move out.
    """

    undecided: bool = False
    barrier: bool = False


class _Value:
    """What an expression gives, told apart by identity; it may be known whether it is true, or what a tuple holds."""

    def __init__(self, truth: bool | None = None, parts: tuple[_Value, ...] = ()) -> None:
        self.truth = truth
        self.parts = parts


class _Known(_Value):
    """A constant."""

    def __init__(self, value: Any) -> None:
        super().__init__(bool(value))
        self.value = value


@dataclass
class SharedInput:
    """Calls that share one input: they can share one projection, computed before the statement of the first."""

    anchor: ast.stmt
    argument: ast.expr
    #: the calls, with the projections that they call
    calls: dict[ast.Call, str]
    value: _Value
    epoch: int
    suites: tuple[_Suite, ...]
    #: some of the calls run only under a condition that nothing here decides
    conditional: bool = False


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def self_of(function: ast.FunctionDef, default: str = "") -> str:
    """What a method calls its first parameter."""
    parameters = positional_parameters(function)
    return parameters[0].arg if parameters else default


def _attribute_of(this: str, node: ast.AST) -> str:
    """The name of the attribute that an expression reads of `self`, `self.name`; empty if it is none."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == this:
        return node.attr
    return ""


def called_projections(function: ast.FunctionDef, group: Iterable[str]) -> set[str]:
    """The projections of which the source spells out a call, whether it can be reached or not."""
    this = self_of(function)
    return {_attribute_of(this, node.func) for node in ast.walk(function) if isinstance(node, ast.Call)} & set(group)


def names_in(node: ast.AST) -> set[str]:
    """Every name that a piece of source uses, attributes included."""
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
    return {getattr(child, fields[type(child)]) for child in ast.walk(node) if type(child) in fields}


def shared_inputs_of(
    function: ast.FunctionDef, group: tuple[str, ...], guards: Guards = Guards()
) -> list[SharedInput]:
    """The inputs that a method's live calls of the projections in `group` share; none if it calls none of them.

    Raises:
        NotUnderstoodError: some of them don't provably share their input.
    """
    run = _Run(function, group, guards)
    run.suite(function.body, ())
    for shared in run.found:
        called = set(shared.calls.values())
        if missing := [name for name in group if name not in called]:
            others = {
                f"{name}({ast.unparse(other.argument)})"
                for other in run.found
                for name in other.calls.values()
                if name in missing
            }
            rest = f"not of the same value: {', '.join(sorted(others))}" if others else "is not called with it"
            shown = f"{', '.join(sorted(called))} of {ast.unparse(shared.argument)!r}"
            raise NotUnderstoodError(f"{shown}, but {', '.join(missing)} {rest}", next(iter(shared.calls)).lineno)
    return run.found


class _Run:
    """One symbolic run of a method."""

    def __init__(self, function: ast.FunctionDef, group: tuple[str, ...], guards: Guards) -> None:
        self.this = self_of(function)
        self.group = frozenset(group)
        self.attributes = dict(guards.attributes)
        self.identities = frozenset(guards.identities)
        self.found: list[SharedInput] = []
        parameters = [*positional_parameters(function), *function.args.kwonlyargs]
        self.names: dict[str, _Value] = {parameter.arg: _Value() for parameter in parameters}
        self.names |= dict.fromkeys(guards.none, _Known(None)) | dict.fromkeys(guards.same, _Value())
        self.epoch = 0  # how often something was changed in place
        self._statement: ast.stmt = function
        self._suites: tuple[_Suite, ...] = ()
        self._maybe = 0  # inside of an expression that may not be evaluated

    def suite(self, statements: list[ast.stmt], suites: tuple[_Suite, ...]) -> bool:
        """Run statements one after the other; whether the end is reached."""
        for statement in statements:
            self._statement, self._suites = statement, suites
            if not self.statement(statement, suites):
                return False
        return True

    def statement(self, node: ast.stmt, suites: tuple[_Suite, ...]) -> bool:
        match node:
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue() | ast.Expr() | ast.Assert() | ast.Delete():
                self.value(node)
                return isinstance(node, ast.Expr | ast.Assert | ast.Delete)
            case ast.Assign():
                result = self.value(node.value)
                for target in node.targets:
                    self.assign(target, result)
            case ast.AnnAssign():
                if node.value is not None:
                    self.assign(node.target, self.value(node.value))
            case ast.AugAssign():
                self.value(node.value)
                self.epoch += 1
                self.assign(node.target, _Value())
            case ast.If():
                return self._if(node, suites)
            case ast.For() | ast.While():
                self.value(node.iter if isinstance(node, ast.For) else node.test)
                self._forget(node)
                if isinstance(node, ast.For):
                    self.assign(node.target, _Value())
                self.suite(node.body, (*suites, _Suite(undecided=True)))
                self._forget(node)
                self.suite(node.orelse, (*suites, _Suite(undecided=True)))
            case ast.With():
                for item in node.items:
                    self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, _Value())
                return self.suite(node.body, (*suites, _Suite(barrier=True)))
            case _:
                self._no_calls_in(node)
                self._forget(node)
        return True

    def _if(self, node: ast.If, suites: tuple[_Suite, ...]) -> bool:
        truth = self.value(node.test).truth
        if truth is not None:
            # With the guards the branch runs for certain: as if it stood in the place of the statement.
            return self.suite(node.body if truth else node.orelse, suites)
        before, results, open_ends = self.names, [], []
        for body in (node.body, node.orelse):
            self.names = dict(before)
            open_ends.append(self.suite(body, (*suites, _Suite(undecided=True))))
            results.append(self.names)
        if open_ends[0] != open_ends[1]:
            # What follows runs only if the other branch was taken: not under a condition that we know nothing of,
            # but the calls of the branch that has left are none of its business.
            self.names = results[open_ends.index(True)]
        else:
            one, other = results
            self.names = {name: _either(one.get(name), other.get(name)) for name in {*one, *other}}
        return any(open_ends)

    def assign(self, target: ast.AST, value: _Value) -> None:
        match target:
            case ast.Name():
                self.names[target.id] = value
            case ast.Tuple() | ast.List():
                known = len(value.parts) == len(target.elts)
                for number, element in enumerate(target.elts):
                    self.assign(element, value.parts[number] if known else _Value())
            case ast.Starred():
                self.assign(target.value, _Value())
            case ast.Subscript() | ast.Attribute():
                self.value(target)
                self._write(target)

    def _write(self, target: ast.Subscript | ast.Attribute) -> None:
        own = _attribute_of(self.this, target)
        if own in self.group:
            raise NotUnderstoodError(f"{own} is assigned", target.lineno)
        if own in self.attributes or own in self.identities:
            raise NotUnderstoodError(f"self.{own} changes", target.lineno)
        if not own:
            self.epoch += 1  # `x[0] = ...`, `x.data = ...`

    def _forget(self, node: ast.AST) -> None:
        """What a piece of code may assign is unknown after it where it isn't followed, and before it in a loop."""
        for child in ast.walk(node):
            match child:
                case ast.Name(ctx=ast.Store() | ast.Del(), id=name):
                    self.names[name] = _Value()
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self.names[name] = _Value()
                case ast.alias(name=name, asname=asname):
                    self.names[asname or name.split(".")[0]] = _Value()
                case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                    self._write(child)
                case ast.Call() if _changes_in_place(child):
                    self.epoch += 1
                case ast.AugAssign():
                    self.epoch += 1

    def _no_calls_in(self, node: ast.AST) -> None:
        for child in ast.walk(node):
            if (name := _attribute_of(self.this, child)) in self.group:
                raise NotUnderstoodError(f"{name} is used inside of a {type(node).__name__}", child.lineno)  # type: ignore[attr-defined]

    def value(self, node: ast.AST) -> _Value:
        match node:
            case ast.Constant():
                return _Known(node.value)
            case ast.Name():
                return self.names.setdefault(node.id, _Value())
            case ast.NamedExpr():
                result = self.value(node.value)
                self.assign(node.target, result)
                return result
            case ast.Attribute() if (name := _attribute_of(self.this, node)) in self.attributes:
                return _Known(self.attributes[name])
            case ast.Tuple() if not any(isinstance(element, ast.Starred) for element in node.elts):
                return _Value(parts=tuple([self.value(element) for element in node.elts]))
            case ast.Call():
                return self._call(node)
            case ast.IfExp():
                truth = self.value(node.test).truth
                if truth is not None:
                    return self.value(node.body if truth else node.orelse)
                return _either(self._perhaps(node.body), self._perhaps(node.orelse))
            case ast.BoolOp():
                return self._bool(node)
            case ast.UnaryOp(op=ast.Not()):
                truth = self.value(node.operand).truth
                return _Value() if truth is None else _Known(not truth)
            case ast.Compare():
                return self._compare(node)
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._no_calls_in(node)
            case _:
                for child in ast.iter_child_nodes(node):
                    self.value(child)
        return _Value()

    def _perhaps(self, node: ast.expr) -> _Value:
        self._maybe += 1
        result = self.value(node)
        self._maybe -= 1
        return result

    def _bool(self, node: ast.BoolOp) -> _Value:
        decisive = isinstance(node.op, ast.Or)
        unknown = False
        result = _Value()
        for operand in node.values:
            result = self._perhaps(operand) if unknown else self.value(operand)
            if result.truth is decisive:
                return _Value(truth=decisive) if unknown else result
            unknown = unknown or result.truth is None
        return _Value() if unknown else result

    def _compare(self, node: ast.Compare) -> _Value:
        left, right, *more = [self.value(operand) for operand in (node.left, *node.comparators)]
        sign = type(node.ops[0])
        if isinstance(left, _Known) and isinstance(right, _Known):
            if sign in _COMPARISONS and not more:
                with suppress(TypeError):  # `None < 1`
                    return _Known(_COMPARISONS[sign](left.value, right.value))
        elif left is right and sign in (ast.Is, ast.IsNot) and not more:
            return _Known(sign is ast.Is)
        return _Value()

    def _call(self, node: ast.Call) -> _Value:
        own = _attribute_of(self.this, node.func)
        alone = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        if own in self.group:
            if not alone:
                raise NotUnderstoodError(f"{own} is called with more than one input", node.lineno)
            self._record(own, node, node.args[0], self.value(node.args[0]))
            return _Value()
        if own in self.identities and alone:  # it gives back what it gets
            return self.value(node.args[0])
        for child in ast.iter_child_nodes(node):
            self.value(child)
        if _changes_in_place(node):
            self.epoch += 1
        return _Value()

    def _record(self, name: str, node: ast.Call, argument: ast.expr, value: _Value) -> None:
        for shared in self.found:
            depth = len(shared.suites)
            deeper = self._suites[depth:]
            if (
                shared.value is value
                and shared.epoch == self.epoch
                and self._suites[:depth] == shared.suites
                and not any(suite.barrier for suite in deeper)
            ):
                shared.calls[node] = name
                shared.conditional |= bool(self._maybe) or any(suite.undecided for suite in deeper)
                return
        if not isinstance(argument, ast.Name):
            shown = ast.unparse(argument)
            raise NotUnderstoodError(f"the input of {name} is {shown!r}, not a name", node.lineno)
        if not isinstance(self._statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
            raise NotUnderstoodError(f"{name} is called in the head of a compound statement", node.lineno)
        if self._maybe:
            raise NotUnderstoodError(f"{name} is called in a part of an expression that may not run", node.lineno)
        self.found.append(SharedInput(self._statement, argument, {node: name}, value, self.epoch, self._suites))


def _either(one: _Value | None, other: _Value | None) -> _Value:
    """The value of what is one or the other, it isn't known which."""
    return one if one is not None and one is other else _Value()


def _changes_in_place(node: ast.Call) -> bool:
    """Whether a call writes into a tensor that it is given, by its name or its arguments."""
    name = getattr(node.func, "attr", "")
    set_to = {keyword.arg: keyword.value for keyword in node.keywords}
    in_place = set_to.get("inplace", ast.Constant(False))
    is_off = isinstance(in_place, ast.Constant) and not in_place.value
    return "out" in set_to or not is_off or (name.endswith("_") and not name.startswith("_"))
