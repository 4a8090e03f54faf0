"""What runs between two calls: whether it may write into a tensor, by its source.

Known are values: tensors, numbers, caches, and containers of values. Of a value, no operator writes into a tensor but
those that assign, and no method but those whose names end in an underscore and a few more. Known are also functions of
torch, its norms, activations and other layers by their class, and functions and modules of modeling code whose own
source has nothing else. A name of a method proves nothing about an object that isn't known, so all else is a problem,
which is raised with its line.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import logging
import math
import re
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from patcher.compat.models import ACT2FN
from patcher.fusions.lookups import attribute, in_namespace, lookups, member
from patcher.fusions.methods import (
    Method,
    NotUnderstoodError,
    located,
    read_function,
    self_of,
    trees_of,
    unwrapped,
)
from patcher.source.call_sites import shortened

#: Methods of values, and functions of torch, that change something, or give memory away, though their names don't end
#: in an underscore; and those that may write into a weight, or into statistics, that they are given.
_CHANGING = frozenset(
    "backward register_hook register_post_accumulate_grad_hook retain_grad numpy untyped_storage storage map_ "
    "share_memory_ module_load embedding embedding_bag batch_norm instance_norm".split()
)
#: What `torch` has of its own for tensors, besides what isn't written in Python.
_OF_TENSORS = frozenset([*torch.functional.__all__, "is_tensor"])
#: Attributes of tensors: what has another one is a cache or a container.
OF_A_TENSOR = frozenset(dir(torch.Tensor))
#: Functions that run no code of what they are given, or only read it.
_BUILTINS = frozenset(
    "len isinstance issubclass int float bool str abs round id hasattr range min max sum tuple list dict set zip "
    "enumerate reversed getattr any all divmod print repr super".split()
)
#: Layers of torch that write into nothing that they are given, unless these settings say so.
_LAYERS: frozenset[type[nn.Module]] = frozenset(
    getattr(nn, name)
    for name in (
        "Identity Linear LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d Conv1d Conv2d Conv3d Embedding Dropout "
        "Dropout1d Dropout2d GELU SiLU ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GLU Mish Hardswish Hardsigmoid "
        "Hardtanh Sigmoid LogSigmoid Tanh Softmax LogSoftmax Softplus Softsign Flatten Unflatten AvgPool1d AvgPool2d "
        "MaxPool1d MaxPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d Upsample"
    ).split()
)
_VIEWS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Flatten, nn.Unflatten)
#: Functions of torch that always give a new tensor.
_PRODUCTS = (
    *(getattr(torch, name) for name in "matmul bmm baddbmm softmax cat stack where".split()),
    *(nn.functional.softmax, nn.functional.scaled_dot_product_attention),
)
#: Values that have no methods which change anything.
_CONSTANTS = (type(None), int, float, str, torch.dtype, torch.device)
_LOGGERS = (logging.Logger, logging.LoggerAdapter)
_WRITING_SETTINGS = ("inplace", "max_norm")
#: Methods of caches that give memory of the cache, which is written to as `update` does it.
_STATES = frozenset(name for name in dir(transformers.Cache) if re.fullmatch("get_[a-z]+_state", name))
_DEPTH = 4

#: What runs code that its node doesn't show, or at another time.
_HIDDEN = {
    ast.Lambda: "a function",
    ast.FunctionDef: "a function",
    ast.AsyncFunctionDef: "a function",
    ast.ClassDef: "a class",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.With: "a context",
    ast.Try: "a 'try'",
    ast.Match: "a 'match'",
    ast.Global: "a 'global'",
    ast.Nonlocal: "a 'nonlocal'",
    ast.GeneratorExp: "a generator",
    ast.Await: "an 'await'",
    ast.Yield: "a 'yield'",
    ast.YieldFrom: "a 'yield'",
}
#: What is inside of them is looked at separately.
_AROUND = (ast.Import, ast.ImportFrom, ast.With, ast.Try)

Position = tuple[int, int]
#: Whether what a call gives is a value, and why the call may write into a tensor: "" if it doesn't.
Called = tuple[bool, str]


def positions(node: Any) -> tuple[Position, Position]:
    """Where a node begins and where it ends: (line, column in bytes)."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


