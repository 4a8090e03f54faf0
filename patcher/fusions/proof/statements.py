"""The symbolic run of statements: branches that are decided or not, loops, blocks that may end anywhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from patcher.fusions.proof.calls_in_source import Calls
from patcher.fusions.proof.frames import bound_names, shown
from patcher.fusions.proof.values import FROM_OUTSIDE, NOTHING, Known, Value, either


@dataclass(frozen=True, eq=False)
class Suite:
    """A block of statements inside of a compound statement.

    Attributes:
        undecided: it runs only under a condition that nothing decides.
        barrier: it belongs to a `with`: what is computed inside must not move out.
    """

    undecided: bool = False
    barrier: bool = False


Suites = tuple[Suite, ...]


class Statements(Calls):
    """Runs statements."""

    #: inside of a loop or a block that may catch an exception: what leaves it may still go on behind it
    _caught = 0

    def begin(self, statement: ast.stmt, suites: Suites) -> None:
        """A statement begins."""

    def body(self, statements: list[ast.stmt]) -> None:
        if self.suite(statements, ()):
            self.frame.returned.append(Known(None))

    def suite(self, statements: Sequence[ast.stmt], suites: Suites) -> bool:
        """Run statements one after the other; whether the end is reached."""
        for statement in statements:
            self.begin(statement, suites)
            if not self.statement(statement, suites):
                return False
        return True

    def statement(self, node: ast.stmt, suites: Suites) -> bool:
        match node:
            case ast.Return():
                self.frame.returned.append(Known(None) if node.value is None else self.value(node.value))
                return False
            case ast.Raise() | ast.Break() | ast.Continue():
                self.value(node)
                return False
            case ast.Expr() | ast.Assert():
                self.value(node)
            case ast.Delete():
                for target in node.targets:
                    self._delete(target)
            case ast.Assign():
                result = self.value(node.value)
                for target in node.targets:
                    self.assign(target, result)
            case ast.AnnAssign():
                if node.value is not None:
                    self.assign(node.target, self.value(node.value))
            case ast.AugAssign():
                self._augmented(node)
            case ast.If():
                return self._if(node, suites)
            case ast.For() | ast.While():
                self._loop(node, suites)
            case ast.With():
                return self._with(node, suites)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.bind(node.name, self.code(node))
            case ast.Try():
                self._unordered(node, [node.body, *(one.body for one in node.handlers), node.orelse, node.finalbody])
            case ast.Match():
                self._unordered(node, [case.body for case in node.cases])
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Global() | ast.Nonlocal():
                self.frame.volatile.update(node.names)
            case ast.Pass():
                pass
            case _:
                self.refuse_projections_in(node)
                self.unknown(f"{type(node).__name__} {shown(node)!r}", node, self.names.values())
                for name in bound_names(node):
                    self.bind(name, Value())
        return True

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, Value(NOTHING))
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._delete(element)
        else:
            self.assign(target, Value(NOTHING))

    def _augmented(self, node: ast.AugAssign) -> None:
        load = ast.copy_location(_loaded(node.target), node.target)
        held = self.value(load)
        value = self.value(node.value)
        if held.roots:
            self.effect(f"{shown(node)!r}, which writes in place", node, held.roots)
        if held.tensor:
            result = Value(held.roots, tensor=True)
        else:  # a list takes in what is added to it, a tuple is made anew
            if held.parts is None and value.roots and held.roots:
                self.escape([held, value])
            new = value.tensor and not held.roots  # a number and a tensor
            result = Value(self.own(node) if new else held.roots | value.roots, tensor=value.tensor)
        if isinstance(node.target, ast.Name):
            self.bind(node.target.id, result)
        else:
            self.assign(node.target, result)

    def _if(self, node: ast.If, suites: Suites) -> bool:
        truth = self.value(node.test).truth
        if truth is not None:
            # With the guards the branch runs for certain: as if it stood in the place of the statement.
            return self.suite(node.body if truth else node.orelse, suites)
        before, count = self.names, len(self.effects)
        results, effects, open_ends = [], [], []
        for body in (node.body, node.orelse):
            self.frame.names = dict(before)
            open_ends.append(self.suite(body, (*suites, Suite(undecided=True))))
            results.append(self.names)
            effects.append(self.effects[count:])
            del self.effects[count:]
        if len(self.frames) == 1 and not self._caught:  # a branch that leaves the method does nothing to what follows
            effects = [one for one, is_open in zip(effects, open_ends, strict=True) if is_open]
        self.effects += [effect for one in effects for effect in one]
        if open_ends[0] != open_ends[1]:
            # What follows runs only if the other branch was taken: not under a condition that we know nothing of,
            # but the calls of the branch that has left are none of its business.
            self.frame.names = results[open_ends.index(True)]
        else:
            one, other = results
            self.frame.names = {name: either(one.get(name), other.get(name)) for name in {*one, *other}}
        return any(open_ends)

    def _loop(self, node: ast.For | ast.While, suites: Suites) -> None:
        self._caught += 1
        items = self.value(node.iter).element() if isinstance(node, ast.For) else None
        inside = (*suites, Suite(undecided=True))

        def turn() -> None:
            if isinstance(node, ast.For) and items is not None:
                self.assign(node.target, items)
            elif isinstance(node, ast.While):
                self.value(node.test)
            self.suite(node.body, inside)

        # What one turn does stands between the calls of the next and what comes before the loop.
        self.settle(bound_names(node), turn)
        turn()
        self.settle(bound_names(node), turn)
        self.suite(node.orelse, (*suites, Suite(undecided=True)))
        self.settle(bound_names(*node.orelse), lambda: self.suite(node.orelse, inside))
        self._caught -= 1

    def _with(self, node: ast.With, suites: Suites) -> bool:
        for item in node.items:
            self.unknown(f"'with {shown(item)}'", node, [])
            held = self.value(item.context_expr)
            self.escape([held])
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Value(held.roots | FROM_OUTSIDE))
        self._caught += 1
        names = bound_names(*node.body)
        before = {name: self.names[name].roots for name in names if name in self.names}
        self._assigned.append({})
        self.suite(node.body, (*suites, Suite(barrier=True)))
        added = self._assigned.pop()
        self._caught -= 1
        self.unknown(f"the end of 'with {', '.join(shown(item) for item in node.items)}'", node, [])
        for name in names:  # a context manager can end the block anywhere, by catching what is raised
            self.bind(name, Value(before.get(name, NOTHING) | frozenset(added.get(name, ()))))
        return True

    def _unordered(self, node: ast.Try | ast.Match, bodies: list[list[ast.stmt]]) -> None:
        """Blocks of which any may run, as far as it does."""
        self.refuse_projections_in(node)
        self._caught += 1
        names = bound_names(node)
        if isinstance(node, ast.Match):
            subject = self.value(node.subject)
            for name in bound_names(*(case.pattern for case in node.cases)):
                self.bind(name, Value(subject.roots))
            heads = [case.guard for case in node.cases]
        else:
            heads = [handler.type for handler in node.handlers]

        def run() -> None:
            anything = {name: self.names[name] for name in names}
            for head in heads:
                if head is not None:
                    self.value(head)
            for body in bodies:
                self.names.update(anything)
                self.suite(body, (Suite(undecided=True),))

        self.settle(names, run)
        self._caught -= 1

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            home = (
                sys.modules.get(node.module or "") if isinstance(node, ast.ImportFrom) else sys.modules.get(alias.name)
            )
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom):
                found = (vars(home)[alias.name],) if home is not None and alias.name in vars(home) else ()
            else:
                found = () if home is None else (home if alias.asname else sys.modules[name],)
            if not found or (isinstance(node, ast.ImportFrom) and node.level):
                self.unknown(f"{shown(node)!r}", node, [])
                self.bind(name, Value())
            else:
                self.bind(name, Value(objects=found))


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an augmented assignment, as it is read."""
    match target:
        case ast.Name(id=name):
            return ast.Name(name, ast.Load())
        case ast.Attribute(value=value, attr=attr):
            return ast.copy_location(ast.Attribute(value, attr, ast.Load()), target)
        case ast.Subscript(value=value, slice=index):
            return ast.copy_location(ast.Subscript(value, index, ast.Load()), target)
    return target
