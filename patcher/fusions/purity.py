"""Whether the code between two calls may write into a tensor, according to its source.

Allowed are operations on values: tensors, numbers, caches, and containers of values. The operators of a value don't
write into a tensor, except for assignments, nor do its methods, except for those whose names end in an underscore and
a few more. Allowed are also calls of functions of torch, of its layers by their class, and of functions and modules of
modeling code whose source has nothing else. The name of a method proves nothing about an unknown object, so everything
else is a problem, which is raised with its line.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import re
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from patcher.compat.models import ACT2FN
from patcher.fusions.methods import (
    Method,
    NotUnderstoodError,
    located,
    look_up,
    nodes_of,
    read_function,
    self_of,
    trees_of,
    unwrapped,
)
from patcher.source.call_sites import shortened
from patcher.source.reading import signature_of

#: Methods of values, and functions of torch, that modify something or expose memory, though their names don't end in
#: an underscore; and those that may write into a weight or statistics.
_MODIFYING = frozenset(
    "backward register_hook register_post_accumulate_grad_hook retain_grad numpy untyped_storage storage map_ "
    "share_memory_ module_load embedding embedding_bag batch_norm instance_norm".split()
)
#: Python functions of `torch` for tensors.
_TENSOR_FUNCTIONS = frozenset([*torch.functional.__all__, "is_tensor"])
#: Attributes of tensors. An object with others is a cache or a container.
TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))
#: Builtins that don't modify their arguments.
_BUILTINS = frozenset(
    "len isinstance issubclass int float bool str abs round id hasattr range min max sum tuple list dict set zip "
    "enumerate reversed getattr any all divmod print repr super".split()
)
#: Layers of torch that don't write into their input, unless `_MODIFYING_SETTINGS` are set.
_LAYERS: frozenset[type[nn.Module]] = frozenset(
    getattr(nn, name)
    for name in (
        "Identity Linear LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d Conv1d Conv2d Conv3d Embedding Dropout "
        "Dropout1d Dropout2d GELU SiLU ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GLU Mish Hardswish Hardsigmoid "
        "Hardtanh Sigmoid LogSigmoid Tanh Softmax LogSoftmax Softplus Softsign Flatten Unflatten AvgPool1d AvgPool2d "
        "MaxPool1d MaxPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d Upsample"
    ).split()
)
#: Functions of torch that always return a new tensor.
_RETURNING_NEW = (
    *(getattr(torch, name) for name in "matmul bmm baddbmm softmax cat stack where".split()),
    *(nn.functional.softmax, nn.functional.scaled_dot_product_attention),
)
#: Types without methods that modify anything.
_CONSTANT_TYPES = (type(None), int, float, str, torch.dtype, torch.device)
_MODIFYING_SETTINGS = ("inplace", "max_norm")
#: Methods of caches that return memory of the cache, into which `update` writes, too.
_STATE_GETTERS = frozenset(name for name in dir(transformers.Cache) if re.fullmatch("get_[a-z]+_state", name))
_MAX_DEPTH = 4

#: Nodes that run code which they don't show, or at another time.
_NOT_FOLLOWED = {
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
#: Nodes whose children are checked by themselves.
_ENCLOSING = (ast.Import, ast.ImportFrom, ast.With, ast.Try)

Position = tuple[int, int]
#: Whether the result of a call is a value, and why the call may write into a tensor, "" if it doesn't.
Called = tuple[bool, str]


def positions(node: Any) -> tuple[Position, Position]:
    """Return start and end of a node: (line, column in bytes)."""
    if isinstance(node, ast.comprehension):
        node = node.target  # itself, it has none
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


class Body:
    """What the source of a function tells about its variables.

    Args:
        module: the value of the first parameter, if it is a module.
        values: the parameters that get values.
        states: the parameters that get the state of a cache, or None.
        tensors: the variables that are known to be tensors, whatever is assigned to them.
        parts: the children whose calls return new tensors, and aren't followed.
        runs: the nodes that may have run, if not all; assignments in others are ignored.
        is_lenient: whether methods of unknown objects are assumed to be those of values, where the result only decides
            how a part is computed.
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
        is_lenient: bool = False,
        depth: int = 0,
        cache: dict[Any, Any] | None = None,
    ) -> None:
        self.method, self.module, self.parts, self.depth = method, module, frozenset(parts), depth
        self.is_lenient, self.states = is_lenient, frozenset(states)
        self.self_name = self_of(method.node) if module is not None else ""
        #: the results for the functions that are followed
        self.cache = cache if cache is not None else {}
        #: the attributes of the module whose values the result depends on
        self.constants: dict[str, Any] = {}
        self.assigned: dict[str, list[ast.expr | None]] = {name: [] for name in _locals_of(method)}
        for node in nodes_of(method.node) if runs is None else runs:
            self._record_assignments(node)
        #: the variables to which only values are assigned: starts with all, then others are removed until none is left
        self.values = {name for name, nodes in self.assigned.items() if nodes} - set(parameters_of(method.node))
        self.values |= {*values, *tensors}
        while lost := {name for name in self.values.difference(tensors) if not self._are_values(self.assigned[name])}:
            self.values -= lost

    # --- variables ---------------------------------------------------------------------------------------------------

    def _record_assignments(self, node: ast.AST) -> None:
        """Record the assignments of a node."""
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
                name in self.assigned and name not in parameters_of(self.method.node) and attr not in TENSOR_ATTRIBUTES
            ):  # a container may store the arguments
                self.assigned[name] += [_element(argument) for argument in arguments_of(node)]
            case ast.withitem(optional_vars=ast.expr() as target):
                self._bind(target, None)
            case (
                ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name))
                | ast.alias(asname=str(name)) | ast.alias(name=name)
                | ast.FunctionDef(name=name) | ast.ClassDef(name=name)
            ) if node is not self.method.node:  # fmt: skip
                self.assigned.setdefault(name.partition(".")[0], []).append(None)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        match target, value:
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(value.elts):
                for inner_target, inner_value in zip(target.elts, value.elts, strict=True):
                    self._bind(inner_target, inner_value)
            case ((ast.Subscript() | ast.Attribute()), _):
                pass
            case ast.Name(id=name), _:
                self.assigned.setdefault(name, []).append(value)
            case _:
                for inner in ast.walk(target):
                    if isinstance(inner, ast.Name):
                        self.assigned.setdefault(inner.id, []).append(value and _element(value))

    def _are_values(self, nodes: Iterable[ast.expr | None]) -> bool:
        return all(node is not None and self.is_value(node) for node in nodes)

    def is_value(self, node: ast.AST) -> bool:
        """Whether the result of an expression is known to be a value."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.Slice() | ast.UnaryOp(op=ast.Not()):
                return True
            case ast.Compare():
                return all(map(self.is_value, _operands(node)))
            case ast.Name(id=name) if name in self.assigned:
                return name in self.values
            case ast.Name():
                return is_plain(self.resolve(node))
            case ast.Starred(value=inner) | ast.NamedExpr(value=inner) | ast.UnaryOp(operand=inner):
                return self.is_value(inner)
            case ast.Tuple(elts=inner) | ast.List(elts=inner) | ast.Dict(values=inner) | ast.BoolOp(values=inner):
                return all(map(self.is_value, inner))
            case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
                return self.is_value(left) and self.is_value(right)
            case ast.Subscript(value=inner) | ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner):
                return self.is_value(inner)
            case ast.Attribute(value=inner, attr=attr):
                if self.is_self_attr(node):
                    return attr not in self._assigned_attributes() and is_plain(self.self_attr(attr))
                child = self.self_attr(inner.attr) if self.is_self_attr(inner) else None  # type: ignore[attr-defined]
                if isinstance(child, nn.Module):
                    members = {**vars(child), **child._parameters, **child._buffers}
                    return attr in members and is_plain(members[attr])
                if isinstance(child, transformers.PretrainedConfig):
                    return True  # it contains what JSON can express
                return self.is_value(inner) or is_plain(self.resolve(node))
            case ast.Call():
                return self.call(node)[0]
        return False

    def is_state(self, node: ast.AST | None) -> bool:
        """Whether the result of an expression is the state of a cache, which has its own memory, or None."""
        match node:
            case ast.Name(id=name) if name in self.states or name not in parameters_of(self.method.node):
                assigned = self.assigned.get(name, [])
                return bool(assigned or name in self.states) and all(map(self._is_state_getter, assigned))
        return self._is_state_getter(node)

    def _is_state_getter(self, node: ast.AST | None) -> bool:
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                return self._is_state_getter(body) and self._is_state_getter(orelse)
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)):
                return attr in _STATE_GETTERS and not self.is_self_attr(owner) and self.is_value(owner)
        return isinstance(node, ast.Constant) and node.value is None

    def gives_new(self, call: ast.Call) -> bool:
        """Whether a call is known to return new tensors: of products or attention functions."""
        match call.func:
            case ast.Name(id=name) if name in self.assigned:
                return all(map(self._is_attention, self.assigned[name] or [None]))
            case ast.Attribute(attr=attr) if self.is_self_attr(call.func) and attr not in self.parts:
                return type(self.self_attr(attr)) is nn.Linear
        function = self.resolve(call.func)
        return any(function is other for other in _RETURNING_NEW) or self._is_attention(call)

    def unknown_operand(self, node: ast.AST) -> ast.expr | None:
        """Return an operand that isn't known to be a value, and whose operator may get a tensor, if there is one."""
        operands = [operand for operand in _operands(node) if not isinstance(operand, ast.Constant)]
        tables = [operand for operand in operands if isinstance(self.resolve(operand), type(ACT2FN))]
        unknown = next((operand for operand in operands if operand not in tables and not self.is_value(operand)), None)
        return unknown if operands != [unknown] else None

    def is_self_attr(self, node: ast.AST) -> bool:
        """Whether an expression is an attribute of the module."""
        return isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == self.self_name != ""

    def self_attr(self, name: str) -> Any:
        """Return an attribute of the module without running a property; `...` if it isn't known."""
        assert self.module is not None
        for members in (self.module._parameters, self.module._buffers, self.module._modules, vars(self.module)):
            if name in members:
                return members[name]
        value = look_up(type(self.module), name)
        return ... if isinstance(value, property) else value

    def _assigned_attributes(self) -> frozenset[str]:
        """The attributes that methods of the module assign, whose current values prove nothing."""
        key = "assigned", type(self.module)
        if key not in self.cache:
            nodes = (node for tree in trees_of(type(self.module)).values() for node in nodes_of(tree))  # type: ignore[arg-type]
            stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
            self.cache[key] = frozenset(node.attr for node in stored)
        names: frozenset[str] = self.cache[key]
        return names

    def resolve(self, node: ast.AST) -> Any:
        """Return the object of a dotted name outside of the function; `...` if it isn't known."""
        match node:
            case ast.Name(id=name) if name not in self.assigned:
                return look_up(self.method.function.__globals__, name)
            case ast.Attribute(value=inner, attr=attr):
                owner = self.resolve(inner)
                if isinstance(owner, ModuleType | type):
                    return look_up(owner, attr)
        return ...

    def evaluate(self, test: ast.expr) -> bool:
        """Evaluate a condition on constants and attributes of the module.

        Raises:
            Exception: it depends on something else.
        """
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        if self.module is None or names - {self.self_name}:
            raise ValueError
        namespace = {"__builtins__": {}, self.self_name: _ModuleFlags(self)}
        return bool(eval(compile(ast.Expression(test), "<test>", "eval"), namespace))

    def reached(self, ruled_out: list[tuple[str, ast.AST]] | None = None) -> Iterator[ast.AST]:
        """Yield the nodes of the function, without branches that the attributes of the module rule out.

        Args:
            ruled_out: a list to add those branches to, as pairs of the condition that rules one out and the branch.
        """
        pending: list[ast.AST] = [self.method.node]
        while pending:
            node = pending.pop()
            yield node
            children = list(ast.iter_child_nodes(node))
            if isinstance(node, ast.If | ast.IfExp):
                try:
                    holds = self.evaluate(node.test)
                except Exception:  # the condition depends on something else
                    pending += children
                    continue
                text = ast.unparse(node.test)
                text = text if holds else f"not ({text})"
                chosen, others = (
                    branch if isinstance(branch, list) else [branch]
                    for branch in ((node.body, node.orelse) if holds else (node.orelse, node.body))
                )
                if ruled_out is not None:
                    ruled_out += [(text, branch) for branch in others]
                children = [node.test, *chosen]
            pending += children

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, node: ast.Call) -> Called:
        """Whether a call returns a value, and why it may write into a tensor."""
        arguments = arguments_of(node)
        if any(keyword.arg == "out" for keyword in node.keywords):
            return False, "it writes into 'out'"
        match node.func:
            case ast.Attribute(attr=attr) if self.is_self_attr(node.func):
                if attr in self.parts:
                    return True, ""
                function = self.self_attr(attr)
                if isinstance(function, FunctionType) and attr not in vars(self.module):
                    return self._follow(function, node, self.module)
                return self._call_of(function, node) if function is not ... else (False, f"{attr} isn't known")
            case ast.Name(id=name) if name in self.assigned:
                is_attention = all(map(self._is_attention, self.assigned[name] or [None]))
                return is_attention, "" if is_attention else f"{name} isn't known before it runs"
            case ast.Subscript(value=table) if isinstance(self.resolve(table), type(ACT2FN)):
                return True, ""
        if (function := self.resolve(node.func)) is not ...:
            return self._call_of(function, node)
        if not isinstance(node.func, ast.Attribute):
            return False, "the called function isn't known"
        owner, name = node.func.value, node.func.attr
        if self._is_attention(node):
            return False, ""
        if name == "copy_" and self.is_state(owner):
            return True, ""
        if name in _MODIFYING or name.startswith("_") or name.endswith("_"):
            return False, "it may write in place"
        flattens = name == "view" and [*map(ast.unparse, node.args)] == ["-1"]
        if self.is_lenient and flattens and not self.is_self_attr(owner):
            return False, "only what is contiguous has such a view"
        if self.is_value(owner) and not (self.is_self_attr(owner) and self.self_attr(owner.attr) is None):  # type: ignore[attr-defined]
            # A container with an unknown element would be taken for a container of values.
            stores = name not in TENSOR_ATTRIBUTES and not all(map(self.is_value, arguments))
            return not stores, "it may store its arguments" if stores else ""
        if self.is_lenient:
            return True, ""
        kwargs = self.method.node.args.kwarg
        if isinstance(owner, ast.Name) and kwargs is not None and owner.id == kwargs.arg:
            return False, "" if name in ("get", "items", "keys", "values") else "it may store its arguments"
        return False, f"the type of {ast.unparse(owner)!r} isn't known"

    def _is_attention(self, node: ast.AST | None) -> bool:
        """Whether it looks up one of transformers' attention functions, which return new tensors."""
        match node:
            case ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table)):
                return isinstance(self.resolve(table), transformers.AttentionInterface)
        return False

    def _call_of(self, callee: Any, node: ast.Call) -> Called:
        if isinstance(callee, functools.partial) and not callee.args and not {"inplace", "out"} & {*callee.keywords}:
            callee = callee.func
        name = getattr(callee, "__name__", "")
        is_exception = isinstance(callee, type) and issubclass(callee, Exception)
        if isinstance(callee, nn.Module):
            return self._call_of_module(callee, node)
        if getattr(builtins, name, None) is callee and not is_exception:
            if name not in _BUILTINS or any(keyword.arg in ("key", "default", None) for keyword in node.keywords):
                return False, f"{name}() may run anything"
            return name not in ("getattr", "super") and all(map(self.is_value, arguments_of(node))), ""
        if isinstance(callee, type):
            is_known = is_exception or callee in (torch.Size, torch.device, torch.finfo)
            return is_known, "" if is_known else f"{name} is a class"
        root = (getattr(callee, "__module__", None) or "").partition(".")[0]
        if root == "math" or callee is math.prod:
            return True, ""
        if root == "torch" or isinstance(callee, BuiltinFunctionType):
            return self._call_of_torch(callee, name, node)
        if isinstance(callee, FunctionType):
            return self._follow(unwrapped(callee), node, None)
        return False, "the called function isn't known"

    def _call_of_torch(self, callee: Any, name: str, node: ast.Call) -> Called:
        namespaces = (torch, nn.functional, torch.linalg)
        is_native = isinstance(callee, BuiltinFunctionType)
        if (
            not any(getattr(namespace, name.removeprefix("linalg_"), None) is callee for namespace in namespaces)
            or not (is_native or name in _TENSOR_FUNCTIONS or hasattr(nn.functional, name))
            or name in _MODIFYING
            or name.endswith("_")
            or name.startswith(("_", "set_"))
        ):
            return False, f"torch's {name} may modify its arguments"
        try:
            parameters = list(inspect.signature(callee).parameters)
        except (TypeError, ValueError):
            parameters = []
        if "inplace" in parameters:
            settings = [keyword.value for keyword in node.keywords if keyword.arg in ("inplace", None)]
            settings += node.args[parameters.index("inplace") :]
            settings += [argument for argument in node.args if isinstance(argument, ast.Starred)]
            if not all(isinstance(argument, ast.Constant) and argument.value is False for argument in settings):
                return False, "it may write in place"
        return True, ""

    def _call_of_module(self, module: nn.Module, node: ast.Call) -> Called:
        cls = type(module)
        if module._forward_hooks or module._forward_pre_hooks:
            return False, f"{cls.__name__} has hooks"
        if "forward" in vars(module) or cls.__call__ is not nn.Module.__call__:
            return False, f"{cls.__name__} isn't called by the forward of its class"
        if cls in _LAYERS:
            setting = next((name for name in _MODIFYING_SETTINGS if getattr(module, name, None)), "")
            return not setting, f"{cls.__name__} has {setting}={getattr(module, setting)!r}" if setting else ""
        return self._follow(unwrapped(look_up(cls, "forward")), node, module)

    # --- followed functions ------------------------------------------------------------------------------------------

    def _follow(self, function: Any, node: ast.Call, module: nn.Module | None) -> Called:
        """The same for a function of modeling code, by its source."""
        if not isinstance(function, FunctionType):
            return False, "its source can't be read"
        try:
            method = read_function(function)
            passed = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
            is_starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            positional: list[Any] = [] if is_starred else node.args if module is None else [module, *node.args]
            bound = signature_of(function).bind_partial(*positional, **passed)
            if not is_starred and len(passed) == len(node.keywords):
                bound.apply_defaults()
            values, states = set[str](), set[str]()
            for name, value in bound.arguments.items():
                is_node = isinstance(value, ast.AST)
                if self.is_value(value) if is_node else isinstance(value, _CONSTANT_TYPES):
                    values.add(name)
                if is_node and self.is_state(value):
                    states.add(name)
            return self._returns_value(method, module, values, states), ""
        except (NotUnderstoodError, TypeError) as error:  # or the arguments don't fit
            return False, str(error)

    def _returns_value(
        self, method: Method, module: nn.Module | None, values: Iterable[str], states: Iterable[str]
    ) -> bool:
        """Whether a method returns a value.

        Raises:
            NotUnderstoodError: it may write into a tensor.
        """
        if self.depth >= _MAX_DEPTH:
            raise NotUnderstoodError("it goes too deep")
        key = method.function, frozenset(values), frozenset(states), id(module)
        if key not in self.cache:
            self.cache[key] = NotUnderstoodError("it calls itself")
            body = Body(
                method, module, values, states, is_lenient=self.is_lenient, depth=self.depth + 1, cache=self.cache
            )
            try:
                check(body, (node for statement in method.node.body for node in ast.walk(statement)))
                results = [node.value for node in nodes_of(method.node) if isinstance(node, ast.Return)]
                self.cache[key] = all(result is None or body.is_value(result) for result in results)
            except NotUnderstoodError as error:
                self.cache[key] = located(error, method)
        result: bool | NotUnderstoodError = self.cache[key]
        if isinstance(result, NotUnderstoodError):
            raise result
        return result

    def problem_of_property(self, name: str) -> str:
        """Why reading an attribute of the module may write into a tensor, "" if it isn't a property."""
        getter = look_up(type(self.module), name)
        if not isinstance(getter, property) or name in self.parts or name in vars(self.module):
            return ""
        return f"the property {name!r} isn't followed"


