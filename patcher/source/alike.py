"""Whether two classes or functions compute the same, judged by the code objects that run, never by text.

>>> def scaled(x, weight): return x * weight
>>> def times(x, weight): "Another name, the same code."; return x * weight
>>> difference(scaled, times)
''
>>> difference(scaled, lambda x, weight: x * (1 + weight))
'scaled: other code'

A rebound method, a file that was edited after its import and a notebook cell are judged by what they are now. Left out
is what makes no difference: names of classes, of functions and of locals (not of parameters: callers use them),
docstrings, annotations, positions. Global names are compared by what they mean, each in its own module.

Anything that isn't known to be the same counts as different: the one mistake that must not happen here is to call two
alike that compute something else.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import logging
import types
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")

#: What a class has whatever it computes, what only shows it or initialises weights that a checkpoint has, and what the
#: decorators of kernels note on it.
_LEFT_OUT = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__conditional_annotations__", "__dict__", "__weakref__", "__firstlineno__"),
        *("__static_attributes__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl"),
        *("extra_repr", "_init_weights"),
        *("kernel_layer_name", "kernel_condition", "can_torch_compile", "has_backward"),
    }
)
#: Code that reads one of these may depend on what it, or its class, is called or where it is.
_REFLECTS = frozenset(
    {
        *(
            "__name__",
            "__qualname__",
            "__module__",
            "__doc__",
            "__annotations__",
            "__code__",
            "__globals__",
            "__file__",
        ),
        *("globals", "locals", "eval", "exec", "_getframe", "currentframe", "stack", "getsource", "signature"),
    }
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.device)
_LOCAL = frozenset(dis.haslocal) | frozenset(dis.hasfree)
#: Relative imports mean what is beside the module; a global that is assigned is a state of the module's own.
_OF_THE_MODULE = frozenset({"IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
#: What some objects around functions are made of; a subclass of theirs may do anything.
_MADE_OF: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func", "attrname"),
    types.MethodType: ("__func__", "__self__"),
}
#: On a function that is in the place of another for a while: the other, None if nothing was there.
IN_PLACE_OF = "_patcher_in_place_of"
_MISSING = object()


class _DifferenceError(Exception):
    """Where two differ."""


def difference(one: Any, other: Any) -> str:
    """The first place where two classes or functions differ in what they compute, "" if they compute the same."""
    try:
        _Comparison().compare(one, other, getattr(one, "__name__", ""))
    except _DifferenceError as found:
        return str(found)
    return ""


def candidates(targets: Iterable[type], classes: Iterable[T]) -> list[T]:
    """The classes whose forward has the code of one of the targets': few of many, found quickly, that may be alike."""
    wanted: dict[Any, list[Any]] = {}
    for target in targets:
        code = _code_of_forward(target)
        wanted.setdefault(_size(code), []).append(code and of_code(code).does)
    codes = ((cls, _code_of_forward(cls)) for cls in classes)
    sized = ((cls, code, wanted[size]) for cls, code in codes if (size := _size(code)) in wanted)
    return [cls for cls, code, does in sized if (code and of_code(code).does) in does]


def _code_of_forward(cls: Any) -> types.CodeType | None:
    code: types.CodeType | None = getattr(getattr(cls, "forward", None), "__code__", None)
    return code


def _size(code: types.CodeType | None) -> Any:
    return code and (code.co_nlocals, code.co_stacksize)


def without_kernel(value: Any) -> Any:
    """The function in what the decorator of the `kernels` package makes of one: an object that may choose a kernel."""
    home: Any = type(value).__module__  # of a function of Cython a descriptor
    if not isinstance(home, str) or home.partition(".")[0] != "kernels":
        return value
    closure = inspect.getclosurevars(type(value).forward).nonlocals if callable(value) else {}
    return closure.get("func", value)


class _Comparison:
    """One comparison. What refers to itself is alike if everything else is, so a pair is looked at once."""

    def __init__(self) -> None:
        self.pairs: set[tuple[int, int]] = set()  # of functions and classes, which outlive the comparison

    def compare(self, one: Any, other: Any, where: str) -> None:
        one, other = without_kernel(one), without_kernel(other)
        if one is other:
            return
        _require(type(one) is type(other), where, f"a {type(one).__name__} and a {type(other).__name__}")
        if isinstance(one, type | types.FunctionType):
            if (id(one), id(other)) not in self.pairs:
                self.pairs.add((id(one), id(other)))
                differ: Any = self._classes if isinstance(one, type) else self._functions
                differ(one, other, where)
        elif isinstance(one, tuple):
            _require(len(one) == len(other), where, "other lengths")
            for number, (mine, its) in enumerate(zip(one, other, strict=True)):
                self.compare(mine, its, f"{where}[{number}]")
        elif isinstance(one, _PLAIN):
            _require(repr(one) == repr(other), where, f"{one!r} and {other!r}")  # 0.0 isn't -0.0
        elif not isinstance(one, logging.Logger):
            parts = _parts(one)
            _require(parts is not None, where, f"two objects of {type(one).__name__}")
            self.compare(parts, _parts(other), where)

    def _classes(self, one: type, other: type, where: str) -> None:
        mine, its = members(one), members(other)
        _require(mine.keys() == its.keys(), where, f"only one has {', '.join(sorted(mine.keys() ^ its.keys()))}")
        self.compare(one.__bases__, other.__bases__, f"{where}, bases")
        for name in sorted(mine):
            self.compare(mine[name], its[name], f"{where}.{name}")

    def _functions(self, one: types.FunctionType, other: types.FunctionType, where: str) -> None:
        code, code_there = of_code(one.__code__), of_code(other.__code__)
        if reads := code.reflects | code_there.reflects:
            raise _DifferenceError(f"{where}: it reads {', '.join(sorted(reads))}, so what it is called may matter")
        _require(code.does == code_there.does, where, "other code")
        same_module = one.__globals__ is other.__globals__
        _require(same_module or not code.is_of_its_module, where, "it imports, or assigns a global")
        for what, (mine, its) in {
            "defaults": (one.__defaults__, other.__defaults__),
            "keyword defaults": (_sorted(one.__kwdefaults__), _sorted(other.__kwdefaults__)),
            "attributes": (_sorted(vars(one)), _sorted(vars(other))),
            "closure": (one.__closure__, other.__closure__),
        }.items():
            self.compare(mine, its, f"{where}, {what}")
        for name, name_there in zip(code.global_names, code_there.global_names, strict=True):
            self.compare(_meant(name, one), _meant(name_there, other), f"{where} -> {name}")


