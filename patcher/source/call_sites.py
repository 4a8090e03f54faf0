"""Which calls a file has, of what, and whether their arguments fit a signature. Nothing is run.

It follows what modeling code does: `self.mlp = LlamaMLP(config)`, lists of layers and loops over them. A call that it
can't follow is not found.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from patcher.source.reading import file_tree
from patcher.source.scopes import top_level

Function = ast.FunctionDef | ast.AsyncFunctionDef


def methods_of(cls: type) -> Iterator[Function]:
    """The methods in the body of a class of a file; none where there is no file, as for what was typed in a prompt."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    for node in top_level(file_tree(file or "").body):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            yield from (part for part in top_level(node.body) if isinstance(part, Function))


def calls_of_child(function: Function, name: str, listed: bool) -> list[ast.Call]:
    """The calls of the child `name` of a module in one of its methods, or of the children in a list of that name."""
    elements = _elements(function, name) if listed else set()
    found = []
    for call in ast.walk(function):
        match call:
            case ast.Call(func=ast.Name(id=called)) if called in elements:
                found.append(call)
            case ast.Call(func=ast.Attribute(value=ast.Name(), attr=called)) if called == name and not listed:
                found.append(call)
            case ast.Call(func=ast.Subscript(value=ast.Attribute(ast.Name(), called))) if called == name and listed:
                found.append(call)
    return found


def _elements(function: Function, name: str) -> set[str]:
    """The variables that hold an element of `self.name`, a list of layers, one after the other or by number."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension):
            target, source = node.target, node.iter
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            target, source = node.targets[0], node.value
        else:
            continue
        if any(isinstance(child, ast.Attribute) and child.attr == name for child in ast.walk(source)):
            found |= {child.id for child in ast.walk(target) if isinstance(child, ast.Name)}
    return found


def why_unfit(call: ast.Call, original: Any, patched: Any) -> str:
    """Why the arguments of a call fit a method, and not what is in its place; empty if that isn't so, or isn't known.

    What doesn't fit the original isn't reported: a decorator takes arguments out of the call, or adds some.
    """
    return "" if _why_unfit(call, original) else _why_unfit(call, patched)


def _why_unfit(call: ast.Call, method: Any) -> str:
    try:
        signature = inspect.signature(method)  # wrappers show that of what they wrap
    except (TypeError, ValueError):
        return ""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    is_whole = not starred and len(keywords) == len(call.keywords)
    try:
        given = () if starred else (None, *call.args)  # with `self`
        (signature.bind if is_whole else signature.bind_partial)(*given, **keywords)
    except TypeError as error:
        return str(error)
    return ""


def positional_parameters(function: Function) -> list[ast.arg]:
    """The parameters of a function that can be given by position, `self` included."""
    return [*function.args.posonlyargs, *function.args.args]


def none_by_default(function: Function) -> list[str]:
    """The parameters of a function whose default is None, from the last one that can be given by position."""
    pairs = [
        *zip(reversed(positional_parameters(function)), reversed(function.args.defaults), strict=False),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return [one.arg for one, default in pairs if isinstance(default, ast.Constant) and default.value is None]


def shortened(node: ast.AST, length: int = 80) -> str:
    """A piece of source on one line that isn't long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= length else text[: length - 3] + "..."