class Body:
    """A function, as far as its source says what its names are.

    Args:
        module: what its first parameter is, where that is a module.
        values: its parameters that are given values.
        states: those of them that are given the state of a cache, or None.
        tensors: its variables that are known to be tensors, whatever is assigned to them.
        parts: the children whose calls give new tensors, and aren't looked at.
        runs: the nodes that may have run, where not all of them may: others assign nothing.
        since: where the first call of a part ends. What was made before it may hold what that was given, under
            whatever name. None where it may run again.
        is_lenient: whether a method of what isn't known is taken for one of a value. It is where nothing depends on
            the answer but how a part is made.
    """

    def __init__(
        self,
        method: Method,
        module: nn.Module | None = None,
        values: Iterable[str] = (),
        states: Iterable[str] = (),
        *,
        tensors: Iterable[str] = (),
        parts: Iterable[str] = (),
        runs: Iterable[ast.AST] | None = None,
        since: Position | None = (0, 0),
        is_lenient: bool = False,
        depth: int = 0,
        known: dict[Any, Any] | None = None,
    ) -> None:
        self.method, self.module, self.parts, self.depth = method, module, frozenset(parts), depth
        self.is_lenient, self.since, self.states = is_lenient, since, frozenset(states)
        self.this = self_of(method.node) if module is not None else ""
        #: what functions were found to be that are followed from here
        self.known = known if known is not None else {}
        #: the attributes of the module whose values were used
        self.constants: dict[str, Any] = {}
        self.assigned: dict[str, list[ast.expr | None]] = {name: [] for name in _locals_of(method)}
        for node in ast.walk(method.node) if runs is None else runs:
            self._note(node)
        #: the variables that are values, if all that is assigned to them is: those that aren't are taken out
        self.values = {name for name, found in self.assigned.items() if found} - set(parameters_of(method.node))
        self.values |= {*values, *tensors}
        while lost := {name for name in self.values.difference(tensors) if not self._are_values(self.assigned[name])}:
            self.values -= lost

    # --- what names are ----------------------------------------------------------------------------------------------

    def _note(self, node: ast.AST) -> None:
        """Note what a node assigns."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._bind(target, _element(value))
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                self.assigned[name].append(ast.BinOp(ast.Name(name, ast.Load()), node.op, value))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if (
                name in self.assigned and name not in parameters_of(self.method.node) and attr not in OF_A_TENSOR
            ):  # a container may keep what it is given
                self.assigned[name] += [_element(each) for each in arguments_of(node)]
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, None)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                self.assigned[name].append(None)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    self.assigned.setdefault((alias.asname or alias.name).partition(".")[0], []).append(None)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if node is not self.method.node:
                self.assigned[name].append(None)
                if is_plain_function(node):
                    results = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
                    self.assigned.setdefault(f"{name}()", []).extend(results)
                    self._note_arguments(node)  # type: ignore[arg-type]

    def _note_arguments(self, inner: ast.FunctionDef) -> None:
        """Note what the parameters of a function that is defined in this one are given."""
        nodes = list(ast.walk(self.method.node))
        calls = [each for each in nodes if isinstance(each, ast.Call) and getattr(each.func, "id", "") == inner.name]
        called = [each.func for each in calls]
        is_known = all(each in called for each in nodes if isinstance(each, ast.Name) and each.id == inner.name)
        names = parameters_of(inner)
        for call in calls:
            is_known &= len(call.args) == len(names) and not call.keywords
            for name, argument in zip(names, call.args, strict=False):
                self._bind(ast.Name(name), argument)
        for name in names if not is_known else ():
            self.assigned[name].append(None)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        match target, value:
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(value.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self._bind(one, other)
            case ((ast.Subscript() | ast.Attribute()), _):
                pass
            case ast.Name(id=name), _:
                self.assigned.setdefault(name, []).append(value)
            case _:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        self.assigned.setdefault(each.id, []).append(value and _element(value))

    def _are_values(self, nodes: Iterable[ast.expr | None]) -> bool:
        return all(each is not None and self.is_value(each) for each in nodes)

    def is_value(self, node: ast.AST) -> bool:
        """Whether an expression is known to give a value."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.Slice() | ast.UnaryOp(op=ast.Not()):
                return True
            case ast.Compare():
                return all(map(self.is_value, _operands(node)))
            case ast.Name(id=name) if name in self.assigned:
                return name in self.values
            case ast.Name():
                return is_plain(self.outside(node))
            case ast.Starred(value=inner) | ast.NamedExpr(value=inner) | ast.UnaryOp(operand=inner):
                return self.is_value(inner)
            case ast.Tuple(elts=inner) | ast.List(elts=inner) | ast.Dict(values=inner) | ast.BoolOp(values=inner):
                return all(map(self.is_value, inner))
            case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
                return self.is_value(one) and self.is_value(other)
            case ast.Subscript(value=inner) | ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner):
                return self.is_value(inner)
            case ast.Attribute(value=inner, attr=attr):
                if self.is_own(node):
                    return attr not in self._assigned_attributes() and is_plain(self.own(attr))
                child = self.own(inner.attr) if self.is_own(inner) else None  # type: ignore[attr-defined]
                if isinstance(child, nn.Module):
                    held = {**vars(child), **child._parameters, **child._buffers}
                    return attr in held and is_plain(held[attr])
                if isinstance(child, transformers.PretrainedConfig):
                    return True  # it holds what JSON can say
                return self.is_value(inner) or is_plain(self.outside(node))
            case ast.Call():
                return self.call(node)[0]
        return False

    def is_state(self, node: ast.AST | None) -> bool:
        """Whether it is the state of a cache, which has memory of its own, or None."""
        match node:
            case ast.Name(id=name) if name in self.states or name not in parameters_of(self.method.node):
                made = self.assigned.get(name, [])
                return bool(made or name in self.states) and all(map(self._gives_state, made))
        return self._gives_state(node)

    def _gives_state(self, node: ast.AST | None) -> bool:
        match node:
            case ast.IfExp(body=one, orelse=other):
                return self._gives_state(one) and self._gives_state(other)
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)):
                return attr in _STATES and not self.is_own(owner) and self.is_value(owner)
        return isinstance(node, ast.Constant) and node.value is None

    def is_new(self, node: ast.AST | None) -> bool:
        """Whether it is a tensor with memory of its own, a number, or a container."""
        match node:
            case ast.Name(id=name) if name in self.assigned and name not in parameters_of(self.method.node):
                made = [each for each in self.assigned[name] if not isinstance(each, ast.Name)]
                return (
                    made == self.assigned[name] != [] and all(map(self._is_late, made)) and all(map(self.is_new, made))
                )
            case ast.BinOp():
                return self.is_value(node)
            case ast.Call(func=ast.Attribute(attr=attr) as func) if self.is_own(func):
                if attr in self.parts and self.is_lenient:
                    return False  # it is memory of the joined product
                layer = type(self.own(attr))
                return layer in _LAYERS and layer not in _VIEWS and not self.call(node)[1]
            case ast.Constant():
                return True
        return False

    def gives_new(self, call: ast.Call) -> bool:
        """Whether a call is known to give new tensors: of layers of torch, of products, of functions for attention."""
        match call.func:
            case ast.Name(id=name) if name in self.assigned:
                return all(map(self._is_attention, self.assigned[name] or [None]))
        found = self.outside(call.func)
        return any(found is each for each in _PRODUCTS) or self._is_attention(call) or self.is_new(call)

    def _is_late(self, made: ast.expr | None) -> bool:
        """Whether what is assigned can't be in what the first call was given."""
        if isinstance(made, ast.Constant) or not hasattr(made, "lineno"):  # a number; or `y += z`, the same as before
            return True
        return self.since is not None and positions(made)[1] >= self.since

    def unknown_operand(self, node: ast.AST) -> ast.expr | None:
        """What an operator is of that isn't known to be a value, and may be given a tensor by it."""
        operands = _operands(node)
        tables = [each for each in operands if isinstance(self.outside(each), type(ACT2FN))]
        unknown = next((each for each in operands if each not in tables and not self.is_value(each)), None)
        return None if all(each is unknown or isinstance(each, ast.Constant) for each in operands) else unknown

    def is_own(self, node: ast.AST) -> bool:
        """Whether it is an attribute of the module."""
        return isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == self.this != ""

    def own(self, name: str) -> Any:
        """What the module has under a name, without running anything; `...` if that isn't known."""
        assert self.module is not None
        for held in (self.module._parameters, self.module._buffers, self.module._modules, vars(self.module)):
            if name in held:
                return held[name]
        found = lookups.get(member, type(self.module), name)
        return ... if found is None or isinstance(found, property) else found

    def _assigned_attributes(self) -> frozenset[str]:
        """The attributes of the module that its own methods assign when they run: their values now prove nothing."""
        key = "assigned", type(self.module)
        if key not in self.known:
            nodes = (node for tree in trees_of(type(self.module)).values() for node in ast.walk(tree))  # type: ignore[arg-type]
            stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
            self.known[key] = frozenset(node.attr for node in stored)
        found: frozenset[str] = self.known[key]
        return found

    def outside(self, node: ast.AST) -> Any:
        """The object that a dotted name means outside of the function; `...` if that isn't known."""
        match node:
            case ast.Name(id=name) if name not in self.assigned:
                return lookups.get(in_namespace, self.method.function.__globals__, name)
            case ast.Attribute(value=inner, attr=attr):
                owner = self.outside(inner)
                if isinstance(owner, ModuleType | type):
                    return lookups.get(attribute, owner, attr)
                if isinstance(owner, _LOGGERS):
                    return getattr(owner, attr, ...)
        return ...

    def flag(self, test: ast.expr) -> bool:
        """Whether an expression of constants and of what the module says of itself holds.

        Raises:
            Exception: it is of something else as well.
        """
        if self.module is None or {each.id for each in ast.walk(test) if isinstance(each, ast.Name)} - {self.this}:
            raise ValueError
        names = {"__builtins__": {}, self.this: _Said(self)}
        return bool(eval(compile(ast.Expression(test), "<test>", "eval"), names))

    def reached(self, ruled_out: list[tuple[str, ast.AST]] | None = None) -> Iterator[ast.AST]:
        """The nodes of the function without the branches that what the module says of itself rules out.

        Args:
            ruled_out: gets those, each with what holds as long as it is.
        """
        pending: list[ast.AST] = [self.method.node]
        while pending:
            node = pending.pop()
            yield node
            children = list(ast.iter_child_nodes(node))
            if isinstance(node, ast.If | ast.IfExp):
                try:
                    holds = self.flag(node.test)
                except Exception:  # it is of something else as well
                    pending += children
                    continue
                text = ast.unparse(node.test)
                text = text if holds else f"not ({text})"
                chosen, others = (
                    each if isinstance(each, list) else [each]
                    for each in ((node.body, node.orelse) if holds else (node.orelse, node.body))
                )
                if ruled_out is not None:
                    ruled_out += [(text, each) for each in others]
                children = [node.test, *chosen]
            pending += children

    # --- what calls do -----------------------------------------------------------------------------------------------

    def call(self, node: ast.Call) -> Called:
        """What a call gives, and why it may write into a tensor."""
        arguments = arguments_of(node)
        if any(each.arg == "out" for each in node.keywords):
            return False, "it writes into 'out'"
        match node.func:
            case ast.Attribute(attr=attr) if self.is_own(node.func):
                if attr in self.parts:
                    return True, ""
                found = self.own(attr)
                if isinstance(found, FunctionType) and attr not in vars(self.module):
                    return self._followed(found, node, self.module)
                return self._call_of(found, node) if found is not ... else (False, f"{attr} isn't known")
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[])) if self.module is not None:
                return self._call_of_base(node.func.attr)
            case ast.Name(id=name) if f"{name}()" in self.assigned and self.assigned[name] == [None]:
                return f"{name}()" in self.values, ""  # its own nodes are looked at with the others
            case ast.Name(id=name) if name in self.assigned:
                is_attention = all(map(self._is_attention, self.assigned[name] or [None]))
                return is_attention, "" if is_attention else f"{name} isn't known before it runs"
            case ast.Subscript(value=table) if isinstance(self.outside(table), type(ACT2FN)):
                return True, ""
        if (found := self.outside(node.func)) is not ...:
            return self._call_of(found, node)
        if not isinstance(node.func, ast.Attribute):
            return False, "what it calls isn't known"
        owner, name = node.func.value, node.func.attr
        if self._is_attention(node):
            return False, ""
        if name == "copy_" and self.is_state(owner):
            return True, ""
        if name in _CHANGING or name.startswith("_") or name.endswith("_"):
            return False, "it may write in place"
        if self.is_lenient and name == "view" and not self.is_own(owner) and [*map(ast.unparse, node.args)] == ["-1"]:
            return False, "only what is contiguous has such a view"
        if self.is_value(owner) and not (self.is_own(owner) and self.own(owner.attr) is None):  # type: ignore[attr-defined]
            # A container that holds it may be all that is known of what it holds.
            keeps = name not in OF_A_TENSOR and not all(map(self.is_value, arguments))
            return not keeps, "it may keep what it is given" if keeps else ""
        if self.is_lenient:
            return True, ""
        arguments_ = self.method.node.args
        if isinstance(owner, ast.Name) and arguments_.kwarg is not None and owner.id == arguments_.kwarg.arg:
            return False, "" if name in ("get", "items", "keys", "values") else "it may keep what it is given"
        return False, f"what {ast.unparse(owner)!r} is isn't known"

    def _is_attention(self, node: ast.AST | None) -> bool:
        """Whether it gives one of transformers' functions for attention, which give new tensors."""
        match node:
            case ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table)):
                return isinstance(self.outside(table), transformers.AttentionInterface)
        return False

    def _call_of_base(self, name: str) -> Called:
        """`super().forward(...)`, of a layer of torch."""
        mro = type(self.module).__mro__
        owner = next((cls for cls in mro if vars(cls).get(self.method.name) is self.method.function), nn.Module)
        base = next((cls for cls in mro[mro.index(owner) + 1 :] if name in vars(cls)), None)
        if self.module is None or base not in _LAYERS or name != "forward":
            return False, "what the base does isn't followed"
        return _of_layer(self.module)

    def _call_of(self, found: Any, node: ast.Call) -> Called:
        if isinstance(found, functools.partial) and not found.args and not {"inplace", "out"} & found.keywords.keys():
            found = found.func
        name = getattr(found, "__name__", "")
        arguments = arguments_of(node)
        if isinstance(found, nn.Module):
            return self._call_of_module(found, node)
        if getattr(builtins, name, None) is found and not (isinstance(found, type) and issubclass(found, Exception)):
            runs = any(each.arg in ("key", "default", None) for each in node.keywords)
            if name not in _BUILTINS:
                return False, f"{name}() may run anything"
            if runs or any(isinstance(each, ast.GeneratorExp | ast.Lambda) for each in ast.walk(node)):
                return False, "it runs a function"
            return name not in ("getattr", "super") and all(map(self.is_value, arguments)), ""
        if isinstance(found, type):
            is_plain = issubclass(found, Exception) or found in (torch.Size, torch.device, torch.finfo)
            return is_plain, "" if is_plain else f"{name} is a class"
        if isinstance(getattr(found, "__self__", None), _LOGGERS):
            return True, ""
        home = (getattr(found, "__module__", None) or "").partition(".")[0]
        if home == "math" or found is math.prod:
            return True, ""
        if home == "torch" or isinstance(found, BuiltinFunctionType):
            return self._call_of_torch(found, name, node)
        if isinstance(found, FunctionType):
            return self._followed(unwrapped(found), node, None)
        return False, "what it calls isn't known"

    def _call_of_torch(self, found: Any, name: str, node: ast.Call) -> Called:
        homes = (torch, nn.functional, torch.linalg)
        if (
            not any(getattr(home, name.removeprefix("linalg_"), None) is found for home in homes)
            or not (isinstance(found, BuiltinFunctionType) or name in _OF_TENSORS or hasattr(nn.functional, name))
            or name in _CHANGING
            or name.endswith("_")
            or name.startswith(("_", "set_"))
        ):
            return False, f"torch's {name} may change what it is given"
        try:
            parameters = list(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            parameters = []
        if "inplace" in parameters:
            given = [each.value for each in node.keywords if each.arg in ("inplace", None)]
            given += node.args[parameters.index("inplace") :]
            given += [each for each in node.args if isinstance(each, ast.Starred)]
            if not all(isinstance(each, ast.Constant) and each.value is False for each in given):
                return False, "it may write in place"
        return True, ""

    def _call_of_module(self, module: nn.Module, node: ast.Call) -> Called:
        cls = type(module)
        if module._forward_hooks or module._forward_pre_hooks:
            return False, f"{cls.__name__} has hooks"
        if "forward" in vars(module) or cls.__call__ is not nn.Module.__call__:
            return False, f"{cls.__name__} isn't called by the forward of its class"
        if cls in _LAYERS:
            return _of_layer(module)
        if cls is nn.Sequential:
            calls = [self._call_of_module(each, node) for each in module._modules.values() if each is not None]
            return all(is_value for is_value, _ in calls), next((reason for _, reason in calls if reason), "")
        return self._followed(unwrapped(lookups.get(member, cls, "forward")), node, module)

    # --- what is followed --------------------------------------------------------------------------------------------

    def _followed(self, function: Any, node: ast.Call, module: nn.Module | None) -> Called:
        """What a function of modeling code does that is called like this."""
        if not isinstance(function, FunctionType):
            return False, "its source can't be read"
        try:
            method = read_function(function)
            names = parameters_of(method.node)[0 if module is None else 1 :]
            states = {name for name, each in zip(names, node.args, strict=False) if self.is_state(each)}
            given = dict(zip(names, map(self.is_value, node.args), strict=False))
            if any(isinstance(each, ast.Starred) for each in node.args):
                given, states = dict.fromkeys(names, False), set()
            given |= {each.arg: self.is_value(each.value) for each in node.keywords if each.arg is not None}
            is_complete = not any(each.arg is None for each in node.keywords)
            if is_complete:
                defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
                given = {name: isinstance(value, _CONSTANTS) for name, value in defaults.items()} | given
            return self._result_of(method, module, {name for name in names if given.get(name)}, states), ""
        except NotUnderstoodError as error:
            return False, str(error)

    def _result_of(
        self, method: Method, module: nn.Module | None, values: Iterable[str], states: Iterable[str]
    ) -> bool:
        """Whether what it gives is a value.

        Raises:
            NotUnderstoodError: it may write into a tensor.
        """
        if self.depth >= _DEPTH:
            raise NotUnderstoodError("it goes too deep")
        key = method.function, frozenset(values), frozenset(states), id(module)
        if key not in self.known:
            self.known[key] = NotUnderstoodError("it calls itself")
            body = Body(
                method, module, values, states, is_lenient=self.is_lenient, depth=self.depth + 1, known=self.known
            )
            try:
                check(body, (node for statement in method.node.body for node in ast.walk(statement)))
                results = [node.value for node in ast.walk(method.node) if isinstance(node, ast.Return)]
                self.known[key] = all(each is None or body.is_value(each) for each in results)
            except NotUnderstoodError as error:
                self.known[key] = located(error, method)
        found: bool | NotUnderstoodError = self.known[key]
        if isinstance(found, NotUnderstoodError):
            raise found
        return found

    def problem_of_property(self, name: str) -> str:
        """Why reading an attribute of the module may write into a tensor: a property runs."""
        getter = lookups.get(member, type(self.module), name)
        if not isinstance(getter, property) or name in self.parts or name in vars(self.module):
            return ""
        return f"the property {name!r} isn't followed"


class _Said:
    """What a module says of itself, for tests that decide which branches run: plain attributes, and what is absent."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def __getattr__(self, name: str) -> Any:
        body, value = self._body, self._body.own(name)
        if name in body._assigned_attributes() or name == "training":
            raise ValueError(name)
        if name in body.module._modules:  # type: ignore[union-attr]
            return None if value is None else _Child()
        if name not in vars(body.module) or isinstance(value, torch.Tensor) or not is_plain(value):
            raise ValueError(name)
        body.constants[name] = value
        return value


class _Child:
    """A child of a module, of which only that it is there is known."""

    def __bool__(self) -> bool:
        raise ValueError


def check(body: Body, nodes: Iterable[ast.AST]) -> None:
    """Raise for the first of these nodes that may write into a tensor, or run what isn't seen.

    Raises:
        NotUnderstoodError: with its line.
    """
    for node in nodes:
        if reason := problem_of(body, node):
            raise NotUnderstoodError(reason, getattr(node, "lineno", 1))


def problem_of(body: Body, node: ast.AST) -> str:
    if body.is_lenient and isinstance(node, _AROUND):
        return ""
    if (what := _HIDDEN.get(type(node))) is not None and not is_plain_function(node):
        return f"{what} that isn't followed"
    if not body.is_lenient and (unknown := body.unknown_operand(node)) is not None:
        return problem_of(body, unknown) or f"{shown(node)!r} (what {shown(unknown)!r} is isn't known)"
    match node:
        case ast.Call():
            reason = body.call(node)[1]
            return f"{shown(node)!r} ({reason})" if reason else ""
        case ast.AugAssign(target=target) if not body.is_new(target):
            return f"{shown(node)!r} (it may write in place)"
        case ast.Subscript(value=ast.Attribute(value=owner, attr=attr), ctx=ast.Store()) if (
            body.is_lenient or body.is_value(owner)
        ) and attr not in OF_A_TENSOR:
            return ""  # what no tensor has is of a cache
        case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            return f"{shown(node)!r} is assigned"
        case ast.Attribute(attr=attr) if body.is_own(node):
            return body.problem_of_property(attr)
        case ast.For(iter=inner) | ast.comprehension(iter=inner):
            is_counted = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in ("range", "enumerate", "zip")
            if not (body.is_lenient or is_counted or body.is_value(inner)):
                return f"a loop over {shown(inner)!r}, which isn't known"
    return ""


def _operands(node: ast.AST) -> list[ast.expr]:
    """What an operator is of, if its objects decide what it does."""
    match node:
        case ast.BinOp(left=one, right=other) | ast.Subscript(value=one, slice=other, ctx=ast.Load()):
            return [one, other]
        case ast.Compare(left=one, ops=ops, comparators=others):
            return [] if all(isinstance(each, ast.Is | ast.IsNot) for each in ops) else [one, *others]
    return []


def is_plain_function(node: ast.AST) -> bool:
    """Whether it defines a function of parameters without defaults, which itself does nothing yet."""
    if not isinstance(node, ast.FunctionDef):
        return False
    more = [*node.decorator_list, *node.args.defaults, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return not any(more)


def shown(node: ast.AST) -> str:
    """A piece of source, as reasons have it."""
    return shortened(node, 60)


def _of_layer(module: nn.Module) -> Called:
    """What calling a layer of torch does."""
    if setting := next((each for each in _WRITING_SETTINGS if getattr(module, each, None)), ""):
        return False, f"{type(module).__name__} has {setting}={getattr(module, setting)!r}"
    return True, ""


def _element(value: ast.expr) -> ast.expr:
    """One of what a value holds, which is a value too."""
    return ast.Starred(value, ast.Load())


def is_plain(value: Any) -> bool:
    """Whether an object is a value: nothing that it has writes into a tensor by what it is called."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, (*_CONSTANTS, torch.Tensor))


def _locals_of(method: Method) -> Iterator[str]:
    """The names that a function has of its own."""
    code = method.function.__code__
    yield from (*code.co_varnames, *code.co_cellvars)
    for node in ast.walk(method.node):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """What a call is given."""
    return [*call.args, *(each.value for each in call.keywords)]


def parameters_of(node: ast.FunctionDef) -> list[str]:
    """The names of the parameters of a function."""
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
