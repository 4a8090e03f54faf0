"""Whether two classes or functions compute the same, judged by their code objects, never by their text.

>>> def scaled(x, weight): return x * weight
>>> def times(x, weight): "Another name, the same code."; return x * weight
>>> difference(scaled, times)
''
>>> difference(scaled, lambda x, weight: x * (1 + weight))
'scaled: other code'

A rebound method, a file that was edited after its import and a notebook cell are judged by the code that runs. Ignored
are the names of classes, functions and locals (not of parameters: callers use them), docstrings, annotations and
positions. Global names are compared by their values in the respective module.

Anything that isn't known to be the same counts as different: two classes that compute something else must never be
called alike.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
import types
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeVar

import torch

from patcher.source.code import of_code

T = TypeVar("T")

#: Attributes that every class has, that only represent it or initialize weights, or that decorators of kernels set.
_IGNORED = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__conditional_annotations__", "__dict__", "__weakref__", "__firstlineno__"),
        *("__static_attributes__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl"),
        *("extra_repr", "_init_weights"),
        *("kernel_layer_name", "kernel_condition", "can_torch_compile", "has_backward"),
    }
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.device)
#: The parts of some objects around functions; a subclass of theirs may do anything.
_PARTS: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func", "attrname"),
    types.MethodType: ("__func__", "__self__"),
}
#: The attribute of a temporary replacement with the function that it replaces, None if there was none.
IN_PLACE_OF = "_patcher_in_place_of"
_MISSING = object()


class _DifferenceError(Exception):
    """The first difference of a comparison."""


def difference(one: Any, other: Any) -> str:
    """Return the first difference in what two classes or functions compute, "" if they compute the same."""
    try:
        _Comparison().compare(one, other, getattr(one, "__name__", ""))
    except _DifferenceError as error:
        return str(error)
    return ""


def candidates(targets: Iterable[type], classes: Iterable[T]) -> list[T]:
    """Return the classes whose forward has the code of a target's: a fast selection of those that may be alike."""

    def forward(cls: Any) -> Any:
        return getattr(getattr(cls, "forward", None), "__code__", None)

    def size(code: Any) -> Any:
        return code and (code.co_nlocals, code.co_stacksize)

    codes = [forward(target) for target in targets]
    sizes, operations = set(map(size, codes)), [code and of_code(code).operations for code in codes]
    sized = ((cls, code) for cls in classes if size(code := forward(cls)) in sizes)
    return [cls for cls, code in sized if (code and of_code(code).operations) in operations]


def without_kernel(value: Any) -> Any:
    """Return the function inside of what a decorator of the `kernels` package returns, which may choose a kernel."""
    module: Any = type(value).__module__  # a descriptor for functions of Cython
    if not isinstance(module, str) or module.partition(".")[0] != "kernels":
        return value
    closure = inspect.getclosurevars(type(value).forward).nonlocals if callable(value) else {}
    return closure.get("func", value)


class _Comparison:
    """One comparison. Each pair is compared once: recursive references are alike if everything else is."""

    def __init__(self) -> None:
        self.pairs: set[tuple[int, int]] = set()  # ids of functions and classes, which outlive the comparison

    def compare(self, one: Any, other: Any, where: str) -> None:
        one, other = without_kernel(one), without_kernel(other)
        if one is other:
            return
        _require(type(one) is type(other), where, f"a {type(one).__name__} and a {type(other).__name__}")
        if isinstance(one, type | types.FunctionType):
            if (id(one), id(other)) not in self.pairs:
                self.pairs.add((id(one), id(other)))
                compare: Any = self._compare_classes if isinstance(one, type) else self._compare_functions
                compare(one, other, where)
        elif isinstance(one, tuple):
            _require(len(one) == len(other), where, "other lengths")
            for index, (item, other_item) in enumerate(zip(one, other, strict=True)):
                self.compare(item, other_item, f"{where}[{index}]")
        elif isinstance(one, _PLAIN):
            _require(repr(one) == repr(other), where, f"{one!r} and {other!r}")  # 0.0 isn't -0.0
        elif not isinstance(one, logging.Logger):
            parts = _parts(one)
            _require(parts is not None, where, f"two objects of {type(one).__name__}")
            self.compare(parts, _parts(other), where)

    def _compare_classes(self, one: type, other: type, where: str) -> None:
        members, others = (
            {name: value for name, value in own_members(cls).items() if name not in _IGNORED} for cls in (one, other)
        )
        differing = ", ".join(sorted(members.keys() ^ others.keys()))
        _require(not differing, where, f"only one has {differing}")
        self.compare(one.__bases__, other.__bases__, f"{where}, bases")
        for name in sorted(members):
            self.compare(members[name], others[name], f"{where}.{name}")

    def _compare_functions(self, one: types.FunctionType, other: types.FunctionType, where: str) -> None:
        code, other_code = of_code(one.__code__), of_code(other.__code__)
        if reads := code.reflective | other_code.reflective:
            raise _DifferenceError(f"{where}: it reads {', '.join(sorted(reads))}, so what it is called may matter")
        _require(code.operations == other_code.operations, where, "other code")
        same_module = one.__globals__ is other.__globals__
        _require(same_module or not code.depends_on_module, where, "it imports, or assigns a global")
        self.compare(one.__defaults__, other.__defaults__, f"{where}, defaults")
        self.compare(_sorted(one.__kwdefaults__), _sorted(other.__kwdefaults__), f"{where}, keyword defaults")
        self.compare(_sorted(vars(one)), _sorted(vars(other)), f"{where}, attributes")
        self.compare(one.__closure__, other.__closure__, f"{where}, closure")
        for name, other_name in zip(code.global_names, other_code.global_names, strict=True):
            self.compare(_global_value(name, one), _global_value(other_name, other), f"{where} -> {name}")


def own_members(cls: type) -> dict[str, Any]:
    """Return the members of a class itself, without temporary replacements and annotations."""
    members = {name: value for name, value in vars(cls).copy().items() if not name.startswith("__annot")}
    while hasattr(members.get("__init__"), IN_PLACE_OF):
        members["__init__"] = getattr(members["__init__"], IN_PLACE_OF)
        if members["__init__"] is None:
            del members["__init__"]
    return members


def _require(condition: bool, where: str, difference: str) -> None:
    if not condition:
        raise _DifferenceError(f"{where}: {difference}")


def _sorted(named: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((named or {}).items(), key=itemgetter(0)))


def _parts(value: Any) -> tuple[Any, ...] | None:
    """Return the parts of an object, None if its computation may depend on anything else."""
    if isinstance(value, types.CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # empty
            return ()
    if type(value).__module__ == "torch.autograd.grad_mode":  # in the closure of `@torch.no_grad()`
        return _sorted(vars(value))
    if type(value) is functools.partial:
        return value.func, value.args, _sorted(value.keywords)
    names = _PARTS.get(type(value))
    return None if names is None else tuple(getattr(value, name) for name in names)


def _global_value(name: str, function: types.FunctionType) -> Any:
    return function.__globals__.get(name, vars(builtins).get(name, _MISSING))
