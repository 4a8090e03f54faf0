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
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch

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


def may_be_alike(one: Any, other: Any) -> bool:
    """Whether two are worth comparing: quick, for most are not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, type):
        return members(one).keys() == members(other).keys()
    return not isinstance(one, types.FunctionType) or _sizes(one.__code__) == _sizes(other.__code__)


def _sizes(code: types.CodeType) -> tuple[int, ...]:
    return code.co_argcount, code.co_kwonlyargcount, code.co_nlocals, code.co_stacksize, len(code.co_names)


class _Comparison:
    """One comparison. What refers to itself is alike if everything else is, so a pair is looked at once."""

    def __init__(self) -> None:
        self.pairs: set[tuple[int, int]] = set()  # of functions and classes, which outlive the comparison

    def compare(self, one: Any, other: Any, where: str) -> None:
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
        codes = [list(_nested(function.__code__)) for function in (one, other)]
        if reads := _REFLECTS.intersection(name for code in [*codes[0], *codes[1]] for name in code.co_names):
            raise _DifferenceError(f"{where}: it reads {', '.join(sorted(reads))}, so what it is called may matter")
        _require(canonical(one.__code__) == canonical(other.__code__), where, "other code")
        same_module = one.__globals__ is other.__globals__
        _require(same_module or not any(map(_is_of_its_module, codes[0])), where, "it imports, or assigns a global")
        for what, (mine, its) in {
            "defaults": (one.__defaults__, other.__defaults__),
            "keyword defaults": (_sorted(one.__kwdefaults__), _sorted(other.__kwdefaults__)),
            "attributes": (_sorted(vars(one)), _sorted(vars(other))),
            "closure": (one.__closure__, other.__closure__),
        }.items():
            self.compare(mine, its, f"{where}, {what}")
        for code, code_there in zip(*codes, strict=True):
            for name, name_there in zip(_globals_of(code), _globals_of(code_there), strict=True):
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


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and those of the functions in it, in their order."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _nested(value)


@functools.lru_cache(maxsize=8192)
def canonical(code: types.CodeType) -> tuple[Any, ...]:
    """What a code object does, without positions, docstrings and the names of locals; global names are numbered."""
    parameters = code.co_argcount + code.co_kwonlyargcount
    parameters += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    # Free variables by their places, which is how the function around this one hands them in.
    numbers = {name: number for number, name in enumerate((*code.co_varnames[:parameters], *code.co_freevars))}
    global_names = _globals_of(code)
    does: list[Any] = []
    for instruction in dis.get_instructions(code):
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
    return *shape, code.co_exceptiontable, code.co_varnames[:parameters], tuple(does)


def _constant(value: Any) -> Any:
    """A constant with its type, all through: 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if isinstance(value, types.CodeType):
        return canonical(value)
    if isinstance(value, tuple | frozenset):
        return type(value), type(value)(map(_constant, value))
    return type(value), repr(value)


@functools.lru_cache(maxsize=8192)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a code object reads, in their order, without those of the functions in it."""
    read = (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys(read))


def _is_of_its_module(code: types.CodeType) -> bool:
    return any(each.opname in _OF_THE_MODULE for each in dis.get_instructions(code))


def _meant(name: str, function: types.FunctionType) -> Any:
    """What a function finds under a global name."""
    return function.__globals__.get(name, vars(builtins).get(name, _MISSING))
