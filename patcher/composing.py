"""Two classes as texts that can be compared: one as it is shipped, and what stands in its place.

A replacement that inherits from the class that it replaces says only what it changes. So its methods are put where
those stand that they override, and what is left is the text that one would have written in the modeling file.
"""

from __future__ import annotations

import ast
import difflib
import io
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch import nn

from patcher.errors import CodegenError
from patcher.source.indentation import dedented, in_strings, indented
from patcher.source.reading import Location, read_source, unwrap

__all__ = ["composed"]

# How an object is pickled is no part of what it computes.
_PLUMBING = frozenset({"__reduce__", "__reduce_ex__"})
_DOCSTRING = "__doc__"


@dataclass(frozen=True)
class _Member:
    """One statement of the body of a class, from the left, with the comments and empty lines above it."""

    name: str
    text: str
    #: whether it is a function that calls the one that it overrides
    extends: bool = False
    is_function: bool = False
    #: whether it says a type and gives no value
    is_declaration: bool = False

    @property
    def gap(self) -> str:
        return self.text[: len(self.text) - len(self.text.lstrip("\n"))]

    def below(self, gap: str) -> _Member:
        """The same with other empty lines above it."""
        return replace(self, text=gap + self.text.lstrip("\n"))


@dataclass
class _Body:
    """The text of a class, in parts."""

    decorators: str
    head: str
    members: list[_Member]

    def __str__(self) -> str:
        body = "".join(indented(member.text) for member in self.members)
        return self.decorators + self.head + (body or "    pass\n")

    def named(self, name: str) -> list[_Member]:
        return [member for member in self.members if member.name == name]


def composed(original: type[nn.Module], replacement: type[nn.Module]) -> tuple[str, str]:
    """The text of a class, and of what is built in its place.

    A class whose source can't be read has a comment that says so in the place of its methods.
    """
    shipped = _body_of(original)
    mine = [cls for cls in replacement.__mro__ if cls not in original.__mro__]
    if issubclass(replacement, original):
        patched = _Body(shipped.decorators, shipped.head, list(shipped.members))
        layers = mine
    else:
        own = [cls for cls in mine if cls is replacement or not _is_library(cls)]
        patched, layers = _body_of(own[-1]), own[:-1]
        patched.head = _body_of(replacement).head
    for cls in reversed(layers):
        if issubclass(replacement, original) and _is_library(cls) and cls is not replacement:
            continue
        body = _body_of(cls)
        for name in dict.fromkeys(member.name for member in body.members if member.is_function):
            if issubclass(replacement, original) and not patched.named(name):
                # Overridden, and itself inherited: what it was is shown too.
                inherited = _inherited(original, name)
                shipped.members += inherited
                patched.members += inherited
        _overlay(patched, body)
    return str(shipped), str(patched)


def _is_library(cls: type) -> bool:
    """Whether a class that others inherit from is none that anybody wrote for this model."""
    root = cls.__module__.partition(".")[0]
    return root in ("torch", "transformers") or root in sys.stdlib_module_names - {"__main__"}


def _inherited(cls: type[nn.Module], name: str) -> list[_Member]:
    owner = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
    if owner is None or owner.__module__.partition(".")[0] in ("torch", "builtins"):
        return []
    return [member.below("\n") for member in _body_of(owner).named(name)]


def _overlay(under: _Body, over: _Body) -> None:
    """Put the members of a subclass where those stand that they override, and the others beside them."""
    under.decorators = over.decorators + under.decorators
    for name in dict.fromkeys(member.name for member in over.members if not member.is_declaration):
        new = over.named(name)
        old = under.named(name) if name else []
        if not old:
            _insert(under, new)
        elif new[0].extends and _changed_lines(old, new) >= sum(len(member.text.splitlines()) for member in new):
            # It calls what it overrides: both are run, and both are shown.
            at = under.members.index(old[-1]) + 1
            under.members[at:at] = [member.below(old[0].gap or "\n") for member in new]
        else:
            at = under.members.index(old[0])
            under.members = [member for member in under.members if member not in old]
            under.members[at:at] = [new[0].below(old[0].gap), *new[1:]]


