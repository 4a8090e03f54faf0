"""Source texts: edited by spans, so that text that no span covers stays byte-identical, reindented and compared."""

from __future__ import annotations

import ast
import difflib
import io
import linecache
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

from patcher.source.scopes import Definition, inner_blocks, start_line

#: A line as Python counts them, with its newline: unlike for `str.splitlines`, a form feed ends none.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_NAMED = re.compile(r"(?:async\s+)?(?:def|class)[\s\\]+")


def in_strings(tree: ast.AST) -> set[int]:
    """Return the lines that start inside of a string: their indentation is part of it."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno:
            lines.update(range(node.lineno + 1, node.end_lineno + 1))
    return lines


def indent_of(line: str) -> str:
    """Return the white space at the start of a line."""
    return line[: len(line) - len(line.lstrip())]


def dedented(source: str) -> str:
    """Return a definition without its indentation. Strings keep every character, except docstrings.

    >>> dedented("    def f():\\n        pass")
    'def f():\\n    pass'

    Raises:
        SyntaxError: if the text isn't Python.
    """
    old = indent_of(source)
    return _moved(source, old, "") if old else source


def indented(source: str, indent: str = "    ") -> str:
    """Return statements with an indentation. Strings keep every character, except docstrings.

    Raises:
        SyntaxError: if the text isn't Python.
    """
    return _moved(source, "", indent)


def _moved(source: str, old: str, new: str) -> str:
    head = ["if 1:"] if old else []
    lines = [*head, *source.split("\n")]
    tree = ast.parse("\n".join(lines))
    unchanged = in_strings(tree)
    for node in ast.walk(tree):
        if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
            docstring = in_strings(node.body[0])
            if all(lines[number - 1].startswith(old) or not lines[number - 1].strip() for number in docstring):
                unchanged -= docstring
    for number, line in enumerate(lines, 1):
        if number not in unchanged and line.startswith(old) and line.strip() and number > len(head):
            lines[number - 1] = new + line[len(old) :]
    return "\n".join(lines[len(head) :])


def diff_of(old: str, new: str, old_name: str, new_name: str, context: int = 3) -> str:
    """Return a unified diff that keeps every character, for `git apply`; "" if the texts are equal.

    >>> print(diff_of("one\\ntwo", "one\\n2\\n", "a", "b"), end="")
    --- a
    +++ b
    @@ -1,2 +1,2 @@
     one
    -two
    \\ No newline at end of file
    +2
    """
    before, after = (io.StringIO(text, newline="\n").readlines() for text in (old, new))
    lines = difflib.unified_diff(before, after, old_name, new_name, n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def module_of_text(name: str, text: str, file: str) -> ModuleType:
    """Return a new module in `sys.modules` that has a source and hasn't been executed.

    >>> import inspect
    >>> module = module_of_text("made_up", "x = 1\\n", "<made up>")
    >>> exec(inspect.getsource(module), vars(module))
    >>> module.x
    1
    """
    module = ModuleType(name)
    module.__file__, module.__package__ = file, name.rpartition(".")[0]
    # Without a modification time linecache never drops it.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[name] = module
    return module


class Edit(NamedTuple):
    """The text that replaces the characters from `start` up to `end`; an insertion if the two are equal."""

    start: int
    end: int
    text: str


def newline_of(text: str) -> str:
    """Return the newline of most lines of a text."""
    return "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"


def applied(text: str, edits: Iterable[Edit]) -> str:
    """Return a text with edits applied, whose newlines become those of the text. An edit inside of another is dropped.

    >>> applied("one two three", [Edit(4, 7, "2"), Edit(0, 0, "> "), Edit(5, 6, "lost")])
    '> one 2 three'
    """
    parts, position, newline = list[str](), 0, newline_of(text)
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.start != edit.end, -edit.end)):
        if edit.start < position:
            assert edit.end <= position, f"edits overlap: {edit}"
            continue
        new = edit.text if newline == "\n" else edit.text.replace("\r\n", "\n").replace("\n", newline)
        parts += [text[position : edit.start], new]
        position = edit.end
    return "".join([*parts, text[position:]])


class Text:
    """A source text with its syntax tree, and the positions of nodes.

    Positions of `ast` count the UTF-8 bytes of a line; those here are indices into the text.
    """

    def __init__(self, text: str, tree: ast.Module | None = None) -> None:
        self.text = text
        self.tree = ast.parse(text) if tree is None else tree
        self.lines: list[str] = _LINE.findall(text)
        self._starts = list(accumulate(map(len, self.lines), initial=0))

    def position(self, line: int, column: int) -> int:
        """Return the index of a line and a column of `ast`."""
        text = self.lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: Any) -> tuple[int, int]:
        """Return the indices at which a node starts and ends."""
        return self.position(node.lineno, node.col_offset), self.position(node.end_lineno, node.end_col_offset)

    def code(self, node: Any) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def start_of(self, line: int) -> int:
        """Return the index at which a line starts."""
        return self._starts[line - 1]

    def end_of(self, line: int) -> int:
        """Return the index at which a line ends, before its newline."""
        return self._starts[line - 1] + len(self.lines[line - 1].rstrip("\r\n"))

    def indent(self, line: int) -> str:
        """Return the white space at the start of a line."""
        return indent_of(self.lines[line - 1].rstrip("\r\n"))

    def is_in_line(self, node: Any) -> bool:
        """Whether the body of a compound statement is on its first line."""
        first = node.body[0]
        before = self.text[self.start_of(first.lineno) : self.span(first)[0]]
        return bool(before.strip()) and not isinstance(first, Definition)

    def name_of(self, node: Definition) -> tuple[int, int]:
        """Return the indices at which the name of a definition starts and ends."""
        start = self.span(node)[0]
        match = _NAMED.match(self.text, start)
        assert match is not None
        return match.end(), match.end() + len(node.name)

    def last_line(self, node: ast.AST) -> int:
        """Return the last line of a statement; comments after a block that are indented like it belong to it."""
        last: int = node.end_lineno  # type: ignore[attr-defined]
        if not hasattr(node, "body"):
            return last
        width = len(self.indent(node.lineno))  # type: ignore[attr-defined]
        for number, line in enumerate(self.lines[last:], last + 1):
            if line.strip() and not (line.lstrip().startswith("#") and len(self.indent(number)) > width):
                break
            last = number if line.strip() else last
        return last

    def is_alone(self, node: ast.stmt) -> bool:
        """Whether no other statement is on the lines of a statement."""
        start, end = self.span(node)
        if self.text[self.start_of(start_line(node)) : start].strip() and not isinstance(node, Definition):
            return False
        return not re.sub(r"^[ \t\f]*;?[ \t\f]*(#.*)?", "", self.text[end : self.end_of(node.end_lineno or 0)])


class Place(NamedTuple):
    """A statement, its block, and the owner of that block: a compound statement or the module."""

    node: ast.stmt
    block: list[ast.stmt]
    owner: Any

    @property
    def name(self) -> str:
        """The name of a definition, "" for other statements."""
        return str(getattr(self.node, "name", ""))

    @property
    def bound_name(self) -> str:
        """The one name that a definition or an assignment binds, "" for other statements."""
        targets = self.node.targets if isinstance(self.node, ast.Assign) else [getattr(self.node, "target", None)]
        is_assignment = isinstance(self.node, ast.Assign | ast.AnnAssign | ast.AugAssign) and len(targets) == 1
        return targets[0].id if is_assignment and isinstance(targets[0], ast.Name) else self.name

    def comments(self, text: Text) -> range:
        """Return the blank lines and comments right above; none at the top of a file, as they are about it."""
        first, index = start_line(self.node), self.block.index(self.node)
        previous = self.block[index - 1].end_lineno if index else getattr(self.owner, "lineno", None)
        number, width = first - 1, len(text.indent(first))
        while number > (previous or 0):
            line = text.lines[number - 1]
            if line.strip() and (not line.lstrip().startswith("#") or len(text.indent(number)) > width):
                break
            number -= 1
        at_top = number == 0 and isinstance(self.owner, ast.Module)
        return range(first, first) if at_top else range(number + 1, first)

    def blank_lines(self, text: Text) -> int:
        """Return how many blank lines are above it and its comments."""
        lines = [text.lines[number - 1].strip() for number in self.comments(text)]
        return next((index for index, line in enumerate(lines) if line), len(lines))


def places(owner: Any) -> Iterator[Place]:
    """Yield the statements of a module, a class or a guard, and of the `if`, `try`, `with` and loops in it."""
    for block, head in inner_blocks(owner):
        for node in block:
            yield Place(node, block, head)
            if not isinstance(node, Definition):
                yield from places(node)


def definitions(owner: Any) -> list[Place]:
    """Return the classes and functions among `places`."""
    return [place for place in places(owner) if isinstance(place.node, Definition)]


def removals(text: Text, removed: Collection[ast.stmt]) -> Iterator[Edit]:
    """Yield the edits that remove statements and the comments above them; an emptied block becomes `pass`."""
    for place in [place for place in places(text.tree) if place.node in removed]:
        is_emptied = not isinstance(place.owner, ast.Module) and all(node in removed for node in place.block)
        start, end = text.span(place.node)
        if is_emptied and place.node is place.block[0]:
            # Blank lines and comments above go with the statement, the line of the block stays.
            lines = place.comments(text) if text.is_alone(place.node) else range(0)
            if lines:
                yield Edit(text.start_of(lines[0]), text.start_of(lines[-1] + 1), "")
            first = start_line(place.node)
            if isinstance(place.node, Definition):
                start = text.start_of(first) + len(text.indent(first))  # of its decorators
            yield Edit(start, end, "pass")
        elif text.is_alone(place.node):
            first = next(iter(place.comments(text)), start_line(place.node))
            last = text.last_line(place.node)
            yield Edit(text.start_of(first), text.start_of(last + 1) if last < len(text.lines) else len(text.text), "")
        else:
            index = place.block.index(place.node)
            following = place.block[index + 1 : index + 2]
            if following and following[0].lineno == place.node.end_lineno:
                yield Edit(start, text.span(following[0])[0], "")
            else:
                line = place.node.lineno
                kept = [node for node in place.block[:index] if node not in removed and node.end_lineno == line]
                yield Edit(text.span(kept[-1])[1] if kept else start, end, "")


def listed(text: Text, elements: Sequence[Any], kept: Sequence[Any]) -> Edit:
    """Return the edit that leaves some elements of a comma-separated list; comments between its elements are lost."""
    (start, _), (_, end) = text.span(elements[0]), text.span(elements[-1])
    first, last = elements[0].lineno, elements[-1].lineno
    separator = ", " if first == last else f",\n{text.indent(last)}"
    return Edit(start, end, separator.join(map(text.code, kept)))
