"""Source moved to the left and to the right. What stands inside of a string is text, and stays."""

from __future__ import annotations

import ast


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
