"""Where a forward cuts the product of a stack into gate and up: in halves, or row by row in turns.

```text
gate, up = gate_up.chunk(2, dim=-1)
gate, up = gate_up[..., ::2], gate_up[..., 1::2]
```
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from patcher.fusions.methods import NotUnderstoodError, read_function, self_of
from patcher.source.call_sites import positional_parameters


@dataclass(frozen=True)
class Split:
    """How a product is cut in two.

    Attributes:
        parts: the names of the layers that make the two parts, in the order of their rows in the stack.
        interleaved: the parts take turns; otherwise one comes after the other.
    """

    parts: tuple[str, str]
    interleaved: bool


#: The methods of a class, by name, with their trees.
Methods = Callable[[str], ast.FunctionDef]


def methods_of(cls: type[nn.Module]) -> Methods:
    """The methods that objects of the class have, to be looked up by name."""

    def method(name: str) -> ast.FunctionDef:
        function = inspect.unwrap(inspect.getattr_static(cls, name, None))
        if not isinstance(function, FunctionType):
            raise NotUnderstoodError(f"{name} is no method with a source")
        return read_function(function.__name__, function).node

    return method


def splits_of(
    function: ast.FunctionDef, name: str, methods: Methods, within: frozenset[str] = frozenset()
) -> set[Split]:
    """The ways in which a function, or a method that it hands the variable `name` to, cuts it in two.

    Raises:
        NotUnderstoodError: it is cut in two, and which part is the gate isn't said.
    """
    found: set[Split] = set()
    slices: dict[str, str] = {}
    this = self_of(function, "self")
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                if isinstance(value, ast.Subscript) and _is(value.value, name):
                    slices[ast.unparse(value.slice)] = ast.unparse(target)
            if isinstance(node.value, ast.Call) and is_chunk(node.value) and _is(chunked(node.value), name):
                found.add(in_halves(node))
        for position, argument in enumerate(node.args if isinstance(node, ast.Call) else ()):
            if isinstance(node, ast.Call) and _is(argument, name):
                found |= handed_on(node, position, this, methods, within)
    if {"(..., ::2)", "(..., 1::2)"} <= slices.keys():
        even, odd = slices["(..., ::2)"], slices["(..., 1::2)"]
        found.add(Split(_parts(even, odd, function.lineno), interleaved=True))
    return found


def handed_on(
    call: ast.Call, position: int, this: str, methods: Methods, within: frozenset[str] = frozenset()
) -> set[Split]:
    """How the method of the module that is called cuts its argument at a position."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not _is(function.value, this):
        return set()
    if call.keywords or function.attr in within:
        return set()
    try:
        method = methods(function.attr)
    except NotUnderstoodError:
        return set()  # a child: activations are
    parameters = positional_parameters(method)
    if position + 1 >= len(parameters):
        return set()
    return splits_of(method, parameters[position + 1].arg, methods, within | {function.attr})


def is_chunk(call: ast.Call) -> bool:
    """Whether it is `x.chunk(2, dim=-1)`."""
    arguments = [ast.unparse(argument) for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    names = {keyword.arg for keyword in call.keywords}
    return isinstance(call.func, ast.Attribute) and (
        (call.func.attr == "chunk" and arguments == ["2", "-1"] and names <= {"dim"})
        or (ast.unparse(call.func) == "torch.chunk" and arguments[1:] == ["2", "-1"] and names <= {"dim"})
    )


def chunked(call: ast.Call) -> ast.expr:
    assert isinstance(call.func, ast.Attribute)
    return call.args[0] if ast.unparse(call.func) == "torch.chunk" else call.func.value


def in_halves(assignment: ast.Assign) -> Split:
    """The split of `gate, up = x.chunk(2, dim=-1)`.

    Raises:
        NotUnderstoodError: which of them is the gate isn't said.
    """
    match assignment.targets:
        case [ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])]:
            return Split(_parts(first, second, assignment.lineno), interleaved=False)
    raise NotUnderstoodError("what is cut in two isn't given two names", assignment.lineno)


def _parts(first: str, second: str, line: int) -> tuple[str, str]:
    if "gate" in first and "gate" not in second:
        return "gate_proj", "up_proj"
    if "gate" in second and "gate" not in first:
        return "up_proj", "gate_proj"
    raise NotUnderstoodError(f"which of {first} and {second} is the gate isn't said", line)


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, tuples apart."""
    (target,) = node.targets if len(node.targets) == 1 else (None,)
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return list(zip(target.elts, node.value.elts, strict=False))
    return [(target, node.value)] if target is not None else []


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