class _ModuleFlags:
    """The attributes of a module that a condition may use: constants, and whether a child is None."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def __getattr__(self, name: str) -> Any:
        body, value = self._body, self._body.self_attr(name)
        if name in body._assigned_attributes() or name == "training":
            raise ValueError(name)
        if name in body.module._modules:  # type: ignore[union-attr]
            return None if value is None else _ChildFlag()
        if name not in vars(body.module) or isinstance(value, torch.Tensor) or not is_plain(value):
            raise ValueError(name)
        body.constants[name] = value
        return value


class _ChildFlag:
    """A child of a module, which is known not to be None."""

    def __bool__(self) -> bool:
        raise ValueError


def check(body: Body, nodes: Iterable[ast.AST]) -> None:
    """Check that nodes neither write into a tensor nor run code that can't be followed.

    Raises:
        NotUnderstoodError: the first that may, with its line.
    """
    for node in nodes:
        if reason := problem_of(body, node):
            raise NotUnderstoodError(reason, getattr(node, "lineno", 1))


def problem_of(body: Body, node: ast.AST) -> str:
    if body.is_lenient and isinstance(node, _ENCLOSING):
        return ""
    if (kind := _NOT_FOLLOWED.get(type(node))) is not None:
        return f"{kind} that isn't followed"
    if not body.is_lenient and (unknown := body.unknown_operand(node)) is not None:
        return problem_of(body, unknown) or f"{shorten(node)!r} (the type of {shorten(unknown)!r} isn't known)"
    match node:
        case ast.Call():
            reason = body.call(node)[1]
            return f"{shorten(node)!r} ({reason})" if reason else ""
        case ast.AugAssign():
            return f"{shorten(node)!r} (it may write in place)"
        case ast.Subscript(value=ast.Attribute(value=owner, attr=attr), ctx=ast.Store()) if (
            body.is_lenient or body.is_value(owner)
        ) and attr not in TENSOR_ATTRIBUTES:
            return ""  # tensors don't have the attribute, so it is one of a cache
        case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            return f"{shorten(node)!r} is assigned"
        case ast.Attribute(attr=attr) if body.is_self_attr(node):
            return body.problem_of_property(attr)
        case ast.For(iter=inner) | ast.comprehension(iter=inner):
            is_counted = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in ("range", "enumerate", "zip")
            if not (body.is_lenient or is_counted or body.is_value(inner)):
                return f"a loop over {shorten(inner)!r}, which isn't known"
    return ""


def _operands(node: ast.AST) -> list[ast.expr]:
    """Return the operands of an operator that runs methods of theirs."""
    match node:
        case ast.BinOp(left=left, right=right) | ast.Subscript(value=left, slice=right, ctx=ast.Load()):
            return [left, right]
        case ast.Compare(left=left, ops=ops, comparators=others):
            return [] if all(isinstance(op, ast.Is | ast.IsNot) for op in ops) else [left, *others]
    return []


def shorten(node: ast.AST) -> str:
    """Return shortened source for a reason."""
    return shortened(node, 60)


def _element(value: ast.expr) -> ast.expr:
    """Return an expression for an element of a value, which is a value too."""
    return ast.Starred(value, ast.Load())


def is_plain(value: Any) -> bool:
    """Whether an object is a value, as the docstring of this module has it."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, (*_CONSTANT_TYPES, torch.Tensor))


def _locals_of(method: Method) -> Iterator[str]:
    """Yield the local names of a function."""
    code = method.function.__code__
    yield from (*code.co_varnames, *code.co_cellvars)
    for node in nodes_of(method.node):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return the positional and keyword arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def parameters_of(node: ast.FunctionDef) -> list[str]:
    """Return the names of the parameters of a function, without variadic ones."""
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
