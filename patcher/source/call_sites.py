"""Which calls a file has, of what, and whether their arguments fit a signature. Nothing is run.

It follows what modeling code does: `self.mlp = LlamaMLP(config)`, lists of layers and loops over them, `super()`,
calls through the class. A call that it can't follow is not found.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from patcher.source.scopes import top_level

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: a class, and whether it is one of a list
Held = tuple[str, bool]


class CallSites:
    """What one file defines, and which classes its attributes and variables hold."""

    def __init__(self, tree: ast.Module) -> None:
        body = list(top_level(tree.body))
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self.functions: dict[str, Function] = {node.name: node for node in body if isinstance(node, _FUNCTIONS)}
        self._children = {name: self._find_children(node) for name, node in self.classes.items()}

    def function(self, target: str) -> Function | None:
        """A function by its name, a method by `Class.name`."""
        owner, _, name = target.rpartition(".")
        return (self.methods(owner) if owner else self.functions).get(name)

    def methods(self, owner: str) -> dict[str, Function]:
        """The methods in the body of a class."""
        node = self.classes.get(owner)
        return {part.name: part for part in top_level(node.body) if isinstance(part, _FUNCTIONS)} if node else {}

    def lineage(self, name: str) -> list[str]:
        """A class and its bases in this file, nearest first."""
        found: list[str] = []
        stack = [name]
        while stack:
            current = stack.pop(0)
            if current in self.classes and current not in found:
                found.append(current)
                stack += [base.id for base in self.classes[current].bases if isinstance(base, ast.Name)]
        return found

    def constructions(self, owner: str) -> Iterator[tuple[ast.Call, str, str]]:
        """Each call in a class that makes an object of a class of the file, that class, and the method it is in."""
        for name, method in self.methods(owner).items():
            for call in ast.walk(method):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.classes:
                    yield call, call.func.id, name

    def calls(self) -> Iterator[tuple[ast.Call, str, bool]]:
        """Each call that can be followed, its target, and whether `self` is passed by itself."""
        for function in self.functions.values():
            yield from self._calls_by_name(function, "")
        for owner in self.classes:
            lineage = self.lineage(owner)
            children = [(name, cls) for base in lineage for name, held in self._children[base].items() for cls in held]
            for method in self.methods(owner).values():
                yield from self._calls_by_name(method, owner)
                for name, (cls, listed) in dict.fromkeys(children):
                    for call in calls_of_child(method, name, listed):
                        for target, bound in self._method(self.lineage(cls), "forward"):
                            yield call, target, bound

    def _calls_by_name(self, function: Function, owner: str) -> Iterator[tuple[ast.Call, str, bool]]:
        local = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
        local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for call in ast.walk(function):
            if isinstance(call, ast.Call):
                for target, bound in self._targets(call.func, owner, local):
                    yield call, target, bound

    def _targets(self, func: ast.expr, owner: str, local: set[str]) -> Iterator[tuple[str, bool]]:
        match func:
            case ast.Name(id=name) if name in self.functions and name not in local:
                yield name, False
            case ast.Name(id=name) if name in self.classes and name not in local:
                yield from self._method(self.lineage(name), "__init__")
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in self.classes:
                yield from ((target, False) for target, _ in self._method(self.lineage(name), method))
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=method):
                yield from self._method(self.lineage(owner)[1:], method)
            case ast.Attribute(value=ast.Name(id="self"), attr=method):
                yield from self._method(self.lineage(owner), method)

    def _method(self, lineage: Sequence[str], name: str) -> Iterator[tuple[str, bool]]:
        for owner in lineage:
            function = self.methods(owner).get(name)
            if function is not None:
                static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
                yield f"{owner}.{name}", not static
                return

    def _find_children(self, node: ast.ClassDef) -> dict[str, set[Held]]:
        """`self.x = Class(...)`: what each attribute may hold."""
        found: dict[str, set[Held]] = {}
        for part in ast.walk(node):
            for target in part.targets if isinstance(part, ast.Assign) else ():
                match target:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        found.setdefault(name, set()).update(self._made(part.value))  # type: ignore[attr-defined]
        return found

    def _made(self, value: ast.expr) -> set[Held]:
        match value:
            case ast.IfExp():
                return self._made(value.body) | self._made(value.orelse)
            case ast.Call(func=ast.Name(id=name)) if name in self.classes:
                return {(name, False)}
            case ast.Call(func=ast.Attribute(attr="ModuleList" | "Sequential"), args=[items, *_]):
                parts = items.elts if isinstance(items, (ast.List, ast.Tuple)) else [getattr(items, "elt", items)]
                return {(name, True) for part in parts for name, listed in self._made(part) if not listed}
        return set()


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
    """Why the arguments of a call don't fit what was patched, empty if they do or if that can't be told.

    What didn't fit the original either is nobody's fault: a decorator takes arguments out of the call, or adds some.
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
