"""Whether a replacement can be called as the function that it replaces is called."""

from __future__ import annotations

import ast
import inspect
from inspect import Parameter
from pathlib import Path
from types import FunctionType
from typing import Any

from patcher.errors import PatchConstructionError
from patcher.source.call_sites import shortened, signature_of, why_unfit
from patcher.source.indentation import dedented

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


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
    if is_handed_on and (problem := unlike(inspect.signature(original), inspect.signature(replacement))):
        raise _misfit(key, replacement, f"what it replaces, which {caller.__qualname__} hands on: {problem}")


def _misfit(key: str, replacement: Any, what: str) -> PatchConstructionError:
    name = getattr(replacement, "__qualname__", repr(replacement))
    return PatchConstructionError(
        f"function_mapping: {name}, for {key!r}, doesn't fit {what}. Give it the parameters of what it replaces."
    )


def unlike(before: inspect.Signature, after: inspect.Signature) -> str:
    """What a signature lacks to be called in all the ways that another one can, "" if nothing."""
    ours, theirs = after.parameters, before.parameters
    any_number = any(each.kind is Parameter.VAR_POSITIONAL for each in ours.values())
    any_name = any(each.kind is Parameter.VAR_KEYWORD for each in ours.values())
    places = [each.name for each in ours.values() if each.kind in _BY_POSITION]
    number = -1
    for each in theirs.values():
        mine = ours.get(each.name)
        if each.kind is Parameter.VAR_POSITIONAL:
            if not any_number:
                return f"it takes no *{each.name}"
            if len(places) > number + 1:
                return f"its parameter {places[number + 1]!r} takes what is one of *{each.name}"
        elif each.kind is Parameter.VAR_KEYWORD:
            if not any_name:
                return f"it takes no **{each.name}"
        else:
            if each.kind in _BY_POSITION:
                number += 1
                if mine is not None and mine.kind is Parameter.KEYWORD_ONLY:
                    return f"it takes {each.name!r} by name only"
                if not any_number and number >= len(places):
                    return f"it takes {len(places)} positional arguments, and {each.name!r} is number {number + 1}"
                if number < len(places) and each.kind is not Parameter.POSITIONAL_ONLY and places[number] != each.name:
                    return f"its parameter number {number + 1} is {places[number]!r}, not {each.name!r}"
            if mine is None and not any_name and each.kind is not Parameter.POSITIONAL_ONLY:
                return f"it has no parameter {each.name!r}"
            if mine is not None and each.default is not Parameter.empty and mine.default is Parameter.empty:
                return f"its parameter {each.name!r} has no default"
    for each in ours.values():
        is_plain = each.kind in (*_BY_POSITION, Parameter.KEYWORD_ONLY)
        if is_plain and each.default is Parameter.empty and each.name not in theirs:
            return f"its parameter {each.name!r} has no default, and nobody gives it"
    return ""


def _source(function: FunctionType) -> tuple[ast.Module | None, str, int]:
    """The tree of a function's source, its file, and the line where it begins."""
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
        return ast.parse(dedented("".join(lines))), Path(code.co_filename).name, first
    except (OSError, TypeError, SyntaxError, ValueError):
        return None, "", 0
