"""The calls of functions and children in modeling code, and whether their arguments fit a signature. Nothing is run.

Calls are followed as modeling code writes them: `self.mlp(...)`, lists of layers and loops over them.
"""

from __future__ import annotations

import ast
from typing import Any

from patcher.source.reading import signature_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


def calls_of_function(tree: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of a global function."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]


def calls_of_child(function: Function, name: str, listed: bool) -> list[ast.Call]:
    """Return the calls of the child `name` of a module in one of its methods, or of the children in a list `name`."""
    elements = _elements(function, name) if listed else set()
    calls = []
    for call in ast.walk(function):
        match call:
            case ast.Call(func=ast.Name(id=called)) if called in elements:
                calls.append(call)
            case ast.Call(func=ast.Attribute(value=ast.Name(), attr=called)) if called == name and not listed:
                calls.append(call)
            case ast.Call(func=ast.Subscript(value=ast.Attribute(ast.Name(), called))) if called == name and listed:
                calls.append(call)
    return calls


def _elements(function: Function, name: str) -> set[str]:
    """Return the variables that hold an element of the list `self.name`, from a loop or a subscript."""
    variables: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension):
            target, source = node.target, node.iter
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            target, source = node.targets[0], node.value
        else:
            continue
        if any(isinstance(child, ast.Attribute) and child.attr == name for child in ast.walk(source)):
            variables |= {child.id for child in ast.walk(target) if isinstance(child, ast.Name)}
    return variables


def why_unfit(call: ast.Call, original: Any, patched: Any, first: tuple[None, ...] = (None,)) -> str:
    """Return why the arguments of a call fit a method but not its replacement, "" if they fit both or it is unknown.

    Calls that don't fit the original aren't reported: a decorator may remove or add arguments.

    Args:
        first: in the place of `self`; empty for a function.
    """
    return "" if _mismatch(call, original, first) else _mismatch(call, patched, first)


def _mismatch(call: ast.Call, function: Any, first: tuple[None, ...]) -> str:
    try:
        signature = signature_of(function)  # of the wrapped function, for a wrapper
    except (TypeError, ValueError):
        return ""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    is_whole = not starred and len(keywords) == len(call.keywords)
    try:
        arguments = () if starred else (*first, *call.args)
        (signature.bind if is_whole else signature.bind_partial)(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    return ""


def positional_parameters(function: Function) -> list[ast.arg]:
    """Return the parameters of a function that can be passed by position, `self` included."""
    return [*function.args.posonlyargs, *function.args.args]


def none_by_default(function: Function) -> list[str]:
    """Return the parameters of a function whose default is None, starting with the last positional one."""
    pairs = [
        *zip(reversed(positional_parameters(function)), reversed(function.args.defaults), strict=False),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return [
        parameter.arg for parameter, default in pairs if isinstance(default, ast.Constant) and default.value is None
    ]


def shortened(node: ast.AST, length: int = 80) -> str:
    """Return the source of a node on one line, shortened to a length."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= length else text[: length - 3] + "..."
