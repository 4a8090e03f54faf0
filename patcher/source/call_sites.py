"""Which calls a file has, of what, and whether their arguments fit a signature. Nothing is run.

It follows what modeling code does: `self.mlp = LlamaMLP(config)`, lists of layers and loops over them, `super()`,
calls through the class. A call that it can't follow is not found.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from patcher.source.scopes import top_level

__all__ = ["CallSites", "none_by_default", "shortened", "signature_of", "why_unfit"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LISTS = ("ModuleList", "Sequential")


class CallSites:
    """What one file defines, and which classes its attributes and variables hold."""

    def __init__(self, tree: ast.Module) -> None:
        self._known: Mapping[str, set[str]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, Function] = {}
        for node in top_level(tree.body):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, _FUNCTIONS):
                self.functions[node.name] = node
        self._attributes = {name: self._find_attributes(node) for name, node in self.classes.items()}

    def function(self, target: str) -> Function | None:
        """A function by its name, a method by `Class.name`."""
        if "." not in target:
            return self.functions.get(target)
        owner, _, name = target.rpartition(".")
        return self.methods(owner).get(name)

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

    def calls(self) -> Iterator[tuple[ast.Call, str, bool]]:
        """Each call that can be followed, its target, and whether `self` is passed by itself."""
        for function in self.functions.values():
            yield from self._calls_in(function, "")
        for owner in self.classes:
            for method in self.methods(owner).values():
                yield from self._calls_in(method, owner)

    def uses(self, owner: str, known: Mapping[str, set[str]]) -> Iterator[tuple[ast.Call, str, str, str]]:
        """Each call in a class that makes an object of a class, or calls one that an attribute holds.

        Args:
            owner: the class whose methods are read.
            known: attribute -> the classes that it holds, `[]Class` for a list of them, where that is known better.

        Returns:
            The call, the class, `__init__` or `forward`, and the method that the call is in.
        """
        self._known = known
        try:
            for name, method in self.methods(owner).items():
                local = self._locals(method, owner)
                for call in ast.walk(method):
                    if isinstance(call, ast.Call):
                        if isinstance(call.func, ast.Name) and call.func.id in self.classes:
                            yield call, call.func.id, "__init__", name
                        for held in self._held(call.func, owner, local):
                            yield call, held, "forward", name
        finally:
            self._known = {}

    def _calls_in(self, function: Function, owner: str) -> Iterator[tuple[ast.Call, str, bool]]:
        local = self._locals(function, owner)
        for call in ast.walk(function):
            if isinstance(call, ast.Call):
                for target, bound in self._targets(call.func, owner, local):
                    yield call, target, bound

    def _targets(self, func: ast.expr, owner: str, local: dict[str, set[str]]) -> Iterator[tuple[str, bool]]:
        if isinstance(func, ast.Name) and func.id in self.functions and func.id not in local:
            yield func.id, False
        elif isinstance(func, ast.Name) and func.id in self.classes and func.id not in local:
            yield from self._method(self.lineage(func.id), "__init__")
        elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in self.classes:
            yield from ((target, False) for target, _ in self._method(self.lineage(func.value.id), func.attr))
        elif isinstance(func, ast.Attribute) and _is_super(func.value):
            yield from self._method(self.lineage(owner)[1:], func.attr)
        elif isinstance(func, ast.Attribute) and _is_self(func.value) and owner:
            yield from self._method(self.lineage(owner), func.attr)
        for name in self._held(func, owner, local):
            yield from self._method(self.lineage(name.removeprefix("[]")), "forward")

    def _method(self, lineage: Sequence[str], name: str) -> Iterator[tuple[str, bool]]:
        for owner in lineage:
            function = self.methods(owner).get(name)
            if function is not None:
                static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
                yield f"{owner}.{name}", not static
                return

    def _find_attributes(self, node: ast.ClassDef) -> dict[str, set[str]]:
        """`self.x = Class(...)`: the classes that each attribute may hold, `[]Class` for a list of them."""
        found: dict[str, set[str]] = {}
        for part in ast.walk(node):
            if isinstance(part, ast.Assign):
                for target in part.targets:
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        found.setdefault(target.attr, set()).update(self._made(part.value))
        return found

    def _made(self, value: ast.expr) -> set[str]:
        if isinstance(value, ast.IfExp):
            return self._made(value.body) | self._made(value.orelse)
        if not isinstance(value, ast.Call):
            return set()
        if isinstance(value.func, ast.Name) and value.func.id in self.classes:
            return {value.func.id}
        if isinstance(value.func, ast.Attribute) and value.func.attr in _LISTS and value.args:
            items = value.args[0]
            parts = items.elts if isinstance(items, (ast.List, ast.Tuple)) else [getattr(items, "elt", items)]
            return {f"[]{name}" for part in parts for name in self._made(part) if not name.startswith("[]")}
        return set()

    def _held(self, value: ast.expr, owner: str, local: dict[str, set[str]]) -> set[str]:
        """The classes whose instances an expression may give."""
        if isinstance(value, ast.Name):
            return {name for name in local.get(value.id, set()) if not name.startswith("[]")}
        names = self._all_held(value, owner, local)
        return {name for name in names if not name.startswith("[]")}

    def _all_held(self, value: ast.expr, owner: str, local: dict[str, set[str]]) -> set[str]:
        if isinstance(value, ast.Name):
            return local.get(value.id, set())
        if isinstance(value, ast.Attribute) and _is_self(value.value):
            if value.attr in self._known:
                return self._known[value.attr]
            return {n for base in self.lineage(owner) for n in self._attributes.get(base, {}).get(value.attr, ())}
        if isinstance(value, ast.Subscript):
            inner = self._all_held(value.value, owner, local)
            return inner if isinstance(value.slice, ast.Slice) else {name.removeprefix("[]") for name in inner}
        return self._made(value)

    def _locals(self, function: Function, owner: str) -> dict[str, set[str]]:
        """Variables of a function: its parameters, those that hold layers, and those of loops over layers."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        found: dict[str, set[str]] = {argument.arg: set() for argument in arguments}
        for part in ast.walk(function):
            if isinstance(part, ast.Assign) and len(part.targets) == 1 and isinstance(part.targets[0], ast.Name):
                found.setdefault(part.targets[0].id, set()).update(self._all_held(part.value, owner, found))
            elif isinstance(part, (ast.For, ast.comprehension)):
                target, items = part.target, part.iter
                if isinstance(items, ast.Call) and isinstance(items.func, ast.Name) and items.func.id == "enumerate":
                    target = target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else target
                    items = items.args[0] if items.args else items
                held = {n.removeprefix("[]") for n in self._all_held(items, owner, found) if n.startswith("[]")}
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, set()).update(held)
        return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def why_unfit(call: ast.Call, original: Function | None, patched: Function | None, bound: bool) -> str:
    """Why the arguments of a call don't fit what was patched, empty if they do or if that can't be told.

    What didn't fit the original either is nobody's fault: a decorator takes arguments out of the call, or adds some.
    """
    if patched is None or (original is not None and _why_unfit(call, original, bound)):
        return ""
    return _why_unfit(call, patched, bound)


def _why_unfit(call: ast.Call, function: Function, bound: bool) -> str:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1 if bound else 0 :]
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


def none_by_default(function: ast.FunctionDef) -> list[str]:
    """The parameters of a function whose default is None."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(parameters), reversed(arguments.defaults), strict=False)]
    pairs += [
        (one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
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


def shortened(call: ast.Call) -> str:
    """A call on one line that isn't long."""
    text = " ".join(ast.unparse(call).split())
    return text if len(text) <= 80 else text[:77] + "..."