def members(cls: type) -> dict[str, Any]:
    """What a class itself has that what it computes may depend on."""
    found = {name: value for name, value in vars(cls).copy().items() if name not in _LEFT_OUT}
    while hasattr(found.get("__init__"), IN_PLACE_OF):
        found["__init__"] = getattr(found["__init__"], IN_PLACE_OF)
        if found["__init__"] is None:
            del found["__init__"]
    return found


def _require(condition: bool, where: str, why: str) -> None:
    if not condition:
        raise _DifferenceError(f"{where}: {why}")


def _sorted(named: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((named or {}).items(), key=itemgetter(0)))


def _parts(value: Any) -> tuple[Any, ...] | None:
    """What an object is made of, None if that isn't known to be all that it computes by."""
    if isinstance(value, types.CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # nothing was put in it yet
            return ()
    if type(value).__module__ == "torch.autograd.grad_mode":  # what `@torch.no_grad()` closes over
        return _sorted(vars(value))
    if type(value) is functools.partial:
        return value.func, value.args, _sorted(value.keywords)
    names = _MADE_OF.get(type(value))
    return None if names is None else tuple(getattr(value, name) for name in names)


class Code(NamedTuple):
    """What is known of a code object, and of the functions in it.

    Attributes:
        does: what it does, without positions, docstrings and the names of locals; global names are numbered.
        global_names: those that it reads, by their numbers.
        reflects: what it reads that may depend on names and places.
        is_of_its_module: whether it imports, or assigns a global.
    """

    does: tuple[Any, ...]
    global_names: tuple[str, ...]
    reflects: frozenset[str]
    is_of_its_module: bool


@functools.lru_cache(maxsize=8192)
def of_code(code: types.CodeType) -> Code:
    """What is compared of a code object: kept by the code object itself, which doesn't change."""
    parameters = code.co_argcount + code.co_kwonlyargcount
    parameters += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    # Free variables by their places, which is how the function around this one hands them in.
    numbers = {name: number for number, name in enumerate((*code.co_varnames[:parameters], *code.co_freevars))}
    instructions = list(dis.get_instructions(code))
    inner = [of_code(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    own_names = [each.argval for each in instructions if each.opname == "LOAD_GLOBAL"]
    global_names = tuple(dict.fromkeys([*own_names, *(name for each in inner for name in each.global_names)]))
    does: list[Any] = []
    for instruction in instructions:
        value = instruction.argval
        if instruction.opcode in _LOCAL:
            names = value if isinstance(value, tuple) else (value,)
            value = tuple(numbers.setdefault(name, len(numbers)) for name in names)
        elif instruction.opname == "LOAD_GLOBAL":
            value = global_names.index(value), instruction.argrepr != value  # with a NULL, where it is called
        elif instruction.opcode in dis.hasname:
            value = instruction.argrepr
        elif instruction.opcode in dis.hasconst:
            value = _constant(value)
        else:
            value = instruction.arg
        does.append((instruction.opcode, value))
    shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~inspect.CO_NESTED
    # A global of a function inside has one number there and one here.
    numbered = tuple(tuple(global_names.index(name) for name in each.global_names) for each in inner)
    return Code(
        (*shape, code.co_exceptiontable, code.co_varnames[:parameters], tuple(does), numbered),
        global_names,
        _REFLECTS.intersection(code.co_names).union(*(each.reflects for each in inner)),
        any(each.opname in _OF_THE_MODULE for each in instructions) or any(each.is_of_its_module for each in inner),
    )


def _constant(value: Any) -> Any:
    """A constant with its type, all through: 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if isinstance(value, types.CodeType):
        return of_code(value).does
    if isinstance(value, tuple | frozenset):
        return type(value), type(value)(map(_constant, value))
    return type(value), repr(value)


def _meant(name: str, function: types.FunctionType) -> Any:
    """What a function finds under a global name."""
    return function.__globals__.get(name, vars(builtins).get(name, _MISSING))
