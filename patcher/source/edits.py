"""Changes of a source text by spans: what no span covers stays as it is, byte for byte."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from patcher.source.reading import Definition, start_line
from patcher.source.scopes import inner_blocks
from patcher.source.texts import indent_of

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_NAMED = re.compile(r"(?:async\s+)?(?:def|class)[\s\\]+")


def lines_of(text: str) -> list[str]:
    """The lines that Python counts, with their newlines: a form feed ends none, unlike in `str.splitlines`."""
    return _LINE.findall(text)


class Edit(NamedTuple):
    """What replaces the characters from `start` to `end`, which is behind the last; an insertion if both are one."""

    start: int
    end: int
    text: str


def applied(text: str, edits: Iterable[Edit]) -> str:
    """A text with some edits. What is inside of another edit goes with it.

    >>> applied("one two three", [Edit(4, 7, "2"), Edit(0, 0, "> "), Edit(5, 6, "lost")])
    '> one 2 three'
    """
    parts, at = list[str](), 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.start != edit.end, -edit.end)):
        if edit.start < at:
            assert edit.end <= at, f"edits overlap: {edit}"
            continue
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])


class Text:
    """A source text with its syntax tree, and where each node is in it.

    Positions of `ast` count the bytes of UTF-8 in a line; those here are indices of the text.
    """

    def __init__(self, text: str, tree: ast.Module | None = None) -> None:
        self.text = text
        self.tree = ast.parse(text) if tree is None else tree
        self.lines = lines_of(text)
        self._starts = list(accumulate(map(len, self.lines), initial=0))

    def position(self, line: int, column: int) -> int:
        """The index of what `ast` has at a line and a column."""
        text = self.lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: Any) -> tuple[int, int]:
        """The indices at which a node begins and ends."""
        return self.position(node.lineno, node.col_offset), self.position(node.end_lineno, node.end_col_offset)

    def code(self, node: Any) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def start_of(self, line: int) -> int:
        """The index at which a line begins."""
        return self._starts[line - 1]

    def end_of(self, line: int) -> int:
        """The index behind the last character of a line, in front of its newline."""
        return self._starts[line - 1] + len(self.lines[line - 1].rstrip("\r\n"))

    def line_break(self, line: int) -> str:
        """The newline of a line."""
        text = self.lines[line - 1]
        return text[len(text.rstrip("\r\n")) :] or "\n"

    def indent(self, line: int) -> str:
        """The white space at the beginning of a line."""
        text = self.lines[line - 1].rstrip("\r\n")
        return indent_of(text)

    def is_in_line(self, node: Any) -> bool:
        """Whether the body of a compound statement is on the line of its head."""
        first = node.body[0]
        before = self.text[self.start_of(first.lineno) : self.span(first)[0]]
        return bool(before.strip()) and not isinstance(first, Definition)

    def name_of(self, node: Definition) -> tuple[int, int]:
        """Where the name of a definition is."""
        start = self.span(node)[0]
        match = _NAMED.match(self.text, start)
        assert match is not None
        return match.end(), match.end() + len(node.name)

    def last_line(self, node: ast.AST) -> int:
        """The last line of a statement; comments behind a block that are indented as deep as it belong to it."""
        last: int = node.end_lineno  # type: ignore[attr-defined]
        if not hasattr(node, "body"):
            return last
        width = len(self.indent(node.lineno))  # type: ignore[attr-defined]
        for number in range(last + 1, len(self.lines) + 1):
            line = self.lines[number - 1]
            if line.strip() and not (line.lstrip().startswith("#") and len(self.indent(number)) > width):
                break
            last = number if line.strip() else last
        return last

    def is_alone(self, node: ast.stmt) -> bool:
        """Whether a statement has lines of its own."""
        start, end = self.span(node)
        if self.text[self.start_of(start_line(node)) : start].strip() and not isinstance(node, Definition):
            return False
        return not re.sub(r"^[ \t\f]*;?[ \t\f]*(#.*)?", "", self.text[end : self.end_of(node.end_lineno or 0)])


class Place(NamedTuple):
    """A statement, the block that it is in, and what has that block: a compound statement or the module."""

    node: ast.stmt
    block: list[ast.stmt]
    owner: Any

    @property
    def floor(self) -> int:
        """The last line above that is part of another statement; 0 for the first of a module."""
        index = self.block.index(self.node)
        if index:
            return self.block[index - 1].end_lineno or 0
        return int(getattr(self.owner, "lineno", 0))

    def comments(self, text: Text) -> range:
        """The empty lines and comments right above, but for those at the top of a file, which are about the file."""
        first = start_line(self.node)
        number, width = first - 1, len(text.indent(first))
        while number > self.floor:
            line = text.lines[number - 1]
            if line.strip() and (not line.lstrip().startswith("#") or len(text.indent(number)) > width):
                break
            number -= 1
        at_top = number == 0 and isinstance(self.owner, ast.Module)
        return range(first, first) if at_top else range(number + 1, first)

    def blank(self, text: Text) -> int:
        """How many empty lines are above, and above the comments."""
        lines = [text.lines[number - 1].strip() for number in self.comments(text)]
        return next((index for index, line in enumerate(lines) if line), len(lines))


def places(block: list[ast.stmt], owner: Any) -> Iterator[Place]:
    """The statements of a block and of the `if`, `try`, `with` and loops in it, but not of definitions."""
    for node in block:
        yield Place(node, block, owner)
        if not isinstance(node, Definition):
            for inner, head in inner_blocks(node):
                yield from places(inner, head)


def definitions(block: list[ast.stmt], owner: Any) -> list[Place]:
    """The classes and functions among them."""
    return [place for place in places(block, owner) if isinstance(place.node, Definition)]


def removals(text: Text, removed: Collection[ast.stmt], block: list[ast.stmt], owner: Any) -> Iterator[Edit]:
    """The edits that remove statements, with the comments above them; a block of which nothing is left passes."""
    found = [place for place in places(block, owner) if place.node in removed]
    for place in found:
        whole = not isinstance(place.owner, ast.Module) and all(node in removed for node in place.block)
        start, end = text.span(place.node)
        if whole and place.node is place.block[0]:
            # Empty lines and comments above go with the statement, the line of the block stays.
            lines = place.comments(text) if text.is_alone(place.node) else range(0)
            if lines:
                yield Edit(text.start_of(lines[0]), text.start_of(lines[-1] + 1), "")
            first = start_line(place.node)
            at = text.start_of(first) + len(text.indent(first)) if isinstance(place.node, Definition) else start
            yield Edit(at, end, "pass")
        elif text.is_alone(place.node):
            first = next(iter(place.comments(text)), start_line(place.node))
            last = text.last_line(place.node)
            yield Edit(text.start_of(first), text.start_of(last + 1) if last < len(text.lines) else len(text.text), "")
        else:
            index = place.block.index(place.node)
            beside = place.block[index + 1 : index + 2]
            if beside and beside[0].lineno == place.node.end_lineno:
                yield Edit(start, text.span(beside[0])[0], "")
            else:
                yield Edit(text.span(place.block[index - 1])[1], end, "")


def without(text: Text, elements: Sequence[Any], removed: Collection[Any], close: int) -> list[Edit]:
    """The edits that remove some elements of a comma-separated list, but not all.

    Args:
        text: the source.
        elements: the nodes of all elements.
        removed: some of them.
        close: where the list ends, in front of its bracket.
    """
    edits, spans = list[Edit](), [text.span(element) for element in elements]
    last = max(index for index, element in enumerate(elements) if element not in removed)
    for index in range(last):
        if elements[index] in removed:
            edits.append(Edit(spans[index][0], spans[index + 1][0], ""))
    if last < len(elements) - 1:
        own, tail = text.text[spans[last][1] : spans[last + 1][0]], text.text[spans[-1][1] : close]
        if "\n" in own and "\n" in tail and tail.lstrip().startswith(","):
            # A comment behind what stays does too; the line of the bracket is the one that it was.
            line, newline, _ = own.partition("\n")
            tail = line + newline + tail.rpartition("\n")[2]
        edits.append(Edit(spans[last][1], close, tail))
    return edits
