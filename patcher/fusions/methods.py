"""The functions of a model's classes, with the source that they were compiled from."""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from patcher.fusions.looks import code_of, looks, member
from patcher.source.alike import of_code
from patcher.source.call_sites import positional_parameters
from patcher.source.texts import dedented

#: Wrappers of transformers that pass on what they are given: one moves weights of the module, the other looks for a
#: kernel that computes the same.
_TRANSPARENT = {
    ("transformers.integrations.accelerate", "force_accelerate_hooks"),
    ("transformers.integrations.hub_kernels", "use_kernel_func_from_hub_with_fallback"),
}


class NotUnderstoodError(Exception):
    """What prevents a fusion, and the line of the function's source where it is."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, eq=False)
class Method:
    """A function, with its source."""

    name: str
    function: FunctionType
    source: str
    node: ast.FunctionDef

    def at(self, line: int | None) -> str:
        """Where a line of the source lies: `modeling_llama.py:243`."""
        code = self.function.__code__
        return f"{Path(code.co_filename).name}:{code.co_firstlineno + (line or 1) - 1}"


def located(error: NotUnderstoodError, method: Method) -> NotUnderstoodError:
    """The error, with the file and the line in its text, the innermost of those that are followed."""
    text = str(error)
    return NotUnderstoodError(text if text.endswith(")") and ".py:" in text else f"{text} ({method.at(error.line)})")


def is_importable(cls: type) -> bool:
    """Whether a class lives as long as its module, which has it under its name."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


#: Function -> its code, and its source or why that can't be read. Not by code: what has other defaults, annotations or
#: decorators may have equal code.
_read: weakref.WeakKeyDictionary[FunctionType, tuple[CodeType, tuple[str, ast.FunctionDef] | str]]
_read = weakref.WeakKeyDictionary()


def read_function(function: FunctionType) -> Method:
    """A function with its source.

    Raises:
        NotUnderstoodError: there is none, or what it compiles to isn't the code that runs: the file was edited after
            its import, or another tool has changed the function.
    """
    code = looks.at(code_of, function, "")
    known, found = _read.get(function, (None, ""))
    if known is not code:
        try:
            found = _source_of(code)
        except (OSError, TypeError, SyntaxError, ValueError) as error:
            found = f"the source of {code.co_name} can't be read ({error})"
        _read[function] = code, found
    if isinstance(found, str):
        raise NotUnderstoodError(found)
    return Method(code.co_name, function, *found)


def why_not_its_source(function: FunctionType) -> str:
    """Why the source of a function isn't the code that runs, "" if it is, or if it has none."""
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
        return f"the source of {code.co_name} can't be read (it isn't a function)"
    if free := [variable for variable in code.co_freevars if variable != "__class__"]:
        return f"{code.co_name} uses {', '.join(free)} of the function around it"
    compiled = _compiled("".join(lines), code.co_filename, code.co_flags & __future__.annotations.compiler_flag)
    if not any(each.co_qualname == code.co_qualname and of_code(each) == of_code(code) for each in compiled):
        return (
            f"the source of {code.co_name} isn't what runs: {Path(code.co_filename).name} was changed after its import"
        )
    return source, node


@lru_cache(maxsize=16)
def _compiled(text: str, file: str, flags: int) -> list[CodeType]:
    """What a file compiles to: as a whole, for how a method is called depends on what the file imports."""
    return list(_codes(compile(text, file, "exec", flags, dont_inherit=True)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def members_of(cls: type[nn.Module]) -> dict[str, Any]:
    """What the objects of a class find in it and in its bases, but for those of torch."""
    found: dict[str, Any] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if name not in found:
                found[name] = looks.at(member, cls, name) if callable(value) else value
    return found


def functions_of(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """The methods that run when its objects are called: not those that build or initialise them."""
    found = {}
    for name, value in members_of(cls).items():
        if name.startswith("__") or name == "_init_weights" or not callable(value):
            continue
        function = inspect.unwrap(value)
        if isinstance(function, FunctionType):
            found[name] = function
    return found


def readable(cls: type[nn.Module]) -> Iterator[tuple[str, Method]]:
    """These methods by name, those whose source can be read."""
    for name, function in functions_of(cls).items():
        with contextlib.suppress(NotUnderstoodError):
            yield name, read_function(function)


def trees_of(cls: type[nn.Module]) -> dict[str, ast.FunctionDef]:
    """The trees of these."""
    return {name: method.node for name, method in readable(cls)}


def method_to_rewrite(cls: type[nn.Module], name: str) -> Method:
    """A method of a class whose source may take the place of what runs.

    Raises:
        NotUnderstoodError: the source doesn't show all that runs.
    """
    found = looks.at(member, cls, name)
    method = read_function(inspect.unwrap(found))
    if (found is not method.function) != bool(method.node.decorator_list):
        raise NotUnderstoodError(f"{name} is wrapped by something that its source doesn't show", 1)
    if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in ast.walk(method.node)):
        raise NotUnderstoodError(f"{name} is a generator", 1)
    return Method(name, method.function, method.source, method.node)


def unwrapped(function: Any) -> Any:
    """What a wrapper of transformers wraps that passes on what it is given; other functions as they are."""
    code = getattr(function, "__code__", None)
    home = getattr(function, "__globals__", {}).get("__name__", "")
    if code is not None and (home, code.co_qualname.partition(".")[0]) in _TRANSPARENT:
        return unwrapped(getattr(function, "__wrapped__", None)) or function
    return function


def self_of(function: ast.FunctionDef, default: str = "") -> str:
    """What a method calls its first parameter."""
    parameters = positional_parameters(function)
    return parameters[0].arg if parameters else default


def names_in(node: ast.AST) -> set[str]:
    """Every name that a piece of source uses, attributes included."""
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
    return {getattr(child, fields[type(child)]) for child in ast.walk(node) if type(child) in fields}
