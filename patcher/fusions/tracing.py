"""Which projections of a method receive the very same value: proved on its source, or refused with the line.

The method is run on symbols. A value is known (a constant), or it is a symbol of its own; two projections read one
input where they are called with one symbol. What can't be followed makes a new symbol, so a doubt ends in a refusal,
never in a wrong fusion.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Assumptions",
    "Cluster",
    "Constant",
    "NotUnderstoodError",
    "Site",
    "clusters_of",
    "self_of",
    "written_calls",
]


class NotUnderstoodError(Exception):
    """What stands in the way, and the line of the method's source where it does."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


#: What an attribute may be so that a branch can be decided by it.
Constant = None | bool | int | float | str


@dataclass(frozen=True)
class Assumptions:
    """What is taken for granted of a call; the rewritten method checks it and leaves other calls to the original.

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


@dataclass(frozen=True)
class Site:
    """One call of a projection, by its place in the source."""

    name: str
    line: int
    column: int


@dataclass
class Cluster:
    """Calls that share one input: they can share one projection, computed before the statement of the first."""

    anchor: ast.stmt
    argument: ast.expr
    sites: list[Site] = field(default_factory=list)
    #: some of the calls run only under a condition that nothing here decides
    conditional: bool = False
    suite: tuple[int, ...] = ()
    value: object = None
    epoch: int = 0


class _Symbol:
    """A value of which nothing is known but, perhaps, whether it is true."""

    def __init__(self, truth: bool | None = None) -> None:
        self.truth = truth


class _Known:
    """A constant."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def truth(self) -> bool:
        return bool(self.value)


_Value = _Symbol | _Known
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_Scopes = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.FunctionDef, ast.ClassDef)


def written_calls(function: ast.FunctionDef, group: Iterable[str]) -> list[tuple[str, int]]:
    """(projection, line) of each call that the source spells out, whether it can be reached or not."""
    names, this = frozenset(group), self_of(function)
    return [
        (name, node.lineno)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and (name := _attribute_of(this, node.func)) in names
    ]


def self_of(function: ast.FunctionDef, default: str = "") -> str:
    """What a method calls its first parameter."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else default


def _attribute_of(this: str, node: ast.AST) -> str:
    """The name of the attribute that an expression reads of `self`, `self.name`; empty if it is none."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == this:
        return node.attr
    return ""


def clusters_of(
    function: ast.FunctionDef, group: tuple[str, ...], assumptions: Assumptions = Assumptions()
) -> list[Cluster]:
    """The clusters of a method's live calls of the projections in `group`; none if it calls none of them.

    Raises:
        NotUnderstoodError: some of them don't provably share their input.
    """
    run = _Run(function, group, assumptions)
    run.suite(function.body, ())
    for cluster in run.clusters:
        called = {site.name for site in cluster.sites}
        if missing := [name for name in group if name not in called]:
            shown = ast.unparse(cluster.argument)
            others = {
                f"{site.name}({ast.unparse(other.argument)})"
                for other in run.clusters
                if other is not cluster
                for site in other.sites
                if site.name in missing
            }
            reason = f"{', '.join(sorted(called))} of {shown!r}, but {', '.join(missing)} " + (
                f"not of the same value: {', '.join(sorted(others))}" if others else "is not called with it"
            )
            raise NotUnderstoodError(reason, cluster.sites[0].line)
    return run.clusters


