"""The state of a symbolic run: names and what they hold, function by function, and what has happened so far."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from patcher.fusions.proof.values import CODE, NOTHING, OUTSIDE, Effect, Roots, Value, either, parts_in, roots_of
from patcher.source.call_sites import positional_parameters
from patcher.source.indentation import dedented

#: What holds nothing that could be written into.
_IMMUTABLE = (ModuleType, FunctionType, type, int, float, str, bytes, type(None), type(len), range)


@lru_cache(maxsize=4096)
def definition_of(code: CodeType) -> ast.FunctionDef | None:
    """The definition that a function's code was compiled from, not that of what it wraps; None if it can't be read."""
    try:
        lines, _ = inspect.getsourcelines(code)
        (node,) = ast.parse(dedented("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return node if isinstance(node, ast.FunctionDef) and node.name == code.co_name else None


@dataclass
class Frame:
    """A function that runs.

    Attributes:
        owner: the class whose body it stands in, for `super()`.
        captured: names that a nested function uses: it may find what is bound to them later.
        volatile: names that other code may bind at any time.
        returned: what it may give back.
    """

    function: FunctionType
    node: ast.FunctionDef
    names: dict[str, Value]
    owner: type[Any] | None = None
    captured: set[str] = field(default_factory=set)
    volatile: set[str] = field(default_factory=set)
    returned: list[Value] = field(default_factory=list)

    def at(self, line: int) -> str:
        """Where a line of its source lies: `modeling_llama.py:243`."""
        code = self.function.__code__
        return f"{Path(code.co_filename).name}:{code.co_firstlineno + line - 1}"

    def found(self, name: str) -> tuple[Any, ...]:
        """The object that a name means outside of the function, in a tuple; () if that isn't known."""
        code = self.function.__code__
        if name in code.co_freevars:
            cell = (self.function.__closure__ or ())[code.co_freevars.index(name)]
            try:
                return (cell.cell_contents,)
            except ValueError:
                return ()
        for home in (self.function.__globals__, vars(builtins)):
            if name in home:
                return (home[name],)
        return ()


class State:
    """Names, effects, and which memory is written to or has become known outside."""

    def __init__(self, frame: Frame) -> None:
        self.frames = [frame]
        self.effects: list[Effect] = []
        #: what may still happen at any time from where it stands: an iterator that writes
        self.pending: Effect | None = None
        self.escaped: set[Any] = set()
        #: projections whose results may be written into
        self.written: set[str] = set()
        self.dry = 0  # a trial of code that may run several times, or not
        self.maybe = 0  # inside of an expression that may not be evaluated
        self._outer: ast.AST = frame.node
        self._assigned: list[dict[str, set[Any]]] = []

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def names(self) -> dict[str, Value]:
        return self.frame.names

    # --- names -------------------------------------------------------------------------------------------------------

    def read(self, name: str) -> Value:
        if name in self.frame.volatile:
            return Value()
        if name not in self.names:
            found = self.frame.found(name)
            immutable = bool(found) and isinstance(found[0], _IMMUTABLE)
            self.names[name] = Value(objects=found) if not immutable else Value(NOTHING, objects=found)
        return self.names[name]

    def bind(self, name: str, value: Value) -> None:
        for assigned in self._assigned:
            assigned.setdefault(name, set()).update(value.roots)
        if name in self.frame.captured | self.frame.volatile:
            self.escape([value])
        self.names[name] = either(self.names.get(name), value) if self.maybe else value

    def settle(self, names: Iterable[str], run: Callable[[], object]) -> None:
        """Run code that may run any number of times until the names that it binds hold all that they may hold."""
        entry = {name: set(self.names[name].roots) if name in self.names else set() for name in names}
        self.dry += 1
        while True:
            for name, roots in entry.items():
                self.names[name] = Value(frozenset(roots))
            self._assigned.append({})
            run()
            added = self._assigned.pop()
            if all(added.get(name, set()) <= roots for name, roots in entry.items()):
                break
            for name, roots in entry.items():
                roots |= added.get(name, set())
        self.dry -= 1
        for name, roots in entry.items():
            self.names[name] = Value(frozenset(roots))

    # --- what happens ------------------------------------------------------------------------------------------------

    @contextmanager
    def called(self, frame: Frame, node: ast.AST) -> Iterator[None]:
        """Inside of a function that is followed, from a call."""
        if len(self.frames) == 1:
            self._outer = node
        self.frames.append(frame)
        yield
        self.frames.pop()

    def effect(self, reason: str, node: ast.AST, roots: Roots | None) -> None:
        inside = len(self.frames) > 1
        if inside:
            reason = f"{shown(self._outer)}, which runs {reason} ({self.frame.at(getattr(node, 'lineno', 1))})"
        self.effects.append(Effect(reason, getattr(self._outer if inside else node, "lineno", 1), roots))
        if roots is not None:
            self.written |= parts_in(roots)

    def unknown(self, reason: str, node: ast.AST, values: Iterable[Value]) -> Value:
        """Something may be done to the values, and to anything else."""
        values = list(values)
        self.effect(reason, node, None)
        self.escape(values)
        return Value(roots_of(values) | {OUTSIDE})

    def escape(self, values: Iterable[Value]) -> None:
        """The values may be found by whoever looks for them from outside."""
        roots = roots_of(values)
        self.escaped |= roots - {CODE}
        self.written |= parts_in(roots)

    def disturbs(self, effect: Effect, value: Value) -> bool:
        """Whether an effect may change what a value is, or how a projection computes."""
        if effect.roots is None or OUTSIDE in effect.roots:
            return True
        return bool(effect.roots & (value.roots | self.escaped))


def parameters_of(node: ast.FunctionDef) -> list[str]:
    return [one.arg for one in (*positional_parameters(node), *node.args.kwonlyargs)]


def bound_names(*nodes: ast.AST) -> set[str]:
    """The names that a piece of code binds in its function."""
    found: set[str] = set()
    for node in (child for one in nodes for child in ast.walk(one)):
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del(), id=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name.split(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)):
                found.add(name)
    return found


def shown(node: ast.AST) -> str:
    """A piece of source on one line that isn't long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
