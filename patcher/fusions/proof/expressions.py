"""The symbolic run of expressions: which value each gives, and what it shares memory with."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch import nn

from patcher.fusions.methods import NotUnderstoodError
from patcher.fusions.proof.frames import Frame, State, bound_names, shown
from patcher.fusions.proof.purity import PLAIN_ATTRIBUTES, of_table
from patcher.fusions.proof.values import CODE, FROM_OUTSIDE, NOTHING, Known, Module, Roots, Value, either, roots_of

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
#: Attributes through which all others can be reached.
_INSIDES = frozenset({"__dict__", "__class__", "_modules", "_parameters", "_buffers"})


class Expressions(State):
    """Evaluates expressions. Calls are the subject of `calls_in_source`, statements that of `tracing`."""

    def __init__(
        self,
        frame: Frame,
        root: Module | None,
        group: frozenset[str],
        attributes: Mapping[str, Any],
        guarded: set[str],
    ) -> None:
        super().__init__(frame)
        self.root = root
        self.group = group
        self.attributes = attributes
        #: names of attributes that must stay what they are
        self.guarded = guarded

    def call(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def follow(self, function: Any, node: ast.AST, values: list[Value], owner: type[Any] | None = None) -> Value:
        raise NotImplementedError

    def value(self, node: ast.AST) -> Value:
        match node:
            case ast.Constant():
                return Known(node.value)
            case ast.Name():
                return self.read(node.id)
            case ast.NamedExpr():
                result = self.value(node.value)
                self.assign(node.target, result)
                return result
            case ast.Attribute():
                return self.attribute(node, self.value(node.value))
            case ast.Subscript():
                return self._item(self.value(node.value), self.value(node.slice))
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
                return self._display(node)
            case ast.Call():
                return self.call(node)
            case ast.IfExp():
                truth = self.value(node.test).truth
                if truth is not None:
                    return self.value(node.body if truth else node.orelse)
                return either(self.perhaps(node.body), self.perhaps(node.orelse))
            case ast.BoolOp():
                return self._bool(node)
            case ast.UnaryOp(op=ast.Not()):
                truth = self.value(node.operand).truth
                return Value(NOTHING) if truth is None else Known(not truth)
            case ast.UnaryOp() | ast.BinOp():
                return self._operator(node)
            case ast.Compare():
                return self._compare(node)
            case ast.Lambda():
                return self.code(node)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return self._comprehension(node)
            case ast.Starred():
                return self.value(node.value).element()
            case _:
                values = [self.value(child) for child in ast.iter_child_nodes(node)]
                return Value(NOTHING if isinstance(node, ast.JoinedStr) else roots_of(values))

    def own(self, node: ast.AST) -> Roots:
        """Memory that is allocated here."""
        return frozenset({id(node)})

    def perhaps(self, node: ast.expr) -> Value:
        self.maybe += 1
        result = self.value(node)
        self.maybe -= 1
        return result

    def attribute(self, node: ast.Attribute, held: Value) -> Value:
        name = node.attr
        if held.module is not None:
            return self._attribute_of_module(node, held, held.module)
        if len(held.objects) == 1 and isinstance(held.objects[0], ModuleType | type):
            (found,) = held.objects
            with suppress(AttributeError):
                if isinstance(found, type):
                    found = inspect.getattr_static(found, name)
                    found = found.__func__ if isinstance(found, staticmethod) else found
                    return Value(FROM_OUTSIDE if isinstance(found, classmethod) else NOTHING, objects=(found,))
                return Value(objects=(vars(found)[name],)) if name in vars(found) else Value()
        if name in _INSIDES:
            return self.unknown(f"{shown(node)!r}", node, [held])
        if name in PLAIN_ATTRIBUTES:
            return Value(NOTHING)
        return Value(held.roots, tensor=held.tensor and name in ("T", "mT", "H", "mH", "real", "imag", "data"))

    def _attribute_of_module(self, node: ast.Attribute, held: Value, module: Module) -> Value:
        name = node.attr
        if module is self.root and name in self.attributes and not any(one.roots is None for one in self.effects):
            return Known(self.attributes[name])
        child = module.child(name)
        if child is not None:
            return Value(child=child)
        if name in _INSIDES or name in self.group:
            if name in _INSIDES or len(self.frames) > 1:
                return self.unknown(f"{shown(node)!r}", node, [held])
            return Value()
        try:
            found = inspect.getattr_static(module.cls, name)
        except AttributeError:
            if module.cls.__getattr__ is not nn.Module.__getattr__:
                return self.unknown(f"{shown(node)!r}", node, [held])
            return Value()
        if isinstance(found, property) and found.fget is not None:
            return self.follow(found.fget, node, [held])
        if isinstance(found, staticmethod):
            return Value(NOTHING, objects=(found.__func__,))
        return Value()

    def _item(self, held: Value, index: Value) -> Value:
        if (entry := of_table(held.objects)) is not None:
            return Value(NOTHING, objects=(entry,))
        number = index.value if isinstance(index, Known) else None
        parts = held.parts or ()
        if isinstance(number, int) and -len(parts) <= number < len(parts):
            return parts[number]
        return held.element()

    def _display(self, node: ast.Tuple | ast.List | ast.Set | ast.Dict) -> Value:
        if isinstance(node, ast.Dict):
            entries = [*(key for key in node.keys if key is not None), *node.values]
        else:
            entries = node.elts
        values = [self.value(entry) for entry in entries]
        roots = roots_of(values)
        if not isinstance(node, ast.Tuple):
            return Value(roots | self.own(node))
        starred = any(isinstance(entry, ast.Starred) for entry in entries)
        return Value(roots, parts=None if starred else tuple(values))

    def _operator(self, node: ast.UnaryOp | ast.BinOp) -> Value:
        values = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        tensors = any(value.tensor for value in values) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        )
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return Value(roots_of(values))
        if isinstance(node, ast.UnaryOp) or tensors:  # lists have no such operators
            return Value(self.own(node) if roots_of(values) else NOTHING, tensor=tensors)
        # What lists and tuples are joined to holds what they held.
        roots = roots_of(values)
        return Value(roots | self.own(node) if roots else NOTHING)

    def _bool(self, node: ast.BoolOp) -> Value:
        decisive = isinstance(node.op, ast.Or)
        results: list[Value] = []
        for operand in node.values:
            unknown = any(result.truth is None for result in results)
            result = self.perhaps(operand) if unknown else self.value(operand)
            if result.truth is decisive:
                return Value(roots_of([*results, result]), truth=decisive) if unknown else result
            results.append(result)
        unknown = any(result.truth is None for result in results)
        return Value(roots_of(results)) if unknown else results[-1]

    def _compare(self, node: ast.Compare) -> Value:
        left, right, *more = [self.value(operand) for operand in (node.left, *node.comparators)]
        sign = type(node.ops[0])
        if isinstance(left, Known) and isinstance(right, Known):
            if sign in _COMPARISONS and not more:
                with suppress(TypeError):  # `None < 1`
                    return Known(_COMPARISONS[sign](left.value, right.value))
        elif left is right and sign in (ast.Is, ast.IsNot) and not more:
            return Known(sign is ast.Is)
        return Value(self.own(node), tensor=left.tensor or right.tensor)

    # --- code inside of code -----------------------------------------------------------------------------------------

    def refuse_projections_in(self, node: ast.AST) -> None:
        """Projections are only followed in statements of the method itself."""
        if len(self.frames) > 1:
            return
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and child.attr in self.group:
                raise NotUnderstoodError(f"{child.attr} is used inside of a {type(node).__name__}", child.lineno)

    def code(self, node: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Value:
        """A lambda or a nested function: it isn't known when it runs, or how often; whoever calls it is unknown."""
        self.refuse_projections_in(node)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.value(default)
        if not isinstance(node, ast.Lambda):
            for decorator in node.decorator_list:
                self.unknown(f"the decorator {shown(decorator)!r}", node, [self.value(decorator)])
        if isinstance(node, ast.ClassDef):
            self.unknown(f"class {node.name}", node, [])
        used = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        held = [self.read(name) for name in sorted(used) if name in self.names]
        self.frame.captured |= used
        for child in ast.walk(node):
            if isinstance(child, ast.Nonlocal):
                self.frame.volatile.update(child.names)
        local = isinstance(node, ast.FunctionDef) and not node.decorator_list and not _rebinds(node)
        return Value(roots_of(held) | {CODE}, code=(self.frame.node, node) if local else None)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> Value:
        self.refuse_projections_in(node)
        targets = bound_names(*(generator.target for generator in node.generators))
        walrus = bound_names(node) - targets
        before, count = dict(self.names), len(self.effects)
        results: list[Value] = []

        def run() -> None:
            for generator in node.generators:
                self.assign(generator.target, self.value(generator.iter).element())
                for condition in generator.ifs:
                    self.value(condition)
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            results.append(Value(roots_of(self.value(element) for element in elements)))

        self.settle(targets | walrus, run)
        for name in targets:
            self.names.pop(name, None)
            if name in before:
                self.names[name] = before[name]
        if isinstance(node, ast.GeneratorExp):  # it runs when somebody asks for the next
            self.frame.volatile |= walrus
            if len(self.effects) > count and self.pending is None:
                self.pending = self.effects[count]
        return Value(roots_of(results) | self.own(node))

    # --- what is written ---------------------------------------------------------------------------------------------

    def assign(self, target: ast.AST, value: Value) -> None:
        match target:
            case ast.Name():
                self.bind(target.id, value)
            case ast.Tuple() | ast.List():
                parts = value.parts
                if (
                    parts is None
                    or len(parts) != len(target.elts)
                    or any(isinstance(e, ast.Starred) for e in target.elts)
                ):
                    parts = (value.element(),) * len(target.elts)
                for element, part in zip(target.elts, parts, strict=True):
                    self.assign(element, part)
            case ast.Starred():
                self.assign(target.value, Value(value.roots | self.own(target)))
            case ast.Subscript():
                held = self.value(target.value)
                self.value(target.slice)
                self._store(target, held, value)
            case ast.Attribute():
                self._set_attribute(target, self.value(target.value), value)

    def _store(self, target: ast.AST, held: Value, value: Value) -> None:
        reason = f"an assignment to {shown(target)!r}"
        if not held.roots or CODE in held.roots:
            self.unknown(reason, target, [held, value])
            return
        self.effect(reason, target, held.roots)
        if not held.tensor:
            self.escape([held, value])

    def _set_attribute(self, target: ast.Attribute, held: Value, value: Value) -> None:
        name = target.attr
        if name in self.group:
            raise NotUnderstoodError(f"{name} is assigned", getattr(self.line_of(target), "lineno", 1))
        if name in self.guarded:
            raise NotUnderstoodError(f"self.{name} changes", getattr(self.line_of(target), "lineno", 1))
        if held.module is not None and not name.startswith("__"):
            found = inspect.getattr_static(held.module.cls, name, None)
            plain = getattr(held.module.cls, "__setattr__", None) is nn.Module.__setattr__
            if plain and not hasattr(type(found), "__set__"):
                self.escape([value])
                return
        self.escape([value])
        reason = f"an assignment to {shown(target)!r}"
        roots = None if name.startswith("__") or held.module is not None or not held.roots else held.roots
        self.effect(reason, target, roots)
        self.escape([held])

    def line_of(self, node: ast.AST) -> ast.AST:
        """The node of the method itself where something happens."""
        return self._outer if len(self.frames) > 1 else node


def _rebinds(node: ast.AST) -> bool:
    """Whether a nested function binds names of the function around it."""
    return any(isinstance(child, ast.Nonlocal | ast.Global) for child in ast.walk(node))
