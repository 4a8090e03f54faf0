"""Two classes as texts that can be compared: one as it is shipped, and its replacement.

A replacement that inherits from the class that it replaces says only what it changes. So its methods are put in the
places of those that they override; the result is the text that one would have written in the modeling file.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from torch import nn

from patcher.codegen.bridges.fused_layers import FusedLayers, ModuleText
from patcher.codegen.config import PatchConfig
from patcher.errors import CodegenError
from patcher.source.edits import Place, Text
from patcher.source.indentation import indented, moved
from patcher.source.reading import Location, read_source, start_line, unwrap

# How an object is pickled isn't a part of what it computes.
_PLUMBING = frozenset({"__reduce__", "__reduce_ex__"})
_DOCSTRING = "__doc__"
#: How a fused module is built, written to and saved: that is the same in all, and nothing of what one computes.
_MACHINERY = frozenset({"patcher.fusions.fused_module", "patcher.fusions.joined", "patcher.fusions.old_names"})


@dataclass(frozen=True, eq=False)
class _Member:
    """One statement of the body of a class.

    Attributes:
        name: what it binds, as it is written; empty if it binds nothing.
        lines: its text, and the comments above it.
        blank: how many empty lines are above.
        is_function: whether it defines a method.
        is_comment: whether it is nothing but a comment.
    """

    name: str
    lines: list[str]
    blank: int = 0
    is_function: bool = False
    is_comment: bool = False

    @property
    def extends(self) -> bool:
        """Whether it is a function that calls the one that it overrides."""
        call = re.compile(rf"\bsuper\([^()]*\)\.{self.name}\b")
        return self.is_function and any(map(call.search, self.lines))

    def below(self, blank: int) -> _Member:
        """The same with so many empty lines above it."""
        return replace(self, blank=blank)


@dataclass
class _Body:
    """A class whose body is edited statement by statement."""

    head: str
    members: list[_Member]
    comments: list[str] = field(default_factory=list)
    decorators: list[str] = field(default_factory=list)
    footer: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [line for member in self.members for line in ([""] * member.blank + member.lines)]
        return "\n".join([*self.comments, *self.decorators, self.head, *(lines or ["    pass"]), *self.footer, ""])

    def named(self, name: str) -> list[_Member]:
        return [member for member in self.members if member.name == name]


def composed(original: type[nn.Module], replacement: type[nn.Module]) -> tuple[str, str]:
    """The text of a class, and of what is built in its place.

    A class whose source can't be read has a comment that says so in the place of its methods.
    """
    before, inherits = _body_of(original), issubclass(replacement, original)
    # A base of a library is none that anybody wrote for this model.
    library = {"torch", "transformers", *_MACHINERY, *sys.stdlib_module_names} - {"__main__"}
    layers = [cls for cls in replacement.__mro__ if cls not in original.__mro__]
    layers = [cls for cls in layers if cls is replacement or not library & {_root(cls), cls.__module__}]
    if inherits:
        patched = replace(before, members=list(before.members))
    else:
        patched = replace(_body_of(layers.pop(), "__init__", "forward"), head=_body_of(replacement).head)
    for cls in reversed(layers):
        body = _body_of(cls)
        if hasattr(cls, "_joined"):
            body.members += _joined_init(original, cls)
        for name in dict.fromkeys(member.name for member in body.members if member.is_function):
            if inherits and not patched.named(name):
                # Overridden, and itself inherited: what it was is shown too.
                owner = next((base for base in original.__mro__[1:] if name in vars(base)), object)
                known = _body_of(owner).named(name) if _root(owner) not in ("torch", "builtins") else []
                before.members += (inherited := [member.below(1) for member in known])
                patched.members += inherited
        _overlay(patched, body)
    return str(before), str(patched)


def _joined_init(original: type[nn.Module], cls: Any) -> Iterator[_Member]:
    """How a class of joined projections would be constructed in a file; nothing where that can't be written."""
    described = PatchConfig(original.__module__, "of_one_class.py")
    with suppress(CodegenError):
        layers = FusedLayers(described, ModuleText(sys.modules[original.__module__]), {}, {}, lambda *_: None)
        text = re.sub(r"super\(\w+, self\)", "super()", layers.joined_init(original, cls._joined))
        yield _Member("__init__", indented(text).rstrip().split("\n"), is_function=True)


