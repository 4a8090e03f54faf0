"""The symbolic run of calls: what is known to be pure, what is followed into its source, and what is unknown."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import transformers

from patcher.fusions.expressions import Expressions
from patcher.fusions.frames import Frame, bound_names, definition_of, shown
from patcher.fusions.purity import (
    FRESH,
    METHODS,
    PLAIN,
    SEVERAL,
    STORING,
    VIEWS,
    is_logger,
    kind_of_function,
    writes_in_place,
)
from patcher.fusions.values import CODE, FROM_OUTSIDE, NOTHING, Known, Module, Summary, Value, either, roots_of

#: How deep calls are followed, and how many in one run.
_DEPTH, _CALLS = 8, 2000
#: What an `AttentionInterface` gives: a function that reads what it is given.
_INTERFACE = object()


@dataclass(frozen=True)
class Arguments:
    """What a call is given.

    Attributes:
        spread: some of it comes from `*` or `**`, so it isn't known which parameter gets what.
    """

    positional: tuple[Value, ...]
    named: dict[str, Value]
    spread: bool

    @property
    def all(self) -> list[Value]:
        return [*self.positional, *self.named.values()]


class Calls(Expressions):
    """Evaluates calls."""

    count = 0

    def projection(self, name: str, node: ast.Call) -> Value:
        """A call of one of the projections, in the method itself."""
        raise NotImplementedError

    def body(self, statements: list[ast.stmt]) -> None:
        """Run the body of a function."""
        raise NotImplementedError

    def call(self, node: ast.Call) -> Value:
        func = self._constant_getattr(node.func)
        read = self._constant_getattr(node)
        if isinstance(read, ast.Attribute):
            defaults = [self.value(argument) for argument in node.args[2:]]
            found = self.attribute(read, self.value(read.value))
            return either(found, *defaults) if defaults else found
        if isinstance(func, ast.Attribute):
            held = self.value(func.value)
            if (
                len(self.frames) == 1
                and held.module is self.root
                and self.root is not None
                and func.attr in self.group
            ):
                return self.projection(func.attr, node)
            if (
                isinstance(func.value, ast.Call)
                and isinstance(func.value.func, ast.Name)
                and func.value.func.id == "super"
            ):
                return self._super(node, func.attr, self._arguments(node))
            return self._method(node, func, held, self._arguments(node))
        if isinstance(func, ast.Name) and func.id == "super" and not node.args:
            return Value()
        return self.call_value(node, self.value(func), self._arguments(node))

    def _constant_getattr(self, node: ast.expr) -> ast.expr:
        """`x.name` for `getattr(x, "name")`."""
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[held, ast.Constant(value=str(name)), *_]):
                if self.read("getattr").objects == (getattr,):
                    return ast.copy_location(ast.Attribute(held, name, ast.Load()), node)
        return node

    def _arguments(self, node: ast.Call) -> Arguments:
        positional = tuple(self.value(argument) for argument in node.args)
        named: dict[str, Value] = {}
        for number, keyword in enumerate(node.keywords):
            named[keyword.arg or f"**{number}"] = self.value(keyword.value)
        spread = any(isinstance(argument, ast.Starred) for argument in node.args)
        return Arguments(positional, named, spread or any(keyword.arg is None for keyword in node.keywords))

    # --- whose method it is ------------------------------------------------------------------------------------------

    def _method(self, node: ast.Call, func: ast.Attribute, held: Value, given: Arguments) -> Value:
        name = func.attr
        if held.module is not None:
            return self._method_of_module(node, func, held, held.module, given)
        if CODE in held.roots or held.child is not None:
            return self.unknown(f"{shown(node)!r}", node, [held, *given.all])
        if len(held.objects) == 1:
            (found,) = held.objects
            if isinstance(found, ModuleType | type):
                return self.call_value(node, self.attribute(func, held), given)
            if is_logger(found):
                return Value(NOTHING)
            if isinstance(found, transformers.AttentionInterface) and name in ("get_interface", "get"):
                defaults = [one for value in given.all[1:] for one in value.objects]
                return Value(NOTHING, objects=(_INTERFACE, *defaults))
            if not isinstance(found, _READ_BY_NAME):
                method = inspect.getattr_static(type(found), name, None)
                if isinstance(method, FunctionType):
                    return self.follow(method, node, [held, *given.positional], named=given.named, spread=given.spread)
                return self.unknown(f"{shown(node)!r}", node, [held, *given.all])
        return self._method_by_name(node, name, held, given)

    def _method_by_name(self, node: ast.Call, name: str, held: Value, given: Arguments) -> Value:
        """A method of something that the method was given, or computed: tensors, dicts, lists, caches."""
        if name == "update" and len(given.positional) >= 3:  # of a cache, which keeps copies
            return Value(roots_of(given.all))
        if name == "view" and len(given.positional) == 1 and _is_flat(node.args[0]):
            self.needs_own_memory(held)  # a piece of a split has no such view
        if writes_in_place(name):
            if any(CODE in value.roots for value in given.all):
                return self.unknown(f"{shown(node)!r}", node, [held, *given.all])
            self.effect(f"{shown(node)!r}, which writes in place", node, held.roots)
            return Value(held.roots, tensor=True)
        if name in STORING and not held.tensor:
            if not held.roots:
                return self.unknown(f"{shown(node)!r}", node, [held, *given.all])
            self.escape([held, *given.all])
            if name != "add":
                self.effect(f"{shown(node)!r}", node, held.roots)
                return Value(held.roots | roots_of(given.all))
        count = len(self.effects)
        result = self._known(node, name, METHODS.get(name, ""), [held, *given.all], given)
        if name in VIEWS and len(self.effects) == count:
            result.roots = held.roots
        return result

    def needs_own_memory(self, value: Value) -> None:
        """What is done to a value asks how it lies in memory."""
        self.escape([Value(frozenset(root for root in value.roots if isinstance(root, tuple)))])

    def _method_of_module(
        self, node: ast.Call, func: ast.Attribute, held: Value, module: Module, given: Arguments
    ) -> Value:
        name = func.attr
        if name in self.group:  # in a method that is followed: a part, which computes what the projection did
            return Value(self.own(node), tensor=True)
        child = module.child(name)
        if child is not None:
            return self.summarized(node, child, given)
        for owner in module.cls.__mro__:
            found = vars(owner).get(name)
            if isinstance(found, FunctionType):
                return self.follow(
                    found, node, [held, *given.positional], owner, named=given.named, spread=given.spread
                )
            if found is not None:
                break
        return self.call_value(node, self.attribute(func, held), given)

    def _super(self, node: ast.Call, name: str, given: Arguments) -> Value:
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

    # --- what is called ----------------------------------------------------------------------------------------------

    def call_value(self, node: ast.Call, func: Value, given: Arguments) -> Value:
        if func.child is not None:
            return self.summarized(node, func.child, given)
        if func.code is not None and func.code[0] is self.frame.node:
            return self._nested(node, func.code[1], given)
        if not func.objects or CODE in func.roots:
            return self.unknown(f"{shown(node)!r}", node, [func, *given.all])
        results = [self._call_object(node, found, given) for found in func.objects]
        result = results[0]
        for other in results[1:]:
            result = either(result, other)
        return result

    def _call_object(self, node: ast.Call, found: Any, given: Arguments) -> Value:
        if found is _INTERFACE:
            return Value(self.own(node), several=True)
        kind = kind_of_function(found)
        if not kind and isinstance(found, FunctionType) and not _is_of_torch(found):
            return self.follow(found, node, list(given.positional), named=given.named, spread=given.spread)
        if not kind and isinstance(found, MethodType) and isinstance(found.__func__, FunctionType):
            bound = Value(FROM_OUTSIDE, objects=(found.__self__,))
            return self.follow(
                found.__func__, node, [bound, *given.positional], named=given.named, spread=given.spread
            )
        if isinstance(found, type) and found in (list, dict, set, tuple):
            self._check_code(node, given)
            return Value(roots_of(given.all) | self.own(node))
        values = self._writes(node, found, given)
        return self._known(node, getattr(found, "__name__", ""), kind, values, given)

    def _check_code(self, node: ast.Call, given: Arguments) -> None:
        if any(CODE in value.roots for value in given.all):
            self.unknown(f"{shown(node)!r}", node, given.all)

    def _known(self, node: ast.Call, name: str, kind: str, values: list[Value], given: Arguments) -> Value:
        """The result of an operation of a known kind."""
        # Names that `**` hides may be `out` or `inplace`; `key` is called, `max_norm` writes into a weight.
        calls = any(one in ("key", "max_norm") or one.startswith("**") for one in given.named)
        calls = calls or any(CODE in value.roots for value in values)
        if not kind or calls:
            return self.unknown(f"{shown(node)!r}", node, values)
        if "out" in given.named:
            self.effect(f"{shown(node)!r}, which writes in place", node, given.named["out"].roots)
            return Value(given.named["out"].roots)
        several = name in SEVERAL
        if kind == PLAIN:
            return Value(NOTHING)
        if kind == FRESH:
            return Value(self.own(node), tensor=not several, several=several)
        if name == "einsum" and len(given.positional) > 2:
            return Value(self.own(node), tensor=True)
        tensor = any(value.tensor for value in values)
        return Value(roots_of(values), tensor=tensor and not several, several=tensor)

    def _writes(self, node: ast.Call, found: Any, given: Arguments) -> list[Value]:
        """Take note of what a function of torch is told to write into; what it is given."""
        inplace = given.named.get("inplace")
        if inplace is None and (position := _position_of_inplace(found)) is not None:
            inplace = Value() if given.spread else dict(enumerate(given.positional)).get(position)
        if inplace is not None and inplace.truth is not False and given.all:
            target = given.named.get("input", given.positional[0] if given.positional else Value())
            self.effect(f"{shown(node)!r}, which writes in place", node, target.roots)
        name = getattr(found, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and _is_of_torch(found) and given.positional:
            self.effect(f"{shown(node)!r}, which writes in place", node, given.positional[0].roots)
        return given.all

    def summarized(self, node: ast.Call, summary: Summary, given: Arguments) -> Value:
        """A call of a child module."""
        if summary.plain is not None and (given.named or given.spread or len(given.positional) > summary.plain):
            return self.unknown(f"{shown(node)!r}", node, given.all)
        if summary.reason or any(CODE in value.roots for value in given.all):
            reason = f" ({summary.reason})" if summary.reason else ""
            return self.unknown(f"{shown(node)!r}{reason}", node, given.all)
        roots = roots_of(given.all)
        if summary.writes:
            self.effect(f"{shown(node)!r} ({summary.writes})", node, roots)
        if summary.changes:
            self.effect(f"{shown(node)!r} ({summary.changes})", node, FROM_OUTSIDE)
        found = (
            self.own(node) | (roots if summary.gives_back else NOTHING) | (FROM_OUTSIDE if summary.keeps else NOTHING)
        )
        return Value(found, tensor=summary.tensor)

    def _nested(self, node: ast.Call, tree: ast.FunctionDef, given: Arguments) -> Value:
        """A call of a function that the method defines."""
        outer = self.frame
        why = self._why_not(tree, given.all, tree in [frame.node for frame in self.frames])
        inner = bound_names(*tree.body)
        names = None if tree.args.defaults or tree.args.kw_defaults else _bound(None, tree, given)
        if names is None or why:
            return self.unknown(f"{shown(node)!r}, {why or 'whose arguments are not known'}", node, given.all)
        around = {name: value for name, value in outer.names.items() if name not in inner}
        return self._inside(Frame(outer.function, tree, around | names, outer.owner), node)

    # --- into source -------------------------------------------------------------------------------------------------

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


#: Objects of modules whose methods read, or are known by name.
_READ_BY_NAME = (int, float, str, bytes, list, tuple, dict, set, frozenset, type(None))


def _bound(function: FunctionType | None, tree: ast.FunctionDef, given: Arguments) -> dict[str, Value] | None:
    """What each parameter is given; None if that can't be told."""
    arguments, values, named = tree.args, given.positional, given.named
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    keywords = [one.arg for one in arguments.kwonlyargs]
    rest = {name: value for name, value in named.items() if name not in (*positional, *keywords)}
    if given.spread:
        anything = Value(roots_of([*values, *named.values()]))
        names = {name: named.get(name, Value(anything.roots)) for name in (*positional, *keywords)}
        # The receiver of a method is what it is.
        if values and values[0].module is not None and positional:
            names[positional[0]] = values[0]
        more, others = anything, anything
    else:
        names = dict(zip(positional, values, strict=False)) | {n: v for n, v in named.items() if n not in rest}
        defaults: dict[str, Any] = {}
        if function is not None:
            defaults |= dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
            defaults |= function.__kwdefaults__ or {}
        for name in (*positional, *keywords):
            if name not in names:
                if name not in defaults:
                    return None
                default = defaults[name]
                constant = default is None or isinstance(default, bool | int | float | str)
                names[name] = Known(default) if constant else Value(objects=(default,))
        more, others = Value(roots_of(values[len(positional) :])), Value(roots_of(rest.values()))
        if (len(values) > len(positional) and not arguments.vararg) or (rest and not arguments.kwarg):
            return None
        more.parts = values[len(positional) :]
    if arguments.vararg is not None:
        names[arguments.vararg.arg] = more
    if arguments.kwarg is not None:
        names[arguments.kwarg.arg] = Value(others.roots | {id(tree)})
    return names


def _position_of_inplace(function: Any) -> int | None:
    """Where a function of torch takes `inplace`."""
    if not isinstance(function, FunctionType):
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def _is_of_torch(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "torch").partition(".")[0] in ("torch", "builtins")


def _is_flat(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and getattr(node.operand, "value", 0) == 1
