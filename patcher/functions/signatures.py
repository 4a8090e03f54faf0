"""Whether a replacement can be called as the function that it replaces is called."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from patcher.errors import PatchConstructionError
from patcher.source.call_sites import Function, positional_parameters, shortened, signature_of, why_unfit
from patcher.source.indentation import dedented


def check_signature(key: str, caller: FunctionType, name: str, original: Any, replacement: Any) -> None:
    """Raise where a call of a function doesn't fit what replaces it.

    Args:
        caller: the function that knows the original by `name`, "" where it holds it otherwise.

    Raises:
        PatchConstructionError: with the call, or with what differs in the parameters where the call can't be seen.
    """
    before, after = signature_of(original), signature_of(replacement)
    if before is None or after is None:
        return
    tree, file, line = _source(caller)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree is not None and name else []
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
    for call in named:
        if problem := why_unfit(call, before, after, False):
            where = f"line {line + call.lineno - 1} of {file}: {shortened(call)}"
            raise _misfit(key, replacement, f"a call of it in {caller.__qualname__}, {where}: {problem}")
    reads = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree)) if tree is not None else 0
    is_handed_on = reads == 0 or reads > len(named)  # to be called elsewhere
    if is_handed_on and (problem := unlike(before, after)):
        raise _misfit(key, replacement, f"what it replaces, which {caller.__qualname__} hands on: {problem}")


def _misfit(key: str, replacement: Any, what: str) -> PatchConstructionError:
    name = getattr(replacement, "__qualname__", repr(replacement))
    return PatchConstructionError(
        f"function_mapping: {name}, for {key!r}, doesn't fit {what}. Give it the parameters of what it replaces."
    )


def unlike(before: Function, after: Function) -> str:
    """A call that a function takes and another one doesn't, and why not; "" if there is none."""
    for call in _calls_of(before, len(positional_parameters(after)) + 1):
        if problem := why_unfit(call, before, after, False):
            return f"a call {shortened(call)}: {problem}"
    return ""


def _calls_of(function: Function, extra: int) -> Iterator[ast.Call]:
    """The calls of a function that decide: with each number of positional arguments, all the others by name, or few.

    Args:
        extra: how many arguments to add to the positional ones, where any number is taken.
    """
    arguments = function.args
    places = [each.arg for each in positional_parameters(function)]
    by_name = [*places[len(arguments.posonlyargs) :], *(each.arg for each in arguments.kwonlyargs)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needed = {*places[: len(places) - len(arguments.defaults)], *(each.arg for each, value in pairs if value is None)}
    more = [f"{arguments.vararg.arg}_{number}" for number in range(extra)] if arguments.vararg else []
    any_name = ["any_other_name"] if arguments.kwarg else []
    for given in ([*places, *more][:number] for number in range(len(places) + len(more) + 1)):
        names = [name for name in by_name if name not in given]
        for named in ([*names, *any_name], [name for name in names if name in needed]):
            keywords = [ast.keyword(name, ast.Name(name)) for name in named]
            yield ast.Call(ast.Name("f"), [ast.Name(name) for name in given], keywords)


def _source(function: FunctionType) -> tuple[ast.Module | None, str, int]:
    """The tree of a function's source, its file, and the line where it begins."""
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
        return ast.parse(dedented("".join(lines))), Path(code.co_filename).name, first
    except (OSError, TypeError, SyntaxError, ValueError):
        return None, "", 0