def _computing(members: list[_Member], roots: Iterable[str]) -> list[_Member]:
    """Of a class of a fusion what its forward runs: how it is built, read and saved is nothing that it computes."""
    texts = {name: "".join(line for each in members if each.name == name for line in each.lines)
             for name in (member.name for member in members if member.is_function)}  # fmt: skip
    special = {"__getitem__": "self[", "__len__": "len(self)"}
    run, waiting = set[str](), [*roots]
    while waiting:
        name = waiting.pop()
        run.add(name)
        called = {*re.findall(r"\bself\.(\w+)", texts.get(name, ""))}
        called |= {each for each, call in special.items() if call in texts.get(name, "")}
        waiting += called & texts.keys() - run
    return [member for member in members if member.name in run]


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _overlay(under: _Body, over: _Body) -> None:
    """Put the members of a subclass in the places of those that they override, and the others beside them."""
    under.decorators = [*over.decorators, *under.decorators]
    under.comments = [*over.comments, *under.comments]
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
    before, after = ([line for member in listed for line in _unindented(member)] for listed in (old, new))
    return sum(line[0] in "+-" for line in difflib.ndiff(before, after)) >= len(after)


def _unindented(member: _Member) -> list[str]:
    return "\n".join(member.lines).strip().splitlines()


def _body_of(cls: type, *roots: str) -> _Body:
    """A class; of one of a fusion what these methods of it run."""
    try:
        source = read_source(cls, cls.__qualname__, Location("", 0))
    except CodegenError:
        return _made_up(cls)
    text = Text(moved(source.text, source.indent, ""))
    node = text.tree.body[0]
    assert isinstance(node, ast.ClassDef)
    lines, first = text.text.split("\n"), start_line(node)
    body = node.body
    in_line = text.is_in_line(node)
    end = text.span(body[0])[0] if in_line else text.end_of(Place(body[0], body, node).comments(text).start - 1)
    head = text.text[text.start_of(node.lineno) : end].rstrip()
    members = [member for statement in body for member in _members(Place(statement, body, node), text, in_line)]
    members.sort(key=lambda member: not member.is_comment)  # those of what says nothing come first
    # torch documents its layers on pages, which nothing here replaces.
    left_out = _PLUMBING | ({_DOCSTRING} if _root(cls) == "torch" else set())
    members = [member for member in members if member.name not in left_out]
    if cls.__module__.startswith("patcher.fusions"):
        members = _computing(members, roots or ("forward",))
    footer = [line for line in lines[text.last_line(body[-1]) :] if line.strip()]
    return _Body(head, members, lines[: first - 1], lines[first - 1 : node.lineno - 1], footer)


def _members(place: Place, text: Text, in_line: bool) -> Iterator[_Member]:
    """A statement by the name that it binds; the comments of one that says nothing; no types without values."""
    node: Any = place.node
    above = [] if in_line else [text.lines[number - 1].rstrip("\n") for number in place.comments(text)]
    blank = 0 if in_line else place.blank(text)
    start, end = text.span(node)
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and ast.unparse(node.value) == "..."):
        said = [*map(str.strip, above), text.text[end : text.end_of(node.lineno)].strip(" \t;")]
        yield from (_Member("", [f"    {line}"], is_comment=True) for line in said if line)
        return
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return
    if text.is_alone(node) and not in_line:
        own = text.text[text.start_of(start_line(node)) : text.end_of(text.last_line(node))]
    else:
        own = f"    {text.text[start:end]}"
    name, value = getattr(node, "name", ""), node.value if isinstance(node, ast.Expr) else None
    if isinstance(node, ast.Assign):
        name = ", ".join(map(ast.unparse, node.targets))
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        name = ast.unparse(node.target)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        name = _DOCSTRING
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    yield _Member(name, [*above[blank:], *own.split("\n")], blank, function)


def _made_up(cls: type) -> _Body:
    """A class without a source: of a notebook cell when it has no methods, or made by a call."""
    members = []
    for name, value in vars(cls).items():
        if name.startswith("_") and not isinstance(unwrap(value), FunctionType):
            continue
        if value is None or isinstance(value, str | int | float):
            members.append(_Member(name, [f"    {name} = {value!r}"]))
        else:
            comment = f"# {name}: a {type(value).__name__} whose source can't be read"
            members.append(_Member(name, [f"    {comment}"]))
    return _Body(f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}):", members)
