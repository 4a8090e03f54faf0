"""The symbolic run of functions that are followed into their source: what they are given, and what they give back."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from patcher.fusions.proof.expressions import Expressions
from patcher.fusions.proof.frames import Frame, bound_names, definition_of, shown
from patcher.fusions.proof.purity import unwrapped
from patcher.fusions.proof.values import CODE, FROM_OUTSIDE, Known, Value, either, roots_of

#: How deep calls are followed, and how many in one run.
_DEPTH, _CALLS = 8, 2000


@dataclass(frozen=True)
class Arguments:
    """What a call is given.

    Attributes:
        named: what is given by name; what comes from a `**` goes by a name that begins so.
        spread: some of it comes from a `*`, so it isn't known which parameter gets what.
    """

    positional: tuple[Value, ...]
    named: dict[str, Value]
    spread: bool

    @property
    def all(self) -> list[Value]:
        return [*self.positional, *self.named.values()]


class Following(Expressions):
    """Runs functions that a method calls."""

    count = 0

    def body(self, statements: list[ast.stmt]) -> None:
        """Run the body of a function."""
        raise NotImplementedError

    def follow(
        self,
        function: Any,
        node: ast.AST,
        values: list[Value],
        owner: type[Any] | None = None,
        *,
        named: dict[str, Value] | None = None,
        spread: bool = False,
    ) -> Value:
        """Run a function of Python with what it is given."""
        given = Arguments(tuple(values), named or {}, spread)
        function = unwrapped(function)
        tree = definition_of(function.__code__) if isinstance(function, FunctionType) else None
        if tree is None:
            return self.unknown(f"{shown(node)!r}, whose source can't be read", node, given.all)
        if why := self._why_not(
            tree, given.all, any(frame.function.__code__ is function.__code__ for frame in self.frames)
        ):
            return self.unknown(f"{shown(node)!r}, {why}", node, given.all)
        names = _bound(function, tree, given)
        if names is None:
            return self.unknown(f"{shown(node)!r}, whose arguments are not known", node, given.all)
        return self._inside(Frame(function, tree, names, owner), node)

    def _why_not(self, tree: ast.FunctionDef, given: list[Value], active: bool) -> str:
        """Why a function isn't followed, "" if it can be."""
        self.count += 1
        if active:
            return "which calls itself"
        if len(self.frames) > _DEPTH or self.count > _CALLS:
            return "which goes too deep"
        if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in ast.walk(tree)):
            return "which is a generator"
        return "which gets a function" if any(CODE in value.roots for value in given) else ""

    def _inside(self, frame: Frame, node: ast.AST) -> Value:
        """Run the body of a function; what it gives back."""
        maybe, self.maybe = self.maybe, 0
        with self.called(frame, node):
            self.body(frame.node.body)
        self.maybe = maybe
        if not frame.returned:
            return Known(None)
        result = frame.returned[0]
        for other in frame.returned[1:]:
            result = either(result, other)
        return result

    def nested(self, node: ast.Call, tree: ast.FunctionDef, given: Arguments) -> Value:
        """A call of a function that the method defines."""
        outer = self.frame
        why = self._why_not(tree, given.all, tree in [frame.node for frame in self.frames])
        inner = bound_names(*tree.body)
        names = None if tree.args.defaults or tree.args.kw_defaults else _bound(None, tree, given)
        if names is None or why:
            return self.unknown(f"{shown(node)!r}, {why or 'whose arguments are not known'}", node, given.all)
        around = {name: value for name, value in outer.names.items() if name not in inner}
        return self._inside(Frame(outer.function, tree, around | names, outer.owner), node)

    def base_method(self, node: ast.Call, name: str, given: Arguments) -> Value:
        """A method of a base class."""
        first = self.frame.node.args.args
        held = self.names.get(first[0].arg) if first else None
        owner = self.frame.owner
        if held is not None and held.module is not None and owner in held.module.cls.__mro__:
            lineage = held.module.cls.__mro__
            for base in lineage[lineage.index(owner) + 1 :]:
                if isinstance(found := vars(base).get(name), FunctionType):
                    return self.follow(
                        found, node, [held, *given.positional], base, named=given.named, spread=given.spread
                    )
        return self.unknown(f"{shown(node)!r}", node, given.all)


def _bound(function: FunctionType | None, tree: ast.FunctionDef, given: Arguments) -> dict[str, Value] | None:
    """What each parameter is given; None if that can't be told."""
    arguments, values = tree.args, given.positional
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    keywords = [one.arg for one in arguments.kwonlyargs]
    named = {name: value for name, value in given.named.items() if name in (*positional, *keywords)}
    rest = {name: value for name, value in given.named.items() if name not in named}
    hidden = {name: value for name, value in rest.items() if name.startswith("**")}
    if (len(values) > len(positional) and not arguments.vararg) or (rest.keys() - hidden and not arguments.kwarg):
        return None
    defaults: dict[str, Any] = {}
    if function is not None:
        defaults |= dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
        defaults |= function.__kwdefaults__ or {}
    names = dict(zip(positional, values, strict=False)) | named
    if given.spread:  # what is known to come first is the receiver of a method
        anything = roots_of(given.all)
        names = {name: Value(anything) for name in (*positional, *keywords)} | named
        if values and values[0].module is not None and positional:
            names[positional[0]] = values[0]
        values = (Value(anything),)
    for name in (*positional, *keywords):
        if name in names:
            continue
        if hidden:
            names[name] = Value(roots_of(hidden.values()) | FROM_OUTSIDE)
        elif name not in defaults:
            return None
        else:
            default = defaults[name]
            constant = default is None or isinstance(default, bool | int | float | str)
            names[name] = Known(default) if constant else Value(objects=(default,))
    if arguments.vararg is not None:
        more = values if given.spread else values[len(positional) :]
        names[arguments.vararg.arg] = Value(roots_of(more), parts=None if given.spread else more)
    if arguments.kwarg is not None:
        names[arguments.kwarg.arg] = Value(roots_of(rest.values()) | {id(tree)})
    return names
