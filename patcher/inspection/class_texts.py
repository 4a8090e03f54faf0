"""Two classes as texts that can be compared: one as it is shipped, and what stands in its place.

A replacement that inherits from the class that it replaces says only what it changes. So its methods are put where
those stand that they override, and what is left is the text that one would have written in the modeling file.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple, cast

import libcst as cst
from torch import nn

from patcher.errors import CodegenError
from patcher.source import trees
from patcher.source.reading import unwrap

# How an object is pickled is no part of what it computes.
_PLUMBING = frozenset({"__reduce__", "__reduce_ex__"})
_DOCSTRING = "__doc__"


class _Member(NamedTuple):
    """One statement of the body of a class, with the comments and empty lines above it."""

    name: str
    node: Any

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, cst.FunctionDef)

    @property
    def lines(self) -> list[str]:
        return trees.code_of(self.node).strip().splitlines()

    @property
    def extends(self) -> bool:
        """Whether it is a function that calls the one that it overrides."""
        call = re.compile(rf"\bsuper\([^()]*\)\.{self.name}\b")
        return self.is_function and any(map(call.search, self.lines))

    @property
    def blank(self) -> int:
        """How many empty lines are above it."""
        return len(self.node.leading_lines) - len(trees.without_blank(self.node.leading_lines))

    def below(self, blank: int) -> _Member:
        """The same with so many empty lines above it."""
        lines = [*trees.comment_lines([], blank_before=blank), *trees.without_blank(self.node.leading_lines)]
        return self._replace(node=self.node.with_changes(leading_lines=lines))


@dataclass
class _Body:
    """A class whose body is edited statement by statement."""

    node: cst.ClassDef
    members: list[_Member]

    def __str__(self) -> str:
        members = [member.node for member in self.members] or [cst.parse_statement("pass")]
        text = trees.code_of(trees.with_members(self.node, members))
        return re.sub(r"(?m)^( *)\.\.\.  #", r"\1#", text)  # see _comment

    def named(self, name: str) -> list[_Member]:
        return [member for member in self.members if member.name == name]


def composed(original: type[nn.Module], replacement: type[nn.Module]) -> tuple[str, str]:
    """The text of a class, and of what is built in its place.

    A class whose source can't be read has a comment that says so in the place of its methods.
    """
    before, inherits = _body_of(original), issubclass(replacement, original)
    # A base of a library is none that anybody wrote for this model.
    library = {"torch", "transformers", *sys.stdlib_module_names} - {"__main__"}
    layers = [cls for cls in replacement.__mro__ if cls not in original.__mro__]
    layers = [cls for cls in layers if cls is replacement or _root(cls) not in library]
    if inherits:
        patched = _Body(before.node, list(before.members))
    else:
        base, head = _body_of(layers.pop()), _body_of(replacement).node
        patched = _Body(base.node.with_changes(name=head.name, bases=head.bases, keywords=head.keywords), base.members)
    for cls in reversed(layers):
        body = _body_of(cls)
        for name in dict.fromkeys(member.name for member in body.members if member.is_function):
            if inherits and not patched.named(name):
                # Overridden, and itself inherited: what it was is shown too.
                owner = next((base for base in original.__mro__[1:] if name in vars(base)), object)
                known = _body_of(owner).named(name) if _root(owner) not in ("torch", "builtins") else []
                before.members += (inherited := [member.below(1) for member in known])
                patched.members += inherited
        _overlay(patched, body)
    return str(before), str(patched)


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _overlay(under: _Body, over: _Body) -> None:
    """Put the members of a subclass where those stand that they override, and the others beside them."""
    under.node = under.node.with_changes(
        decorators=[*over.node.decorators, *under.node.decorators],
        leading_lines=[*over.node.leading_lines, *under.node.leading_lines],
    )
    for name in dict.fromkeys(member.name for member in over.members):
        new = over.named(name)
        old = under.named(name) if name else []
        if not old:
            _insert(under.members, new)
        elif new[0].extends and _is_rewritten(old, new):
            # It calls what it overrides: both are run, and both are shown.
            at = under.members.index(old[-1]) + 1
            under.members[at:at] = [member.below(old[0].blank or 1) for member in new]
        else:
            at = under.members.index(old[0])
            under.members = [member for member in under.members if member not in old]
            under.members[at:at] = [new[0].below(old[0].blank), *new[1:]]


def _insert(members: list[_Member], new: list[_Member]) -> None:
    """Put members that override nothing where one would write them: values in front, functions at the end."""
    if new[0].is_function:
        members += [member.below(member.blank or 1) for member in new]
        return
    at = 0
    if new[0].name != _DOCSTRING:
        at = next((i for i, member in enumerate(members) if member.is_function), len(members))
    blank = 1 if at and members[at - 1].name == _DOCSTRING else 0
    if at < len(members):
        members[at] = members[at].below(members[at].blank or 1)
    members[at:at] = [member.below(blank) for member in new]


def _is_rewritten(old: Iterable[_Member], new: Iterable[_Member]) -> bool:
    before, after = ([line for member in listed for line in member.lines] for listed in (old, new))
    return sum(line[0] in "+-" for line in difflib.ndiff(before, after)) >= len(after)


def _body_of(cls: type) -> _Body:
    try:
        node = trees.read_class(cls)
    except CodegenError:
        return _made_up(cls)
    statements, comments = trees.class_members(node)
    members = [_Member("", _comment(str(line.comment and line.comment.value))) for line in comments]
    members += [member for statement in statements for member in _members(statement)]
    # torch documents its layers on pages, which nothing here replaces.
    left_out = _PLUMBING | ({_DOCSTRING} if _root(cls) == "torch" else set())
    return _Body(node, [member for member in members if member.name not in left_out])


def _members(statement: Any) -> Iterator[_Member]:
    """A statement, by the name that it binds; one for each part of `a = 1; b = 2`; none for a type without a value."""
    if not isinstance(statement, cst.SimpleStatementLine):
        yield _Member(trees.bound_by(statement), statement)
        return
    for number, part in enumerate(statement.body):
        if isinstance(part, cst.AnnAssign) and part.value is None:
            continue
        one = statement.with_changes(
            body=[part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)],
            leading_lines=statement.leading_lines if number == 0 else [],
        )
        is_text = isinstance(part, cst.Expr) and isinstance(part.value, cst.SimpleString | cst.ConcatenatedString)
        yield _Member(_DOCSTRING if is_text else trees.bound_by(one), one)


def _made_up(cls: type) -> _Body:
    """A class without a source: of a notebook cell when it has no methods, or made by a call."""
    members = []
    for name, value in vars(cls).items():
        if name.startswith("__") and not isinstance(unwrap(value), FunctionType):
            continue
        if value is None or isinstance(value, str | int | float):
            members.append(_Member(name, cst.parse_statement(f"{name} = {value!r}")))
        else:
            comment = f"# {name}: a {type(value).__name__} whose source can't be read"
            members.append(_Member(name, _comment(comment)))
    head = cst.parse_statement(f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}): pass")
    return _Body(cast(cst.ClassDef, head), members)


def _comment(text: str) -> Any:
    """A comment in the place of a statement: libcst has it beside one, which is left out of the text."""
    return cst.parse_statement(f"...  {text}")
