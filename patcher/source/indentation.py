"""Source moved to the left and to the right. What stands inside of a string is text, and stays."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def in_strings(tree: ast.AST) -> set[int]:
    """The lines that start inside of a string: their indentation is text."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno and node.end_lineno > node.lineno:
            inside.update(range(node.lineno + 1, node.end_lineno + 1))
    return inside


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines that start inside of a docstring."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            found |= in_strings(node.body[0])
    return found


def dedented(source: str) -> str:
    """A definition that starts at the left, whatever it was inside of.

    Raises:
        SyntaxError: it is no Python.
    """
    width = len(source) - len(source.lstrip(" "))
    if width == 0:
        return source
    inside = in_strings(ast.parse(f"if 1:\n{source}"))  # one line more at the top
    lines = source.splitlines(keepends=True)
    return "".join(
        line if number in inside or line[:width].strip() else line[width:] or "\n"
        for number, line in enumerate(lines, 2)
    )


def indented(source: str) -> str:
    """Statements as they stand in the body of a class.

    Raises:
        SyntaxError: it is no Python.
    """
    inside = in_strings(ast.parse(source))
    return "".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(source.splitlines(keepends=True), 1)
    )


def moved(source: str, old: str, new: str, unit: str) -> str:
    """A definition as it is indented at another place, docstrings included. Other strings keep every character.

    Args:
        source: its text, whole lines.
        old: the white space in front of it.
        new: the one in front of it there.
        unit: one step of indentation there.
    """
    shift = 1 if old else 0
    lines = source.split("\n")
    blocks = _Blocks([*[""] * shift, *lines], unit)
    blocks.visit(ast.parse(f"if 1:\n{source}" if old else source), old, new)
    result = []
    for number, line in enumerate(lines, 1 + shift):
        before = blocks.before(number, line)
        result.append(line if before is None or not line.strip() else blocks.known[before] + line[len(before) :])
    docstrings = [(first - shift, last - shift) for first, last in blocks.docstrings]
    for first, last in docstrings:  # of which the first line is code
        rest = lines[first:last]
        if all(line.startswith(old) for line in rest if line.strip()):
            result[first:last] = [blocks.deeper(line, old, new) if line.strip() else line for line in rest]
    return "\n".join(result)


class _Blocks:
    """How deep the lines of a definition are indented.

    Attributes:
        known: the white space in front of each block, with that in front of it at the other place.
        docstrings: their first and last lines.
    """

    def __init__(self, lines: list[str], unit: str) -> None:
        self.lines, self.unit = lines, unit
        self.step = ""  # one step of indentation
        self.known: dict[str, str] = {}
        self.docstrings: list[tuple[int, int]] = []
        self._own: dict[int, str] = {}  # of the lines that a statement has
        self._text = set[int]()

    def visit(self, tree: ast.Module, old: str, new: str) -> None:
        self._text = in_strings(tree)
        self.known[old] = new
        body = tree.body[0].body if old else tree.body  # type: ignore[attr-defined]
        self._block(body, old)

    def _block(self, block: list[ast.stmt], indent: str) -> None:
        first = block[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            text = "\n".join(self.lines[first.lineno - 1 : first.end_lineno])
            if text.count('"""') == 2 or text.count("'''") == 2:
                self.docstrings.append((first.lineno, first.end_lineno or first.lineno))
        for node in block:
            start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            self._own.update(dict.fromkeys(range(start, (node.end_lineno or start) + 1), indent))
            for inner in _inner(node):
                self._inner_block(inner, indent)

    def _inner_block(self, block: list[ast.stmt], indent: str) -> None:
        first = block[0]
        start = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))])
        line = self.lines[start - 1]
        own = line[: len(line) - len(line.lstrip())]
        if own != indent and own not in self.known:
            step = own.removeprefix(indent)
            self.step = self.step or step
            self.known[own] = self.known[indent] + (self.unit if step == self.step else step)
        self._block(block, own)

    def before(self, number: int, line: str) -> str | None:
        """The white space in front of a line that moves; None of one that is text, or further left than its block."""
        own = self._own.get(number)
        if number in self._text:
            return None
        if own is not None and not line.lstrip().startswith("#"):
            return own if line.startswith(own) else None
        return max((each for each in self.known if line.startswith(each)), key=len, default=None)

    def deeper(self, line: str, old: str, new: str) -> str:
        """A line of a docstring, each step of which is one there."""
        line, steps = line.removeprefix(old), 0
        step = self.step or "    "
        while line.startswith(step):
            line, steps = line.removeprefix(step), steps + 1
        return new + self.unit * steps + line


def _inner(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list) and block:
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body
