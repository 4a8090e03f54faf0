"""Source moved to the left and to the right. What is inside of a string is text, and stays."""

from __future__ import annotations

import ast

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def in_strings(tree: ast.AST) -> set[int]:
    """The lines that start inside of a string: their indentation is text."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno and node.end_lineno > node.lineno:
            inside.update(range(node.lineno + 1, node.end_lineno + 1))
    return inside


def indent_of(line: str) -> str:
    """The white space in front of a line."""
    return line[: len(line) - len(line.lstrip())]


def moved(source: str, old: str, new: str, *, docstrings: bool = True) -> str:
    """Statements as they are indented at another place. Strings keep every character.

    >>> moved("    def f():\\n        pass", "    ", "")
    'def f():\\n    pass'

    Args:
        source: their text, whole lines.
        old: the white space in front of them.
        new: the one in front of them there.
        docstrings: whether those move along.

    Raises:
        SyntaxError: it isn't Python.
    """
    head = ["if 1:"] if old else []
    lines = [*head, *source.split("\n")]
    tree = ast.parse("\n".join(lines))
    kept = in_strings(tree)
    for node in ast.walk(tree) if docstrings else ():
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            own = in_strings(node.body[0])
            if all(lines[number - 1].startswith(old) or not lines[number - 1].strip() for number in own):
                kept -= own
    for number, line in enumerate(lines, 1):
        if number not in kept and line.startswith(old) and line.strip() and number > len(head):
            lines[number - 1] = new + line[len(old) :]
    return "\n".join(lines[len(head) :])


def dedented(source: str) -> str:
    """A definition that starts at the left, whatever it was inside of.

    Raises:
        SyntaxError: it isn't Python.
    """
    old = indent_of(source)
    return moved(source, old, "", docstrings=False) if old else source


def indented(source: str) -> str:
    """Statements as they are in the body of a class.

    Raises:
        SyntaxError: it isn't Python.
    """
    return moved(source, "", "    ", docstrings=False)
