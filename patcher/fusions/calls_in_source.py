"""The symbolic run of calls: what is known to be pure, what is followed into its source, and what is unknown."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from patcher.fusions.expressions import Expressions
from patcher.fusions.frames import Frame, bound_names, definition_of, shown
from patcher.fusions.purity import (
    ATTENTION,
    CACHING,
    FRESH,
    METHODS,
    OF_ALL,
    PLAIN,
    SEVERAL,
    STORING,
    is_logger,
    kind_of_function,
    of_table,
    unwrapped,
    writes_in_place,
)
from patcher.fusions.values import (
    CACHE,
    CODE,
    FROM_OUTSIDE,
    NOTHING,
    OUTSIDE,
    Known,
    Module,
    Summary,
    Value,
    either,
    roots_of,
)

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
        if isinstance(func, ast.Name) and self.read(func.id).objects == (getattr,) and len(node.args) > 1:
            return self._getattr(self._arguments(node))
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

    def _getattr(self, given: Arguments) -> Value:
        """An attribute whose name is computed."""
        held, _, *defaults = given.all
        if (entry := of_table(held.objects)) is not None:
            return Value(NOTHING, objects=(entry, *(one for value in defaults for one in value.objects)))
        return Value(roots_of([held, *defaults]) | FROM_OUTSIDE)

    def _constant_getattr(self, node: ast.expr) -> ast.expr:
        """`x.name` for `getattr(x, "name")`."""
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[held, ast.Constant(value=str(name)), *_]):
                if self.read("getattr").objects == (getattr,):
                    return ast.copy_location(ast.Attribute(held, name, ast.Load()), node)
        return node

    def _arguments(self, node: ast.Call) -> Arguments:
        positional: list[Value] = []
        spread = False
        for argument in node.args:
            if not isinstance(argument, ast.Starred):
                positional.append(self.value(argument))
                continue
            given = self.value(argument.value)
            spread = spread or given.parts is None
            positional += [given.element()] if given.parts is None else given.parts
        named: dict[str, Value] = {}
        for number, keyword in enumerate(node.keywords):
            named[keyword.arg or f"**{number}"] = self.value(keyword.value)
        return Arguments(tuple(positional), named, spread)

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
            if (entry := of_table(held.objects)) is not None and name in ("get_interface", "get"):
                defaults = [one for value in given.all[1:] for one in value.objects]
                return Value(NOTHING, objects=(entry, *defaults))
            if not isinstance(found, _READ_BY_NAME):
                method = inspect.getattr_static(type(found), name, None)
                if isinstance(method, FunctionType):
                    return self.follow(method, node, [held, *given.positional], named=given.named, spread=given.spread)
                return self.unknown(f"{shown(node)!r}", node, [held, *given.all])
        return self._method_by_name(node, name, held, given)

    def _method_by_name(self, node: ast.Call, name: str, held: Value, given: Arguments) -> Value:
        """A method of something that the method was given, or computed: tensors, dicts, lists, caches."""
        if name in CACHING or (name == "update" and len(given.positional) >= 3):
            return Value(roots_of(given.positional[: CACHING.get(name, 2)]) | {CACHE}, several=True)
        if name == "view" and len(given.positional) == 1 and _is_flat(node.args[0]):
            self.needs_own_memory(held)  # a piece of a split has no such view
        if writes_in_place(name):
            if any(CODE in value.roots for value in given.all):
                return self.unknown(f"{shown(node)!r}", node, [held, *given.all])
            self.effect(f"{shown(node)!r}, which writes in place", node, held.roots)
            return Value(held.roots, tensor=True)
        if name in STORING and not held.tensor:
            if name != "add" and (not held.roots or OUTSIDE in held.roots):  # it isn't known whose method it is
                return self.unknown(f"{shown(node)!r}", node, [held, *given.all])
            self.escape([held, *given.all])
            if name != "add":
                return Value(held.roots | roots_of(given.all))
        return self._known(node, name, METHODS.get(name, ""), [held, *given.all], given)

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
        if found is ATTENTION:
            return Value(self.own(node), several=True)
        if any(found is one for one in _SEEING_NAMES):
            return self.unknown(f"{shown(node)!r}", node, [*self.names.values(), *given.all])
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
        if name not in OF_ALL and values:
            first = given.named.get("input", values[0])
            return Value(first.roots, tensor=first.tensor and not several, several=several)
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


#: Functions that see the names of who calls them.
_SEEING_NAMES = (eval, exec, locals, vars, dir, globals)
#: Objects of modules whose methods read, or are known by name.
_READ_BY_NAME = (int, float, str, bytes, list, tuple, dict, set, frozenset, type(None))


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