class _Run:
    """One symbolic run of a method."""

    def __init__(self, function: ast.FunctionDef, group: tuple[str, ...], assumptions: Assumptions) -> None:
        self.this = self_of(function)
        self.group = frozenset(group)
        self.attributes: Mapping[str, Constant] = dict(assumptions.attributes)
        self.identities = frozenset(assumptions.identities)
        self.clusters: list[Cluster] = []
        self.names: dict[str, _Value] = {}
        self.epoch = 0
        self._statement: ast.stmt | None = None
        self._suite: tuple[int, ...] = ()
        self._maybe = 0  # inside of an expression that may not be evaluated
        self._suites = 0
        #: suites that run only under a condition that nothing decides
        self._undecided: set[int] = set()
        #: suites of `with` statements: what is computed inside must not move out
        self._barriers: set[int] = set()
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        shared = _Symbol()
        for parameter in parameters:
            self.names[parameter.arg] = _Known(None) if parameter.arg in assumptions.none else _Symbol()
            if parameter.arg in assumptions.same:
                self.names[parameter.arg] = shared

    # --- statements ------------------------------------------------------------------------------------------------

    def suite(self, statements: list[ast.stmt], path: tuple[int, ...]) -> bool:
        """Run statements one after the other; whether the end is reached."""
        for statement in statements:
            self._statement, self._suite = statement, path
            if not self.statement(statement, path):
                return False
        return True

    def _enter(self, path: tuple[int, ...], *, undecided: bool = False) -> tuple[int, ...]:
        self._suites += 1
        if undecided:
            self._undecided.add(self._suites)
        return (*path, self._suites)

    def statement(self, node: ast.stmt, path: tuple[int, ...]) -> bool:
        match node:
            case ast.Return() | ast.Raise():
                for child in ast.iter_child_nodes(node):
                    self.value(child)
                return False
            case ast.Break() | ast.Continue():
                return False
            case ast.Assign():
                value = node.value
                for target in node.targets:
                    if _same_tuples(target, value):
                        results = [self.value(element) for element in value.elts]  # type: ignore[attr-defined]
                        for one, result in zip(target.elts, results, strict=True):  # type: ignore[attr-defined]
                            self.assign(one, result)
                        return True
                result = self.value(value)
                for target in node.targets:
                    self.assign(target, result)
            case ast.AnnAssign():
                if node.value is not None:
                    self.assign(node.target, self.value(node.value))
            case ast.AugAssign():
                self.value(node.value)
                self._changed_in_place()
                self.assign(node.target, _Symbol())
            case ast.If():
                return self._if(node, path)
            case ast.For() | ast.While():
                self.value(node.iter if isinstance(node, ast.For) else node.test)
                self._forget(node)
                if isinstance(node, ast.For):
                    self.assign(node.target, _Symbol())
                self.suite(node.body, self._enter(path, undecided=True))
                self._forget(node)
                self.suite(node.orelse, self._enter(path, undecided=True))
            case ast.With():
                for item in node.items:
                    self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, _Symbol())
                inner = self._enter(path)
                self._barriers.add(inner[-1])
                return self.suite(node.body, inner)
            case ast.FunctionDef() | ast.ClassDef() | ast.Try() | ast.Match():
                self._no_calls_in(node)
                self._forget(node)
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.names[node.name] = _Symbol()
            case ast.Expr() | ast.Assert() | ast.Delete():
                for child in ast.iter_child_nodes(node):
                    self.value(child)
            case ast.Pass() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
                self._forget(node)
            case _:
                self._no_calls_in(node)
                self._forget(node)
        return True

    def _if(self, node: ast.If, path: tuple[int, ...]) -> bool:
        truth = self.value(node.test).truth
        if truth is not None:
            # Under the assumptions the branch runs for certain: as if it stood in the place of the statement.
            return self.suite(node.body if truth else node.orelse, path)
        before, results, open_ends = dict(self.names), [], []
        for body in (node.body, node.orelse):
            self.names = dict(before)
            open_ends.append(self.suite(body, self._enter(path, undecided=True)))
            results.append(self.names)
        if open_ends[0] != open_ends[1]:
            # What follows runs only if the other branch was taken: not under a condition that we know nothing of,
            # but the calls of the branch that has left are none of its business.
            self.names = results[open_ends.index(True)]
        else:
            self.names = {
                name: results[0][name] if results[0].get(name) is results[1].get(name) else _Symbol()
                for name in {*results[0], *results[1]}
            }
        return any(open_ends)

    def assign(self, target: ast.expr, value: _Value) -> None:
        match target:
            case ast.Name():
                self.names[target.id] = value
            case ast.Tuple() | ast.List():
                for element in target.elts:
                    self.assign(element, _Symbol())
            case ast.Starred():
                self.assign(target.value, _Symbol())
            case ast.Subscript():
                self.value(target.value)
                self.value(target.slice)
                self._changed_in_place()
            case ast.Attribute():
                self.value(target.value)
                if _attribute_of(self.this, target):
                    if target.attr in self.group:
                        raise NotUnderstoodError(f"{target.attr} is assigned", target.lineno)
                    if target.attr in self.attributes or target.attr in self.identities:
                        raise NotUnderstoodError(f"self.{target.attr} changes", target.lineno)
                else:
                    self._changed_in_place()  # `x.data = ...`

    def _changed_in_place(self) -> None:
        self.epoch += 1

    def _forget(self, node: ast.AST) -> None:
        """What a piece of code that isn't followed may assign is unknown after it."""
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store | ast.Del):
                self.names[child.id] = _Symbol()
            elif isinstance(child, ast.alias):
                self.names[(child.asname or child.name).split(".")[0]] = _Symbol()
            elif isinstance(child, ast.AugAssign):
                self._changed_in_place()

    def _no_calls_in(self, node: ast.AST) -> None:
        for child in ast.walk(node):
            if (name := _attribute_of(self.this, child)) in self.group:
                raise NotUnderstoodError(f"{name} is used inside of a {type(node).__name__}", child.lineno)  # type: ignore[attr-defined]

    # --- expressions -----------------------------------------------------------------------------------------------

    def value(self, node: ast.AST) -> _Value:
        match node:
            case ast.Constant():
                return _Known(node.value)
            case ast.Name():
                return self.names.setdefault(node.id, _Symbol())
            case ast.NamedExpr():
                result = self.value(node.value)
                self.assign(node.target, result)
                return result
            case ast.Attribute():
                if (name := _attribute_of(self.this, node)) in self.attributes:
                    return _Known(self.attributes[name])
                self.value(node.value)
                return _Symbol()
            case ast.Call():
                return self._call(node)
            case ast.IfExp():
                truth = self.value(node.test).truth
                if truth is not None:
                    return self.value(node.body if truth else node.orelse)
                with_body, otherwise = self._perhaps(node.body), self._perhaps(node.orelse)
                return with_body if with_body is otherwise else _Symbol()
            case ast.BoolOp():
                return self._bool(node)
            case ast.UnaryOp(op=ast.Not()):
                truth = self.value(node.operand).truth
                return _Symbol() if truth is None else _Known(not truth)
            case ast.Compare():
                return self._compare(node)
            case _ if isinstance(node, _Scopes):
                self._no_calls_in(node)
                return _Symbol()
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr | ast.keyword | ast.FormattedValue):
                        self.value(child)
                return _Symbol()

    def _perhaps(self, node: ast.expr) -> _Value:
        self._maybe += 1
        try:
            return self.value(node)
        finally:
            self._maybe -= 1

    def _bool(self, node: ast.BoolOp) -> _Value:
        decisive = isinstance(node.op, ast.Or)
        unknown = False
        result: _Value = _Symbol()
        for operand in node.values:
            result = self._perhaps(operand) if unknown else self.value(operand)
            if result.truth is decisive:
                return _Symbol(truth=decisive) if unknown else result
            unknown = unknown or result.truth is None
        return _Symbol() if unknown else result

    def _compare(self, node: ast.Compare) -> _Value:
        values = [self.value(operand) for operand in (node.left, *node.comparators)]
        if len(values) != 2:
            return _Symbol()
        left, right = values
        sign = node.ops[0]
        negated = isinstance(sign, ast.IsNot | ast.NotEq)
        if isinstance(left, _Known) and isinstance(right, _Known):
            if isinstance(sign, ast.Is | ast.IsNot):
                return _Known((left.value is right.value) is not negated)
            if isinstance(sign, ast.Eq | ast.NotEq):
                return _Known((left.value == right.value) is not negated)
            if type(sign) in _ORDER and _are_numbers(left.value, right.value):
                return _Known(_ORDER[type(sign)](left.value, right.value))
        elif left is right and isinstance(sign, ast.Is | ast.IsNot):
            return _Known(not negated)
        return _Symbol()

    def _call(self, node: ast.Call) -> _Value:
        name, own = getattr(node.func, "attr", ""), _attribute_of(self.this, node.func)
        if own in self.group:
            if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
                raise NotUnderstoodError(f"{name} is called with more than one input", node.lineno)
            argument = node.args[0]
            self._record(name, node, argument, self.value(argument))
            return _Symbol()
        alone = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        if own in self.identities and alone:  # it gives back what it gets
            return self.value(node.args[0])
        self.value(node.func)
        for argument in node.args:
            self.value(argument)
        for keyword in node.keywords:
            self.value(keyword.value)
            if keyword.arg == "out":
                self._changed_in_place()
            if keyword.arg == "inplace" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                self._changed_in_place()
        if name.endswith("_") and not name.startswith("_"):
            self._changed_in_place()
        return _Symbol()

    def _record(self, name: str, node: ast.Call, argument: ast.expr, value: _Value) -> None:
        assert self._statement is not None
        site = Site(name, node.lineno, node.col_offset)
        for cluster in self.clusters:
            depth = len(cluster.suite)
            deeper = self._suite[depth:]
            if (
                cluster.value is value
                and cluster.epoch == self.epoch
                and self._suite[:depth] == cluster.suite
                and not self._barriers.intersection(deeper)
            ):
                cluster.sites.append(site)
                if self._maybe or self._undecided.intersection(deeper):
                    cluster.conditional = True
                return
        if not isinstance(argument, ast.Name):
            shown = ast.unparse(argument)
            raise NotUnderstoodError(f"the input of {name} is {shown!r}, not a name", node.lineno)
        if not isinstance(self._statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
            raise NotUnderstoodError(f"{name} is called in the head of a compound statement", node.lineno)
        if self._maybe:
            raise NotUnderstoodError(f"{name} is called in a part of an expression that may not run", node.lineno)
        self.clusters.append(Cluster(self._statement, argument, [site], False, self._suite, value, self.epoch))


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _same_tuples(target: ast.expr, value: ast.expr) -> bool:
    """Whether this is `a, b = c, d`, element by element."""
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)) or len(target.elts) != len(value.elts):
        return False
    return not any(isinstance(element, ast.Starred) for element in [*target.elts, *value.elts])


def names_in(node: ast.AST) -> Iterator[str]:
    """Every name that a piece of source uses, attributes included."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.arg):
            yield child.arg
