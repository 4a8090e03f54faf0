"""The methods of modeling classes, with the source that they were compiled from."""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from patcher.errors import PatchConstructionError
from patcher.source.call_sites import positional_parameters
from patcher.source.code import has_code
from patcher.source.texts import dedented, indented

#: Wrappers of transformers that pass on their arguments: one moves weights, the other may call an equivalent kernel.
_PASS_THROUGH = {
    ("transformers.integrations.accelerate", "force_accelerate_hooks"),
    ("transformers.integrations.hub_kernels", "use_kernel_func_from_hub_with_fallback"),
}


class NotUnderstoodError(PatchConstructionError):
    """Why a method can't be analyzed or rewritten, and the line of its source, counted from the function."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, eq=False)
class Method:
    """A function, with its source.

    Attributes:
        attribute: the function as the class has it, with its decorators.
    """

    name: str
    function: FunctionType
    source: str
    node: ast.FunctionDef
    attribute: Any = None

    def at(self, line: int | None) -> str:
        """Return the location of a line of the source: `modeling_llama.py:243`."""
        code = self.function.__code__
        return f"{Path(code.co_filename).name}:{code.co_firstlineno + (line or 1) - 1}"


def located(error: NotUnderstoodError, method: Method) -> NotUnderstoodError:
    """Return the error with file and line in its text, unless it has those of a called function."""
    text = str(error)
    return NotUnderstoodError(text if text.endswith(")") and ".py:" in text else f"{text} ({method.at(error.line)})")


class _Recorded(threading.local):
    """What the analysis that runs in this thread has looked up: (owner, name) -> owner, the object."""

    entries: dict[tuple[int, str], tuple[Any, Any]] | None = None


recorded = _Recorded()


def look_up(owner: Any, name: str) -> Any:
    """Return a member of a class or module without running a descriptor, or a name of a namespace; `...` if unknown.

    An analysis is valid as long as all that it has looked up gives the same objects.
    """
    if isinstance(owner, type):
        result = member(owner, name)
    elif isinstance(owner, dict):
        result = owner.get(name, getattr(builtins, name, ...))
    else:
        result = getattr(owner, name, ...)
    if recorded.entries is not None:
        recorded.entries[id(owner), name] = owner, result
    return result


def is_importable(cls: type) -> bool:
    """Whether a class is an attribute of its Python module, and lives as long."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


#: Function -> its code, and its source or why that can't be read. Not by code: functions with other defaults,
#: annotations or decorators may have equal code.
_sources: weakref.WeakKeyDictionary[FunctionType, tuple[CodeType, tuple[str, ast.FunctionDef] | str]]
_sources = weakref.WeakKeyDictionary()


def read_function(function: FunctionType) -> Method:
    """Read the source of a function.

    Raises:
        NotUnderstoodError: there is none, or it doesn't compile to the code that runs: the file was edited after its
            import, or another tool has changed the function.
    """
    code = look_up(function, "__code__")
    known_code, source = _sources.get(function, (None, ""))
    if known_code is not code:
        try:
            source = _source_of(code)
        except (OSError, TypeError, SyntaxError, ValueError) as error:  # not kept: the reason may pass
            raise NotUnderstoodError(f"the source of {code.co_name} can't be read ({error})") from error
        _sources[function] = code, source
    if isinstance(source, str):
        raise NotUnderstoodError(source)
    return Method(code.co_name, function, *source)


def why_not_its_source(function: FunctionType) -> str:
    """Why the source of a function isn't the code that runs, "" if it is or if there is no source."""
    try:
        read_function(function)
    except NotUnderstoodError as error:
        return str(error) if "isn't what runs" in str(error) else ""
    return ""


def _source_of(code: CodeType) -> tuple[str, ast.FunctionDef] | str:
    lines, first = inspect.findsource(code)
    source = dedented("".join(inspect.getblock(lines[first:])))
    body = ast.parse(source).body
    node = body[0] if len(body) == 1 else None
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
        return f"the source of {code.co_name} can't be read (it isn't written as a def)"
    if free_variables := [variable for variable in code.co_freevars if variable != "__class__"]:
        return f"{code.co_name} uses {', '.join(free_variables)} of the function around it"
    if first + 1 != code.co_firstlineno or not has_code("".join(lines), code):
        return (
            f"the source of {code.co_name} isn't what runs: {Path(code.co_filename).name} was changed after its import"
        )
    return source, node


