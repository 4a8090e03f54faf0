"""What runs between two calls: whether it may write into a tensor, by its source.

Known are operators, attributes, functions of torch that write into nothing, methods of what is a tensor, norms,
activations and other layers of torch by their class, caches of transformers (a check of their class comes with it),
and functions and modules of modeling code whose own source has nothing else. A name of a method tells nothing of an
object that isn't known, so all else is a problem, which is raised with its line.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    looks,
    member,
    read_function,
    self_of,
    trees_of,
    unwrapped,
)
from patcher.source.call_sites import shortened

#: What a value is known to be: a tensor; one that isn't in the memory that is watched; a container of tensors, or one
#: of them; a number, a shape, a container of these; a cache of transformers; anything. Functions: one of transformers'
#: for attention, which gives new tensors; one that writes into nothing.
TENSOR, FRESH, SEVERAL, PLAIN, CACHE, UNKNOWN = "tensor", "fresh", "several", "plain", "cache", "unknown"
ATTENTION, READING = "attention", "reading"
#: `**kwargs`, whose own methods are known, and nothing of what it holds.
_HOLDING = "holding"

#: Functions and methods of torch that make tensors with memory of their own, of numbers or of others.
_MAKING = frozenset(
    "arange cat concat stack zeros ones full empty zeros_like ones_like full_like empty_like rand randn rand_like "
    "randn_like linspace eye tensor outer where clone new_zeros new_ones new_empty new_full new_tensor "
    "scaled_dot_product_attention linear one_hot conv1d conv2d conv3d layer_norm rms_norm normalize "
    "silu gelu sigmoid tanh softmax softplus matmul bmm mul add sub div pow rsqrt sqrt mean sum exp cos sin "
    "neg".split()
)
_MORE_OF_TORCH = _MAKING | frozenset(
    "einsum interpolate meshgrid broadcast_tensors as_tensor is_tensor finfo iinfo Size device".split()
)
#: Methods of containers by which they hold what they are given.
_STORING = frozenset("append appendleft extend insert add setdefault update".split())
#: Methods of tensors that aren't in place by their name and yet change something, or give memory away.
_CHANGING = frozenset(
    "backward register_hook register_post_accumulate_grad_hook retain_grad numpy untyped_storage storage apply_ map_ "
    "share_memory_ module_load".split()
)
#: Functions and methods of torch that give several tensors.
_DIVIDING = frozenset(
    "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk unbind tensor_split hsplit vsplit "
    "dsplit broadcast_tensors meshgrid align_tensors atleast_1d atleast_2d atleast_3d max min sort topk kthvalue mode "
    "median nanmedian aminmax cummax cummin".split()
)
#: Operators by which containers are joined or repeated, which then hold what they did.
_JOINING = ast.Add | ast.Mult | ast.BitOr
#: Functions of torch that may write into a weight, or into statistics, that they are given.
_KEEPING_STATISTICS = frozenset("embedding embedding_bag batch_norm instance_norm".split())
_PLAIN_RESULTS = frozenset("size dim numel item tolist stride get_device is_floating_point is_complex ndim".split())
_PLAIN_ATTRIBUTES = frozenset("shape dtype device ndim layout requires_grad is_cuda".split())
#: Functions that run no code of what they are given, or only read it.
_BUILTINS = frozenset(
    "len isinstance issubclass int float bool str abs round id hasattr range min max sum tuple list dict set zip "
    "enumerate reversed getattr any all divmod print repr super".split()
)
_PLAIN_BUILTINS = frozenset("len isinstance int float bool str hasattr range".split())
#: Layers of torch that write into nothing that they are given, unless they are told to by these settings.
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
_WRITING_SETTINGS = ("inplace", "max_norm")
_DEPTH = 4
#: Noted among what is known where a cache was given something that is watched.
_KEPT = "kept"

_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}

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


_AROUND = (ast.Import, ast.ImportFrom, ast.With, ast.Try)


def positions(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where a node begins and where it ends: (line, column in bytes)."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


@dataclass
class Body:
    """A function, as far as its source says what its names are.

    Attributes:
        module: what its first parameter is, where that is a module.
        given: what its parameters are known to be.
        watched: the variables that hold what is watched, tensors.
        trusted: the parameters that are taken for objects of the classes that they are annotated with.
        constants: the attributes of the module whose values were used.
        is_lenient: whether what the parts give is watched, in place of what they are given. That only decides whether
            it is copied, so all of them are trusted, and methods of unknown objects do what those of tensors do.
        considered: the nodes that may have run, where that is known.
        parts: the children whose calls give new tensors, and aren't looked at.
    """

    method: Method
    module: nn.Module | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    watched: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    considered: frozenset[ast.AST] | None = None
    depth: int = 0
    trusted: frozenset[str] = frozenset()
    is_lenient: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.this = self_of(self.method.node) if self.module is not None else ""
        arguments = self.method.node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self._annotations = {each.arg: each.annotation for each in parameters}
        self._unpacked: list[ast.expr] = []
        self._stored: dict[str, list[ast.expr]] = {}
        self._containers: set[str] = set()
        self._assigned: dict[str, list[Callable[[], str]]] = {}
        for each in (arguments.vararg, arguments.kwarg):
            if each is not None:
                self._add(each.arg, lambda: _HOLDING)
        for name in self._annotations:
            self._add(name, lambda name=name: self._parameter(name))  # type: ignore[misc]
        for node in ast.walk(self.method.node):
            if self.considered is None or node in self.considered:
                self._note(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._assigned.setdefault(node.id, [])  # a variable of the function all the same
        # What a name is follows from all that is assigned to it, wherever: the same until nothing changes.
        self._kinds: dict[str, str] = dict.fromkeys(self._assigned, "")
        for _ in range(10):
            before = dict(self._kinds)
            for name, values in self._assigned.items():
                self._kinds[name] = self._kind_of_all(name, [each() for each in values])
            if self._kinds == before:
                break
        else:
            self._kinds = dict.fromkeys(self._assigned, UNKNOWN)
        self._kinds = {name: kind or UNKNOWN for name, kind in self._kinds.items()}
        if self.depth == 0 and CACHE in self._kinds.values():
            for node in self.considered or self.nodes():  # first whether a cache keeps what is watched
                if isinstance(node, ast.Call):
                    self.call(node)

    def _kind_of_all(self, name: str, kinds: list[str]) -> str:
        """What a variable is that has been assigned values of these kinds."""
        kind = _join(kinds)
        if kind == PLAIN and any(self.kind(each) not in (PLAIN, "") for each in self._stored.get(name, ())):
            return UNKNOWN  # a container, which holds more than it was made with
        return TENSOR if name in self.watched and kind in (FRESH, PLAIN, UNKNOWN) else kind

    # --- what names are ----------------------------------------------------------------------------------------------

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value)
                    if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                        self._stored.setdefault(target.value.id, []).append(node.value)
            case ast.AnnAssign(value=ast.expr()) | ast.NamedExpr():
                self._bind(node.target, node.value)  # type: ignore[arg-type]
            case ast.AugAssign(target=ast.Name(id=name)):
                self._add(name, lambda: self.kind(ast.BinOp(ast.Name(name, ast.Load()), node.op, node.value)))
            case ast.For() | ast.comprehension():
                self._unpacked.append(node.iter)
                self._bind_elements(node.target, node.iter)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _STORING:
                values = [*node.args, *(each.value for each in node.keywords)]
                self._stored.setdefault(name, []).extend(values)
            case ast.Name(ctx=ast.Store()):
                self._assigned.setdefault(node.id, [])
            case ast.ExceptHandler(name=str()) | ast.MatchAs(name=str()) | ast.MatchStar(name=str()):
                self._add(node.name, lambda: UNKNOWN)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    self._add((alias.asname or alias.name).partition(".")[0], lambda: UNKNOWN)
            case ast.FunctionDef() | ast.ClassDef() if node is not self.method.node:
                self._add(node.name, lambda: UNKNOWN)
            case ast.withitem(optional_vars=ast.expr()):
                for each in ast.walk(node.optional_vars or node):
                    if isinstance(each, ast.Name):
                        self._add(each.id, lambda: UNKNOWN)

    def _add(self, name: str | None, kind: Callable[[], str]) -> None:
        self._assigned.setdefault(name or "", []).append(kind)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                if self._is_container(value):
                    self._containers.add(name)
                self._add(name, lambda: self.kind(value))
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(value.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self._bind(one, other)
            case ((ast.Tuple() | ast.List()), _):
                self._unpacked.append(value)
                self._bind_elements(target, value)

    def _bind_elements(self, target: ast.expr, value: ast.expr) -> None:
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self._add(name.id, lambda: _element(self.kind(value)))

    def _parameter(self, name: str) -> str:
        if name in self.given:
            return self.given[name]
        return self.annotated(name)[0] if self.is_lenient or name in self.trusted else UNKNOWN

    def annotated(self, name: str) -> tuple[str, str]:
        """What a parameter is taken for, and the condition, as source, by which the rewritten method checks it.

        An annotation is no knowledge, nor is a name: so the condition goes with it.
        """
        classes = list(self._classes_in(self._annotations.get(name)))
        is_tensor = bool(classes) and all(issubclass(cls, torch.Tensor) for _, cls in classes)
        if any(isinstance(each, ast.Name) and each.id == name for each in self._unpacked):
            torch_ = next((key for key, found in self._namespace.items() if found is torch), "")
            condition = f"{name} is None or all(isinstance(each, {torch_}.Tensor) for each in {name})"
            return (TENSOR, condition) if torch_ else (UNKNOWN, "")
        if is_tensor:
            kind, texts = TENSOR, list(dict.fromkeys(text for text, _ in classes))
        else:
            is_cache = any(issubclass(cls, transformers.Cache) for _, cls in classes)
            is_named_so = not classes and ("past" in name or "cache" in name)
            found = [(key, value) for key, value in self._namespace.items() if isinstance(value, type)]
            caches = [key for key, value in found if issubclass(value, transformers.Cache)]
            whole = [key for key in caches if self._namespace[key] is transformers.Cache]
            kind, texts = CACHE, (whole or caches) if is_cache or is_named_so else []
        if not texts:
            return UNKNOWN, ""
        listed = f"({', '.join(texts)})" if len(texts) > 1 else texts[0]
        return kind, f"{name} is None or isinstance({name}, {listed})"

    @property
    def _namespace(self) -> dict[str, Any]:
        return self.method.function.__globals__

    def _classes_in(self, annotation: Any) -> Iterator[tuple[str, type[Any]]]:
        """The classes in `Cache | None`, `Optional[torch.Tensor]`, `"Cache"`."""
        match annotation:
            case ast.Constant(value=str(text)):
                try:
                    yield from self._classes_in(ast.parse(text, mode="eval").body)
                except SyntaxError:
                    return
            case ast.BinOp(op=ast.BitOr()):
                yield from self._classes_in(annotation.left)
                yield from self._classes_in(annotation.right)
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                yield from self._classes_in(inner)
            case ast.Name() | ast.Attribute():
                found = self.outside(annotation)
                yield ast.unparse(annotation), found if isinstance(found, type) else object

    def kind(self, node: ast.AST) -> str:
        """What the value of an expression is known to be."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.Slice():
                return PLAIN
            case ast.Name(id=name):
                return self._kind_of_name(name)
            case ast.Starred(value=inner) | ast.NamedExpr(value=inner):
                return self.kind(inner)
            case ast.Tuple(elts=inner) | ast.List(elts=inner) | ast.Dict(values=inner):
                return _held(_join(map(self.kind, inner))) if inner else PLAIN
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                tensors = [self.kind(each) in (TENSOR, FRESH, SEVERAL) for each in ast.iter_child_nodes(node)]
                return FRESH if any(tensors) else PLAIN
            case ast.UnaryOp(op=op, operand=inner):
                is_new = self.kind(inner) == TENSOR and not isinstance(op, ast.UAdd)
                return FRESH if is_new else self.kind(inner)
            case ast.BinOp(left=left, right=right):
                kinds = {self.kind(left), self.kind(right)} - {""}
                if self._is_container(left) or self._is_container(right):
                    return _held(_join(kinds))
                if SEVERAL in kinds and TENSOR not in kinds and isinstance(node.op, _JOINING):
                    return SEVERAL
                if kinds & {TENSOR, FRESH, SEVERAL}:
                    return FRESH
                return UNKNOWN if UNKNOWN in kinds else _join(kinds)
            case ast.BoolOp(values=values):
                return _join(map(self.kind, values))
            case ast.IfExp():
                return _join([self.kind(node.body), self.kind(node.orelse)])
            case ast.Attribute():
                return self._kind_of_attribute(node)
            case ast.Subscript(value=inner):
                if isinstance(self.outside(inner), transformers.AttentionInterface):
                    return ATTENTION
                return _element(self.kind(inner))
            case ast.Call():
                return self.call(node)[0]
            case ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner):
                return _held(self.kind(inner))
        return UNKNOWN

    def _is_container(self, node: ast.AST) -> bool:
        """Whether it is a list or a tuple, of which a sum or a product holds what they do."""
        match node:
            case ast.Tuple() | ast.List() | ast.ListComp() | ast.Call(func=ast.Name(id="list" | "tuple")):
                return True
            case ast.BinOp(left=left, right=right):
                return self._is_container(left) or self._is_container(right)
            case ast.Name(id=name):
                return name in self._containers
        return False

    def is_fresh(self, target: ast.AST) -> bool:
        """Whether what is written to at an index is a tensor with memory of its own."""
        return isinstance(target, ast.Subscript) and self.kind(target.value) == FRESH

    def _kind_of_name(self, name: str) -> str:
        if name not in self._assigned:
            found = self.outside(ast.Name(name, ast.Load()))
            if isinstance(found, int | float | str | torch.dtype):
                return PLAIN
            return READING if isinstance(found, FunctionType) and self._reads_only(found) else UNKNOWN
        return self._kinds[name]

    def _reads_only(self, function: FunctionType) -> bool:
        """Whether a function of modeling code writes into nothing, whatever tensors it is given."""
        try:
            node = read_function(function).node
            self._followed(function, dict.fromkeys(_names_of_parameters(node), SEVERAL), None)
        except NotUnderstoodError:
            return False
        return True

    def _kind_of_attribute(self, node: ast.Attribute) -> str:
        if isinstance(node.value, ast.Name) and node.value.id == self.this and self.module is not None:
            value = self._own(node.attr)
            if node.attr in self._assigned_attributes():
                return UNKNOWN  # what it is now tells nothing
            if isinstance(value, torch.Tensor):
                return TENSOR
            return PLAIN if _is_plain(value) or (value is None and node.attr in vars(self.module)) else UNKNOWN
        if isinstance(node.value, ast.Attribute) and self.is_child(node.value):
            child = self._own(node.value.attr)
            value = child._parameters.get(node.attr, child._buffers.get(node.attr, vars(child).get(node.attr)))
            return (
                TENSOR if isinstance(value, torch.Tensor) else PLAIN if value is None or _is_plain(value) else UNKNOWN
            )
        kind = self.kind(node.value)
        if kind in (TENSOR, FRESH, SEVERAL, CACHE):
            return PLAIN if node.attr in _PLAIN_ATTRIBUTES else kind
        if not kind:
            return kind
        if self.is_lenient and node.attr in _PLAIN_ATTRIBUTES:
            return PLAIN
        return PLAIN if _is_plain(self.outside(node)) else UNKNOWN

    def _assigned_attributes(self) -> frozenset[str]:
        """The attributes of the module that its own methods assign when they run."""
        key = "assigned", type(self.module)
        if key not in self.known:
            nodes = (node for tree in trees_of(type(self.module)).values() for node in ast.walk(tree))  # type: ignore[arg-type]
            stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
            self.known[key] = frozenset(node.attr for node in stored)
        found: frozenset[str] = self.known[key]
        return found

    def _own(self, name: str) -> Any:
        """What the module has under a name, without running anything; None if that isn't known."""
        assert self.module is not None
        for held in (self.module._parameters, self.module._buffers, self.module._modules, vars(self.module)):
            if name in held:
                return held[name]
        found = looks.at(member, type(self.module), name)
        return None if isinstance(found, property) else found

    def outside(self, node: ast.AST) -> Any:
        """The object that a dotted name means outside of the function; None if that isn't known."""
        match node:
            case ast.Name(id=name) if name not in self._assigned:
                return looks.at(_of_namespace, self._namespace, name)
            case ast.Attribute(value=inner, attr=attr):
                owner = self.outside(inner)
                if isinstance(owner, ModuleType | type):
                    return looks.at(_attribute, owner, attr)
        return None

    # --- what calls do -----------------------------------------------------------------------------------------------

    def call(self, node: ast.Call) -> tuple[str, str]:
        """What a call gives, and why it may write into a tensor; "" if it doesn't."""
        if _has_out(node):
            return UNKNOWN, "it writes into 'out'"
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == self.this and self.module is not None:
                return self._call_of_own(node, attr)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[])) if self.module is not None:
                return self._call_of_base(node, node.func.attr)
            case ast.Name(id=name) if name in self._assigned:
                if (kind := self.kind(node.func)) in (ATTENTION, READING):
                    return FRESH if kind == ATTENTION else SEVERAL, ""
                return UNKNOWN, f"{name} isn't known before it runs"
            case ast.Subscript() if self.kind(node.func) == ATTENTION:
                return FRESH, ""
            case ast.Subscript(value=table) if isinstance(self.outside(table), type(ACT2FN)):
                return self._of_arguments(node, FRESH), ""
        if (found := self.outside(node.func)) is not None:
            return self._call_of(found, node)
        if isinstance(node.func, ast.Attribute):
            return self._call_of_method(node, node.func.value, node.func.attr)
        return UNKNOWN, "what it calls isn't known"

    def _call_of_method(self, node: ast.Call, owner: ast.expr, name: str) -> tuple[str, str]:
        if isinstance(outside := self.outside(owner), transformers.AttentionInterface):
            return ATTENTION, ""
        if isinstance(outside, logging.Logger | logging.LoggerAdapter):
            return PLAIN, ""
        kind = self.kind(owner)
        if kind in (TENSOR, FRESH, SEVERAL):
            if name in _PLAIN_RESULTS:
                return PLAIN, ""
            is_known = hasattr(torch.Tensor, name) and name not in _CHANGING and not name.startswith("_")
            if self.is_lenient and name == "view" and [ast.unparse(each) for each in node.args] == ["-1"]:
                return UNKNOWN, "only what is contiguous has such a view"
            if not is_known or (name.endswith("_") and kind != FRESH):
                return UNKNOWN, "it may write in place"
            return _result(name, self._of_arguments(node, kind)), ""
        if kind == CACHE and name not in _CHANGING and not name.startswith("_"):
            if name.endswith("_") and _KEPT in self.known:
                return UNKNOWN, "it may write in place"
            if self._of_arguments(node, FRESH) not in (FRESH, ""):
                self.known[_KEPT] = ""  # what is kept may be what is watched
                return SEVERAL, ""
            return CACHE, ""
        if name.endswith("_") or name in _CHANGING:
            return UNKNOWN, "it may write in place"
        if kind == _HOLDING:
            return UNKNOWN, ""
        if kind == PLAIN:
            arguments = [*node.args, *(each.value for each in node.keywords)]
            keeps = any(self.kind(each) != PLAIN for each in arguments)
            return UNKNOWN, "it may keep what it is given" if keeps else ""
        if kind == UNKNOWN and self.is_lenient and hasattr(torch.Tensor, name) and name not in _CHANGING:
            return TENSOR, ""
        return UNKNOWN if kind else "", f"what {ast.unparse(owner)!r} is isn't known"

    def _of_arguments(self, node: ast.Call, kind: str) -> str:
        """The kind of what may share memory with any argument: FRESH only where all of them are."""
        arguments = [*node.args, *(each.value for each in node.keywords)]
        kinds = {kind, *map(self.kind, arguments)}
        return FRESH if kinds <= {FRESH, PLAIN, CACHE} else "" if "" in kinds else TENSOR

    def _call_of_own(self, node: ast.Call, name: str) -> tuple[str, str]:
        if name in self.parts:
            return TENSOR if self.is_lenient else FRESH, ""
        found = self._own(name)
        if isinstance(found, nn.Module):
            return self._call_of_module(found, node)
        if isinstance(found, FunctionType) and name not in vars(self.module):
            return self._following(found, node, self.module)
        return self._call_of(found, node) if found is not None else (UNKNOWN, f"{name} isn't known")

    def _call_of_base(self, node: ast.Call, name: str) -> tuple[str, str]:
        """`super().forward(...)`, of a layer of torch or of modeling code."""
        mro = type(self.module).__mro__
        owner = next((cls for cls in mro if vars(cls).get(self.method.name) is self.method.function), None)
        if owner is None:
            return UNKNOWN, "the base isn't known"
        base = next((cls for cls in mro[mro.index(owner) + 1 :] if name in vars(cls)), None)
        if base in _LAYERS and name == "forward":
            settings = [each for each in _WRITING_SETTINGS if getattr(self.module, each, None)]
            return (UNKNOWN, f"{settings[0]} is set") if settings else (TENSOR, "")
        return self._following(vars(base)[name], node, self.module) if base is not None else (UNKNOWN, "isn't known")

    def _call_of_module(self, module: nn.Module, node: ast.Call) -> tuple[str, str]:
        cls = type(module)
        if module._forward_hooks or module._forward_pre_hooks:
            return UNKNOWN, f"{cls.__name__} has hooks"
        if "forward" in vars(module) or cls.__call__ is not nn.Module.__call__:
            return UNKNOWN, f"{cls.__name__} isn't called by the forward of its class"
        if cls in _LAYERS:
            if setting := next((each for each in _WRITING_SETTINGS if getattr(module, each, None)), ""):
                return UNKNOWN, f"{cls.__name__} has {setting}={getattr(module, setting)!r}"
            return self._of_arguments(node, FRESH) if cls in _VIEWS else FRESH, ""
        if cls is nn.Sequential:
            return _join_calls(self._call_of_module(each, node) for each in module._modules.values() if each)
        return self._following(unwrapped(looks.at(member, cls, "forward")), node, module)

    def _call_of(self, found: Any, node: ast.Call) -> tuple[str, str]:
        name = getattr(found, "__name__", "")
        if isinstance(found, type):
            if issubclass(found, BaseException) or name in _BUILTINS or name in _MORE_OF_TORCH:
                held = [*node.args, *(each.value for each in node.keywords)]
                return _held(_join([PLAIN, *map(self.kind, held)])), ""
            return UNKNOWN, f"{name} is a class"
        home = getattr(found, "__module__", None) or ""
        if getattr(builtins, name, None) is found:
            return self._call_of_builtin(name, node)
        if home == "math" or found in (math.prod,):
            return PLAIN, ""
        if home.partition(".")[0] == "torch" or isinstance(found, BuiltinFunctionType):
            return self._call_of_torch(found, name, node)
        if isinstance(found, FunctionType):
            return self._following(unwrapped(found), node, None)
        if isinstance(found, functools.partial) and not {"inplace", "out"} & found.keywords.keys() and not found.args:
            return self._call_of(found.func, node)
        return UNKNOWN, "what it calls isn't known"

    def _call_of_builtin(self, name: str, node: ast.Call) -> tuple[str, str]:
        if name not in _BUILTINS:
            return UNKNOWN, f"{name}() may run anything"
        if name == "getattr":
            return UNKNOWN, ""
        is_keyed = any(each.arg in ("key", "default", None) for each in node.keywords)
        if is_keyed or any(isinstance(each, ast.GeneratorExp | ast.Lambda) for each in ast.walk(node)):
            return UNKNOWN, "it runs a function"
        return PLAIN if name in _PLAIN_BUILTINS else UNKNOWN, ""

    def _call_of_torch(self, found: Any, name: str, node: ast.Call) -> tuple[str, str]:
        known = name in _MORE_OF_TORCH or hasattr(torch.Tensor, name) or hasattr(nn.functional, name)
        if (
            not known
            or name.endswith("_")
            or name.startswith(("_", "set_"))
            or name in _CHANGING
            or name in _KEEPING_STATISTICS
            or isinstance(found, type)
        ):
            return UNKNOWN, f"torch's {name} may change what it is given"
        owner = getattr(torch, name, None), getattr(nn.functional, name, None), getattr(torch.linalg, name, None)
        if found not in owner:
            return UNKNOWN, f"torch's {name} may change what it is given"
        try:
            parameters = list(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            parameters = []
        if "inplace" in parameters:
            given = [each.value for each in node.keywords if each.arg in ("inplace", None)]
            given += node.args[parameters.index("inplace") :]
            if any(isinstance(each, ast.Starred) for each in node.args) or not all(
                isinstance(each, ast.Constant) and each.value is False for each in given
            ):
                return UNKNOWN, "it may write in place"
        if name in _PLAIN_RESULTS or name in ("is_tensor", "finfo", "iinfo"):
            return PLAIN, ""
        return _result(name, self._of_arguments(node, FRESH)), ""

    # --- what is followed --------------------------------------------------------------------------------------------

    def _following(self, function: Any, node: ast.Call, module: nn.Module | None) -> tuple[str, str]:
        if not isinstance(function, FunctionType):
            return UNKNOWN, "its source can't be read"
        try:
            method = read_function(function)
            names = _names_of_parameters(method.node)[0 if module is None else 1 :]
            given = dict(zip(names, map(self.kind, node.args), strict=False))
            if any(isinstance(each, ast.Starred) for each in node.args):
                given = {}
            given |= {each.arg: self.kind(each.value) for each in node.keywords if each.arg is not None}
            defaults = _defaults_of(method.node)
            given = {name: given.get(name, defaults.get(name, UNKNOWN)) for name in names}
            if "" in given.values():
                return "", ""
            return self._followed(function, given, module), ""
        except NotUnderstoodError as error:
            return UNKNOWN, str(error)

    def _followed(self, function: FunctionType, given: Mapping[str, str], module: nn.Module | None) -> str:
        if self.depth >= _DEPTH:
            raise NotUnderstoodError("it goes too deep")
        method = read_function(function)
        key = function, tuple(sorted(given.items())), id(module)
        if key not in self.known:
            self.known[key] = NotUnderstoodError("it calls itself")
            try:
                self.known[key] = self._result_of(method, module, given)
            except NotUnderstoodError as error:
                self.known[key] = error
        found: str | NotUnderstoodError = self.known[key]
        if isinstance(found, NotUnderstoodError):
            raise found
        return found

    def _result_of(self, method: Method, module: nn.Module | None, given: Mapping[str, str]) -> str:
        body = Body(method, module, given, depth=self.depth + 1, is_lenient=self.is_lenient, known=self.known)
        try:
            check(body, body.nodes())
        except NotUnderstoodError as error:
            raise located(error, method) from error
        results = [node.value for node in ast.walk(method.node) if isinstance(node, ast.Return)]
        return _join(PLAIN if each is None else body.kind(each) for each in results) or PLAIN

    def reaching(self, names: Iterable[str]) -> frozenset[str]:
        """The variables whose memory may be that of these: what is assigned to them, by whatever way."""
        found, pending = set[str](), list(names)
        while pending:
            name = pending.pop()
            if name in found:
                continue
            found.add(name)
            for node in ast.walk(self.method.node):
                match node:
                    case ast.Assign(targets=targets, value=value) if _names_in(targets, name):
                        pending += self._sources(value)
                    case ast.AnnAssign(target=to, value=ast.expr() as value) | ast.NamedExpr(target=to, value=value):
                        pending += self._sources(value) if _names_in([to], name) else []
                    case ast.For(target=to, iter=value) | ast.comprehension(target=to, iter=value):
                        pending += self._sources(value) if _names_in([to], name) else []
        return frozenset(found)

    def _sources(self, value: ast.AST) -> list[str]:
        """The variables whose memory an expression may share."""
        match value:
            case ast.Name(id=name):
                return [name]
            case ast.BinOp(left=left, right=right):
                held = [each for each in (left, right) if isinstance(each, ast.Tuple | ast.List)]
                return [name for each in held for name in self._sources(each)]
            case ast.Compare():
                return []
            case ast.Call(func=ast.Attribute(value=inner, attr=attr)):
                is_part = attr in self.parts and isinstance(inner, ast.Name) and inner.id == self.this
                if is_part or (attr in _MAKING and not _has_out(value)):
                    return []
        return [name for each in ast.iter_child_nodes(value) for name in self._sources(each)]

    def constant(self, node: ast.AST) -> Any:
        """The value of an expression of constants and plain attributes of the module.

        Raises:
            ValueError: it is of something else as well.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == self.this and self.module is not None:
                if attr in self._assigned_attributes():
                    raise ValueError
                if attr in vars(self.module) and attr != "training":
                    value = self.constants[attr] = vars(self.module)[attr]
                elif attr in self.module._modules and self.module._modules[attr] is None:
                    value = None
                else:
                    raise ValueError
                if value is None or _is_plain(value):
                    return value
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return not self.constant(inner)
            case ast.BoolOp(op=op, values=values):
                found = [bool(self.constant(each)) for each in values]
                return all(found) if isinstance(op, ast.And) else any(found)
            case ast.Compare(
                left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]
            ) if isinstance(left, ast.Attribute) and self.is_child(left):
                return isinstance(op, ast.IsNot)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                one, other = self.constant(left), self.constant(right)
                if (compare := _COMPARED.get(type(op))) is not None:
                    return compare(one, other)
        raise ValueError

    def is_own(self, node: ast.AST) -> bool:
        """Whether it is an attribute of the module."""
        return isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == self.this != ""

    def is_child(self, node: ast.Attribute) -> bool:
        """Whether it is a module of the module."""
        is_own = isinstance(node.value, ast.Name) and node.value.id == self.this and self.module is not None
        return is_own and isinstance(self.module._modules.get(node.attr), nn.Module)  # type: ignore[union-attr]

    def nodes(self) -> Iterator[ast.AST]:
        """All of its statements, and what is in them."""
        for statement in self.method.node.body:
            yield from ast.walk(statement)


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
        return ""  # what is inside of them is looked at by itself
    if (what := _HIDDEN.get(type(node))) is not None:
        return f"{what} that isn't followed"
    match node:
        case ast.Assign(value=value) if body.is_lenient and any(
            isinstance(each, ast.Attribute) for each in node.targets
        ):
            return f"{shown(node)!r} (it keeps a value)" if body.kind(value) in (TENSOR, SEVERAL) else ""
        case ast.Call():
            reason = body.call(node)[1]
            if reason and body.is_lenient and body.is_own(node.func):
                given = [*node.args, *(each.value for each in node.keywords)]
                reason = reason if {TENSOR, SEVERAL} & set(map(body.kind, given)) else ""  # it isn't given any part
            return f"{shown(node)!r} ({reason})" if reason else ""
        case ast.AugAssign(target=ast.Name()):
            if body.kind(node.target) in (PLAIN, FRESH):
                return ""
            return f"{shown(node)!r} (it may write in place)"
        case ast.AugAssign():
            return f"{shown(node)!r} (it writes in place)"
        case ast.Subscript(ctx=ast.Store(), value=inner) if body.kind(inner) not in (PLAIN, FRESH, CACHE):
            return f"{shown(node)!r} is assigned"
        case ast.Assign(value=value) if any(isinstance(each, ast.Subscript) for each in node.targets):
            return (
                ""
                if body.kind(value) == PLAIN or all(map(body.is_fresh, node.targets))
                else f"{shown(node)!r} (it keeps a value)"
            )
        case ast.Attribute(ctx=ast.Store()) if not body.is_lenient:
            return f"{shown(node)!r} is assigned"
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == body.this and body.module is not None:
            getter = looks.at(member, type(body.module), attr)
            if isinstance(getter, property) and attr not in body.parts and attr not in vars(body.module):
                if not isinstance(getter.fget, FunctionType):
                    return f"the property {attr!r} can't be read"
                try:
                    body._followed(getter.fget, {}, body.module)
                except NotUnderstoodError as error:
                    return f"the property {attr!r} ({error})"
        case ast.For(iter=inner) | ast.comprehension(iter=inner):
            if body.kind(inner) == UNKNOWN and not _is_range(inner):
                return f"a loop over {shown(inner)!r}, which isn't known"
    return ""


def shown(node: ast.AST) -> str:
    """A piece of source, as reasons have it."""
    return shortened(node, 60)


def _join(kinds: Iterable[str]) -> str:
    found = set(kinds) - {""}
    if not found:
        return ""
    if len(found) == 1:
        return found.pop()
    if found == {ATTENTION, READING}:
        return ATTENTION
    if CACHE in found and found <= {TENSOR, FRESH, SEVERAL, PLAIN, CACHE}:
        return CACHE
    if found <= {TENSOR, FRESH, SEVERAL, PLAIN}:
        return SEVERAL if SEVERAL in found else TENSOR
    return UNKNOWN


def _has_out(call: ast.Call) -> bool:
    return any(each.arg == "out" for each in call.keywords)


def _join_calls(calls: Iterable[tuple[str, str]]) -> tuple[str, str]:
    found = list(calls)
    return _join(kind for kind, _ in found), next((reason for _, reason in found if reason), "")


def _held(kind: str) -> str:
    """What a container is that holds values of a kind."""
    return SEVERAL if kind in (TENSOR, FRESH) else kind


def _result(name: str, kind: str) -> str:
    """What torch's function or method `name` gives that was given tensors of a kind."""
    if name in _MAKING:
        return FRESH
    return SEVERAL if name in _DIVIDING else TENSOR if kind == SEVERAL else kind


def _element(kind: str) -> str:
    return UNKNOWN if kind == _HOLDING else kind


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | torch.dtype | torch.Size | torch.device)


def _is_range(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("range", "enumerate", "zip")
    )


def _of_namespace(namespace: Mapping[str, Any], name: str) -> Any:
    return namespace.get(name, getattr(builtins, name, None))


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _names_in(targets: Iterable[ast.AST], name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for target in targets for each in ast.walk(target))


def _names_of_parameters(node: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _defaults_of(node: ast.FunctionDef) -> dict[str, str]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {each.arg: PLAIN for each, default in pairs if isinstance(default, ast.Constant)}