def _insert(under: _Body, new: list[_Member]) -> None:
    """Put members that override nothing where one would write them: values in front, functions at the end."""
    if new[0].is_function:
        under.members += [member.below(member.gap or "\n") for member in new]
        return
    at = 0
    if new[0].name != _DOCSTRING:
        at = next((i for i, member in enumerate(under.members) if member.is_function), len(under.members))
    gap = "\n" if at and under.members[at - 1].name == _DOCSTRING else ""
    if at < len(under.members):
        under.members[at] = under.members[at].below(under.members[at].gap or "\n")
    under.members[at:at] = [member.below(gap) for member in new]


def _changed_lines(old: Iterable[_Member], new: Iterable[_Member]) -> int:
    before, after = ("".join(member.text for member in listed).strip().splitlines() for listed in (old, new))
    return sum(line[0] in "+-" for line in difflib.ndiff(before, after))


# --- reading -------------------------------------------------------------------------------------------------------


def _body_of(cls: type) -> _Body:
    try:
        text = dedented(read_source(cls, "diff", Location("", 0)).text)
        tree = ast.parse(text)
    except (CodegenError, SyntaxError):
        return _made_up(cls)
    (node,) = tree.body
    assert isinstance(node, ast.ClassDef)
    if node.body[0].lineno <= _last_line_of_head(text, node):  # `class Own(LlamaMLP): pass`
        text = ast.unparse(tree) + "\n"
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.ClassDef)
    lines = text.splitlines(keepends=True)
    head_end = _last_line_of_head(text, node)
    inside, width = in_strings(node), node.body[0].col_offset
    members: list[_Member] = []
    end = head_end
    is_torchs = cls.__module__.partition(".")[0] == "torch"
    for statement in node.body:
        last = len(lines) if statement is node.body[-1] else statement.end_lineno or statement.lineno
        first, end = end, max(end, last)
        part = "".join(
            line if number in inside or line[:width].strip() else line[width:] or "\n"
            for number, line in enumerate(lines[first:end], first + 1)
        )
        member = _member(statement, part)
        # torch documents its layers on pages, which nothing here replaces.
        if member.text and member.name not in _PLUMBING and not (is_torchs and member.name == _DOCSTRING):
            members.append(member)
    start = node.lineno - 1
    return _Body("".join(lines[:start]), "".join(lines[start:head_end]), members)


def _last_line_of_head(text: str, node: ast.ClassDef) -> int:
    """The line of the colon behind the name and the bases."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start[0] < node.lineno or token.type != tokenize.OP:
            continue
        if token.string == ":" and depth == 0:
            return token.start[0]
        depth += (token.string in "([{") - (token.string in ")]}")
    raise AssertionError(text)


def _member(statement: ast.stmt, text: str) -> _Member:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return _Member(statement.name, text, _calls_super(statement), True)
    name = ""
    if isinstance(statement, ast.ClassDef):
        name = statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        name = ", ".join(map(ast.unparse, targets))
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        if isinstance(statement.value.value, str):
            name = _DOCSTRING
        elif statement.value.value is ...:
            text = ""
    elif isinstance(statement, ast.Pass):
        text = "".join(line for line in text.splitlines(keepends=True) if line.lstrip().startswith("#"))
    return _Member(name, text, is_declaration=isinstance(statement, ast.AnnAssign) and statement.value is None)


def _calls_super(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == function.name
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
        for node in ast.walk(function)
    )


def _made_up(cls: type) -> _Body:
    """A class without a source: of a notebook cell when it has no methods, or made by a call."""
    members = []
    for name, value in vars(cls).items():
        if name.startswith("__") and not _is_function(value):
            continue
        if value is None or isinstance(value, str | int | float):
            members.append(_Member(name, f"{name} = {value!r}\n"))
        else:
            members.append(_Member(name, f"# {name}: a {type(value).__name__} whose source can't be read\n"))
    return _Body("", f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}):\n", members)


def _is_function(value: Any) -> bool:
    return isinstance(unwrap(value), FunctionType)
