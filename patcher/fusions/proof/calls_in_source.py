"""The symbolic run of calls: what is known to be pure, what is followed into its source, and what is unknown."""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

from patcher.fusions.proof.following import Arguments, Following
from patcher.fusions.proof.frames import shown
from patcher.fusions.proof.purity import (
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
    writes_in_place,
)
from patcher.fusions.proof.values import (
    CACHE,
    CODE,
    FROM_OUTSIDE,
    NOTHING,
    OUTSIDE,
    Module,
    Summary,
    Value,
    either,
    roots_of,
)


class Calls(Following):
    """Evaluates calls."""

    def projection(self, name: str, node: ast.Call) -> Value:
        """A call of one of the projections, in the method itself."""
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
            if func.attr in self.group and len(self.frames) == 1 and held.module is self.root:
                return self.projection(func.attr, node)
            if isinstance(func.value, ast.Call) and getattr(func.value.func, "id", "") == "super":
                return self.base_method(node, func.attr, self._arguments(node))
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

    # --- what is called ----------------------------------------------------------------------------------------------

    def call_value(self, node: ast.Call, func: Value, given: Arguments) -> Value:
        if func.child is not None:
            return self.summarized(node, func.child, given)
        if func.code is not None and func.code[0] is self.frame.node:
            return self.nested(node, func.code[1], given)
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
        for name in ("inplace", "out", "max_norm"):
            told = given.named.get(name)
            if told is None and (position := _position_of(name, found)) is not None:
                told = Value() if given.spread else dict(enumerate(given.positional)).get(position)
            if told is not None and told.truth is not False and given.all:
                self.effect(f"{shown(node)!r}, which writes in place", node, roots_of(given.all))
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


#: Functions that see the names of who calls them.
_SEEING_NAMES = (eval, exec, locals, vars, dir, globals)
#: Objects of modules whose methods read, or are known by name.
_READ_BY_NAME = (int, float, str, bytes, list, tuple, dict, set, frozenset, type(None))


@lru_cache(maxsize=1024)
def _position_of(name: str, function: Any) -> int | None:
    """Where a function of torch takes a parameter."""
    if not isinstance(function, FunctionType):
        return None
    names = list(inspect.signature(function).parameters)
    return names.index(name) if name in names else None


def _is_of_torch(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "torch").partition(".")[0] in ("torch", "builtins")


def _is_flat(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and getattr(node.operand, "value", 0) == 1
