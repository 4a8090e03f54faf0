"""Which projections of a method receive the very same value: proved on its source, or refused with the line.

The method is run on symbols. A value is known (a constant), or it is a symbol of its own; two projections read one
input where they are called with one symbol, and where nothing stands between them that may write into it or change how
they compute: between them only what is known to be pure may run. What can't be followed makes a new symbol, and may do
anything, so a doubt ends in a refusal, never in a wrong fusion.

The same run tells which results of projections may be written into afterwards.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from patcher.fusions.methods import Method, NotUnderstoodError, self_of
from patcher.fusions.proof.frames import Frame, parameters_of, shown
from patcher.fusions.proof.statements import Statements, Suites
from patcher.fusions.proof.values import Effect, Known, Summary, Value, part_root

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
        children: child of the module, or function that it keeps -> what a call of it does. It goes by what they are
            when the module is fused, and isn't checked again.
    """

    none: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    attributes: tuple[tuple[str, Constant], ...] = ()
    identities: tuple[str, ...] = ()
    children: tuple[tuple[str, Summary], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.none or self.same or self.attributes or self.identities)


@dataclass
class SharedInput:
    """Calls that share one input: they can share one projection, computed before the statement of the first."""

    anchor: ast.stmt
    argument: ast.Name
    #: the calls, with the projections that they call
    calls: dict[ast.Call, str]
    value: Value
    #: how much had happened before the statement of the first
    effects: int
    suites: Suites
    #: some of the calls run only under a condition that nothing here decides
    conditional: bool = False


@dataclass(frozen=True)
class Proof:
    """What is proved of a method.

    Attributes:
        inputs: those that its live calls of projections share.
        written: the projections whose results may be written into.
        children: the children of the module of which the proof made use.
    """

    inputs: tuple[SharedInput, ...]
    written: frozenset[str]
    children: frozenset[str]


def called_projections(function: ast.FunctionDef, group: Iterable[str]) -> set[str]:
    """The projections of which the source spells out a call, whether it can be reached or not."""
    this = self_of(function)
    called = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {
        func.attr
        for func in called
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == this
    } & set(group)


def prove(cls: type[Any], method: Method, group: tuple[str, ...], guards: Guards = Guards()) -> Proof:
    """The inputs that a method's live calls of the projections in `group` share; none if it calls none of them.

    Raises:
        NotUnderstoodError: some of them don't provably share their input.
    """
    run = _Run(cls, method, group, guards)
    run.body(method.node.body)
    run.escape(run.frame.returned)
    for shared in run.found:
        called = set(shared.calls.values())
        if missing := [name for name in group if name not in called]:
            shown_calls = f"{', '.join(sorted(called))} of {ast.unparse(shared.argument)!r}"
            raise NotUnderstoodError(f"{shown_calls}, but {', '.join(missing)} {run.why(missing)}", _line_of(shared))
    return Proof(tuple(run.found), frozenset(run.written), frozenset(run.root.used))


def _line_of(shared: SharedInput) -> int:
    return next(iter(shared.calls)).lineno


class _ModuleItself:
    """The module whose method runs."""

    def __init__(self, cls: type[Any], children: Mapping[str, Summary]) -> None:
        self.cls = cls
        self.children = children
        self.used: set[str] = set()

    def child(self, name: str) -> Summary | None:
        if name in self.children:
            self.used.add(name)
        return self.children.get(name)


class _Run(Statements):
    """One symbolic run of a method."""

    root: _ModuleItself

    def __init__(self, cls: type[Any], method: Method, group: tuple[str, ...], guards: Guards) -> None:
        node, root = method.node, _ModuleItself(cls, dict(guards.children))
        names = {name: Value() for name in parameters_of(node)}
        names |= {rest.arg: Value() for rest in (node.args.vararg, node.args.kwarg) if rest is not None}
        names |= dict.fromkeys(guards.none, Known(None)) | dict.fromkeys(guards.same, Value())
        names[self_of(node)] = Value(module=root)
        self.identities = frozenset(guards.identities)
        attributes = dict(guards.attributes)
        frame = Frame(method.function, node, names, cls)
        super().__init__(frame, root, frozenset(group), attributes, {*attributes, *self.identities})
        self.found: list[SharedInput] = []
        #: calls that would share an input but for what stands between: projection -> that
        self._separated: dict[str, Effect] = {}
        self._statement: ast.stmt = node
        self._suites: Suites = ()
        self._before: tuple[dict[str, Value], int] = (names, 0)

    def begin(self, statement: ast.stmt, suites: Suites) -> None:
        if len(self.frames) == 1 and not self.dry:
            self._statement, self._suites = statement, suites
            self._before = dict(self.names), len(self.effects)

    def why(self, missing: list[str]) -> str:
        """Why projections aren't called with an input."""
        for name in missing:
            if name in self._separated:
                return f"after {self._separated[name].reason}"
        others = {
            f"{name}({ast.unparse(s.argument)})" for s in self.found for name in s.calls.values() if name in missing
        }
        return f"not of the same value: {', '.join(sorted(others))}" if others else "is not called with it"

    def call(self, node: ast.Call) -> Value:
        match node.func:
            case ast.Attribute(value=ast.Name() as this, attr=name) if (
                name in self.identities and len(self.frames) == 1
            ):
                alone = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
                if alone and self.read(this.id).module is self.root:  # it gives back what it gets
                    return self.value(node.args[0])
        return super().call(node)

    def projection(self, name: str, node: ast.Call) -> Value:
        if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
            raise NotUnderstoodError(f"{name} is called with more than one input", node.lineno)
        (argument,) = node.args
        value = self.value(argument)
        if not self.dry:
            if any(isinstance(child, ast.NamedExpr) for child in ast.walk(argument)):
                raise NotUnderstoodError(f"the input of {name} is assigned in its call", node.lineno)
            self._record(name, node, argument, value)
        return Value(frozenset({part_root(name)}), tensor=True)

    def _between(self, value: Value, since: int) -> Effect | None:
        """What may have changed a value, or how projections compute."""
        happened = [*self.effects[since:], *([self.pending] if self.pending else [])]
        return next((effect for effect in happened if self.disturbs(effect, value)), None)

    def _record(self, name: str, node: ast.Call, argument: ast.expr, value: Value) -> None:
        separated = None
        for shared in self.found:
            depth = len(shared.suites)
            deeper = self._suites[depth:]
            if (
                shared.value is value
                and self._suites[:depth] == shared.suites
                and not any(suite.barrier for suite in deeper)
            ):
                effect = self._between(value, shared.effects)
                if effect is None:
                    shared.calls[node] = name
                    shared.conditional |= bool(self.maybe) or any(suite.undecided for suite in deeper)
                    return
                separated = separated or effect
        if separated is not None:
            self._separated.setdefault(name, separated)
        names, effects = self._before
        if not isinstance(argument, ast.Name):
            raise NotUnderstoodError(f"the input of {name} is {shown(argument)!r}, not a name", node.lineno)
        if not isinstance(self._statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
            raise NotUnderstoodError(f"{name} is called in the head of a compound statement", node.lineno)
        if self.maybe:
            raise NotUnderstoodError(f"{name} is called in a part of an expression that may not run", node.lineno)
        if names.get(argument.id, value) is not value:
            raise NotUnderstoodError(f"the input of {name} is assigned in the statement that calls it", node.lineno)
        if effect := self._between(value, effects):
            raise NotUnderstoodError(f"{name} is called after {effect.reason} in one statement", node.lineno)
        self.found.append(SharedInput(self._statement, argument, {node: name}, value, effects, self._suites))
