"""The methods of a model's classes, with their source."""

from __future__ import annotations

import ast
import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from patcher.source.call_sites import positional_parameters
from patcher.source.indentation import dedented


class NotUnderstoodError(Exception):
    """What stands in the way, and the line of the method's source where it does."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Method:
    """A method of a model's class, with its source."""

    name: str
    function: FunctionType
    source: str
    node: ast.FunctionDef
    file: str
    first_line: int

    def at(self, line: int | None) -> str:
        """Where a line of the source lies: `modeling_llama.py:243`."""
        return f"{Path(self.file).name}:{self.first_line + (line or 1) - 1}"


def located(error: NotUnderstoodError, method: Method) -> NotUnderstoodError:
    """The error, with the file and the line in its text."""
    return NotUnderstoodError(f"{error} ({method.at(error.line)})")


def read_method(name: str, function: FunctionType) -> Method:
    """A function of a class with its source.

    Raises:
        NotUnderstoodError: there is none.
    """
    try:
        lines, first_line = inspect.getsourcelines(function)
        source = dedented("".join(lines))
        (node,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise NotUnderstoodError(f"the source of {name} can't be read ({error})") from error
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        raise NotUnderstoodError(f"the source of {name} is no method")
    return Method(name, function, source, node, inspect.getfile(function), first_line)


def methods_with(cls: type[nn.Module], wanted: Callable[[ast.FunctionDef], bool]) -> list[Method]:
    """The methods of a class, as its objects have them, whose source `wanted` asks for.

    Raises:
        NotUnderstoodError: the source of one of them isn't the code that runs.
    """
    found = []
    for name in (name for name, tree in trees_of(cls).items() if wanted(tree)):
        member = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        function = inspect.unwrap(member)
        method = read_method(name, function)
        free = [variable for variable in function.__code__.co_freevars if variable != "__class__"]
        if free:
            raise NotUnderstoodError(f"{name} uses {', '.join(free)} of the function around it", 1)
        if (member is not function) != bool(method.node.decorator_list):
            raise NotUnderstoodError(f"{name} is wrapped by something that its source doesn't show", 1)
        if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in ast.walk(method.node)):
            raise NotUnderstoodError(f"{name} is a generator", 1)
        found.append(method)
    return found


_Answer = TypeVar("_Answer")


def known_of_class(function: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Remember what a function says of a class, as long as the class lives: a model has many modules of one class."""
    known: weakref.WeakKeyDictionary[type[nn.Module], dict[Any, _Answer]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def answer(cls: type[nn.Module], *arguments: Any) -> _Answer:
        answers = known.setdefault(cls, {})
        if arguments not in answers:
            answers[arguments] = function(cls, *arguments)
        return answers[arguments]

    return answer


@known_of_class
def trees_of(cls: type[nn.Module]) -> dict[str, ast.FunctionDef]:
    """The trees of the methods that its objects have, those whose source can be read."""
    trees: dict[str, ast.FunctionDef] = {}
    members: dict[str, Any] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            members.setdefault(name, value)
    for name, member in members.items():
        # What builds and initialises the module meets the parts, or runs before they are joined.
        if name.startswith("__") or name == "_init_weights" or not callable(member):
            continue
        function = inspect.unwrap(member)
        if isinstance(function, FunctionType):
            with suppress(NotUnderstoodError):
                trees[name] = read_method(name, function).node
    return trees


def self_of(function: ast.FunctionDef, default: str = "") -> str:
    """What a method calls its first parameter."""
    parameters = positional_parameters(function)
    return parameters[0].arg if parameters else default


def names_in(node: ast.AST) -> set[str]:
    """Every name that a piece of source uses, attributes included."""
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
    return {getattr(child, fields[type(child)]) for child in ast.walk(node) if type(child) in fields}
