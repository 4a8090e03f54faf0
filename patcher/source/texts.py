"""Texts of source: moved to the left and to the right, compared, and made into modules."""

from __future__ import annotations

import ast
import difflib
import io
import linecache
import sys
from types import ModuleType

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


def diff_of(old: str, new: str, old_name: str, new_name: str, context: int = 3) -> str:
    """A unified diff that keeps every character, as `git apply` takes it; empty where the texts are the same.

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
    """A module in `sys.modules` that has a source and has not been run.

    >>> import inspect
    >>> module = module_of_text("made_up", "x = 1\\n", "<made up>")
    >>> exec(inspect.getsource(module), vars(module))
    >>> module.x
    1
    """
    module = ModuleType(name)
    module.__file__, module.__package__ = file, name.rpartition(".")[0]
    # Without a time of change linecache keeps it for good.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[name] = module
    return module