@lru_cache(maxsize=1024)
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a syntax tree as `ast.walk` does; walking takes most of the time of an analysis."""
    return tuple(ast.walk(tree))


def member(cls: type, name: str) -> Any:
    """Return a member of a class without running a descriptor; `...` if there is none."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), ...)


def functions_of(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """Return the methods of a class that run in a call, without those that construct or initialise modules."""
    functions, bases = {}, cls.__mro__[: cls.__mro__.index(nn.Module)]
    for name in dict.fromkeys(name for base in bases for name in vars(base)):
        value = look_up(cls, name)
        if name.startswith("__") or name == "_init_weights" or not callable(value):
            continue
        function = inspect.unwrap(value)
        if isinstance(function, FunctionType):
            functions[name] = function
    return functions


def readable(cls: type[nn.Module]) -> Iterator[tuple[str, Method]]:
    """Yield the names and methods of `functions_of` whose source can be read."""
    for name, function in functions_of(cls).items():
        with contextlib.suppress(NotUnderstoodError):
            yield name, read_function(function)


def trees_of(cls: type[nn.Module]) -> dict[str, ast.FunctionDef]:
    """Return name -> syntax tree of the readable methods of a class."""
    return {name: method.node for name, method in readable(cls)}


def method_to_rewrite(cls: type[nn.Module], name: str) -> Method:
    """Return a method of a class, to be replaced by one that is compiled from edited source.

    Raises:
        NotUnderstoodError: the source doesn't show everything that runs.
    """
    attribute = look_up(cls, name)
    method = read_function(inspect.unwrap(attribute))
    code, defined = method.function.__code__, dict[str, Any]()
    flags = code.co_flags & __future__.annotations.compiler_flag
    text = f"class {cls.__name__}:\n{indented(method.source)}"
    try:
        exec(compile(text, code.co_filename, "exec", flags, dont_inherit=True), method.function.__globals__, defined)
    except Exception as error:
        raise NotUnderstoodError(
            f"the definition of {name} can't be run outside of its class ({type(error).__name__}: {error})", 1
        ) from error
    again = member(defined[cls.__name__], method.node.name)
    if not _are_equal(attribute, again, [(method.function, inspect.unwrap(again))]):
        raise NotUnderstoodError(f"{name} is wrapped by something that its source doesn't show", 1)
    if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in nodes_of(method.node)):
        raise NotUnderstoodError(f"{name} is a generator", 1)
    return Method(name, method.function, method.source, method.node, attribute)


def _are_equal(one: Any, other: Any, pairs: list[tuple[Any, Any]]) -> bool:
    """Whether two wrappers do the same, but that one wraps the first and the other the second function of a pair."""
    if one is other or any(one is first and other is second for first, second in pairs):
        return True
    if type(one) is not type(other):
        return False
    pairs.append((one, other))  # they may refer to themselves
    if isinstance(one, FunctionType):
        values = zip(_state(one), _state(other), strict=True)
        return one.__code__ == other.__code__ and all(_are_equal(first, second, pairs) for first, second in values)
    try:
        if one == other:
            return True
    except Exception:  # tensors, or whatever a class compares
        return False
    if not hasattr(one, "__dict__"):
        return False
    mine, its = vars(one), vars(other)
    return mine.keys() == its.keys() and all(_are_equal(mine[name], its[name], pairs) for name in mine)


def _state(function: FunctionType) -> list[Any]:
    cells: list[Any] = [*(function.__closure__ or ())]
    with contextlib.suppress(ValueError):  # a variable without a value: cells are equal to none
        cells = [cell.cell_contents for cell in cells]
    return [*cells, function.__defaults__, function.__kwdefaults__]


def unwrapped(function: Any) -> Any:
    """Return the function inside of transformers' wrappers that pass on their arguments; others as they are."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    if code is not None and (module, code.co_qualname.partition(".")[0]) in _PASS_THROUGH:
        return unwrapped(getattr(function, "__wrapped__", None)) or function
    return function


def self_of(function: ast.FunctionDef, default: str = "") -> str:
    """Return the name of a method's first parameter."""
    parameters = positional_parameters(function)
    return parameters[0].arg if parameters else default


def names_in(node: ast.AST) -> set[str]:
    """Return all names in a syntax tree, attributes included."""
    name_fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
    return {getattr(child, name_fields[type(child)]) for child in ast.walk(node) if type(child) in name_fields}
