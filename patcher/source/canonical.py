"""Code without what makes no difference to it: what fingerprints are taken of."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from typing import Any

#: the fingerprint of what isn't there
NOTHING = "none"
_LEFT_OUT = frozenset({"ctx", "type_comment", "kind"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def canonical(node: Any, *, annotations: bool = True) -> Any:
    """A syntax tree without positions, docstrings and empty fields, so that all releases of Python agree.

    >>> written, formatted = ast.parse("def f(x): 'Doc.'; return x"), ast.parse("def f( x ):  # note\\n    return (x)")
    >>> canonical(written) == canonical(formatted)
    True

    Args:
        node: a node, a list of them, or the value of a field.
        annotations: with those of parameters and of what functions return, which nothing runs.
    """
    if isinstance(node, list):
        return [canonical(item, annotations=annotations) for item in node]
    if not isinstance(node, ast.AST):
        return node
    left_out = _LEFT_OUT
    if not annotations and isinstance(node, (*_FUNCTIONS, ast.arg)):
        left_out |= {"returns", "annotation"}
    fields = {}
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        if value is not None and value != [] and name not in left_out:
            fields[name] = canonical(value, annotations=annotations)
    return (type(node).__name__, sorted(fields.items()))


def fingerprint(definitions: Iterable[ast.stmt]) -> str:
    """A short name of what definitions do: of all that have one name, as in the branches of an `if`.

    >>> fingerprint(ast.parse("def f(x: int): return x").body) == fingerprint(ast.parse("def f(x): return (x)").body)
    True

    It is of the syntax tree without docstrings, and without the annotations of functions, which nothing runs:
    more than half of what one release of transformers changes in the methods of another is nothing but that.
    """
    trees = [canonical(node, annotations=False) for node in definitions]
    return hashlib.sha256(repr(trees).encode()).hexdigest()[:8] if trees else NOTHING
