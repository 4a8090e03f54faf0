"""Which calls a file has, of what, and whether their arguments fit a signature. Nothing is run.

It follows what modeling code does: `self.mlp = LlamaMLP(config)`, lists of layers and loops over them. A call that it
can't follow is not found.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from patcher.source.scopes import top_level

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class CallSites:
    """The classes of one file, and what builds them."""

    def __init__(self, tree: ast.Module) -> None:
        self.classes = {node.name: node for node in top_level(tree.body) if isinstance(node, ast.ClassDef)}

    def methods(self, owner: str) -> dict[str, Function]:
        """The methods in the body of a class."""
        node = self.classes.get(owner)
        return {part.name: part for part in top_level(node.body) if isinstance(part, _FUNCTIONS)} if node else {}

    def constructions(self, owner: str) -> Iterator[tuple[ast.Call, str, str]]:
        """Each call in a class that makes an object of a class of the file, that class, and the method it is in."""
        for name, method in self.methods(owner).items():
            for call in ast.walk(method):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.classes:
                    yield call, call.func.id, name


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


def why_unfit(call: ast.Call, original: Function | None, patched: Function | None, bound: bool) -> str:
    """Why the arguments of a call don't fit what was patched, empty if they do or if that can't be known.

    What didn't fit the original either isn't reported: a decorator takes arguments out of the call, or adds some.
    """
    if patched is None or (original is not None and _why_unfit(call, original, bound)):
        return ""
    return _why_unfit(call, patched, bound)


def _why_unfit(call: ast.Call, function: Function, bound: bool) -> str:
    arguments = function.args
    positional = [argument.arg for argument in positional_parameters(function)][1 if bound else 0 :]
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    given = len(call.args)
    if not starred and given > len(positional) and arguments.vararg is None:
        return f"it takes {len(positional)} positional arguments, and is given {given}"
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    only_positional = {argument.arg for argument in arguments.posonlyargs}
    known = ({*positional} - only_positional) | {argument.arg for argument in arguments.kwonlyargs}
    unknown = [name for name in keywords if name not in known]
    if unknown and arguments.kwarg is None:
        return f"it has no parameter {unknown[0]!r}"
    if starred:
        return ""
    twice = [name for name in keywords if name in positional[:given]]
    if twice:
        return f"{twice[0]!r} is given twice"
    if any(keyword.arg is None for keyword in call.keywords):
        return ""
    count = len(positional) - len(arguments.defaults)
    required = positional[: max(count, 0)][given:]
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [argument.arg for argument, default in defaults if default is None]
    missing = [name for name in required if name not in keywords]
    return f"{missing[0]!r} is missing" if missing else ""


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


def signature_of(function: Any) -> Function | None:
    """A definition without a body that has the signature of a function: wrappers show that of what they wrap."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    empty = inspect.Parameter.empty
    plain = [each.replace(annotation=empty, default=empty if each.default is empty else None) for each in parameters]
    (node,) = ast.parse(f"def called{inspect.Signature(plain)}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return node


def shortened(node: ast.AST, length: int = 80) -> str:
    """A piece of source on one line that isn't long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= length else text[: length - 3] + "..."
