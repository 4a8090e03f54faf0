"""Source texts: reindented, compared, and turned into modules."""

from __future__ import annotations

import ast
import difflib
import io
import linecache
import sys
from types import ModuleType

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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


def moved(source: str, old: str, new: str, *, docstrings: bool = True) -> str:
    """Return statements with another indentation. Strings keep every character.

    >>> moved("    def f():\\n        pass", "    ", "")
    'def f():\\n    pass'

    Args:
        source: their text, whole lines.
        old: their indentation.
        new: the new indentation.
        docstrings: whether docstrings are reindented as well.

    Raises:
        SyntaxError: if the text isn't Python.
    """
    head = ["if 1:"] if old else []
    lines = [*head, *source.split("\n")]
    tree = ast.parse("\n".join(lines))
    unchanged = in_strings(tree)
    for node in ast.walk(tree) if docstrings else ():
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            docstring = in_strings(node.body[0])
            if all(lines[number - 1].startswith(old) or not lines[number - 1].strip() for number in docstring):
                unchanged -= docstring
    for number, line in enumerate(lines, 1):
        if number not in unchanged and line.startswith(old) and line.strip() and number > len(head):
            lines[number - 1] = new + line[len(old) :]
    return "\n".join(lines[len(head) :])


def dedented(source: str) -> str:
    """Return a definition without its indentation; raises a SyntaxError if the text isn't Python."""
    old = indent_of(source)
    return moved(source, old, "", docstrings=False) if old else source


def indented(source: str) -> str:
    """Return statements as they are indented in a class; raises a SyntaxError if the text isn't Python."""
    return moved(source, "", "    ", docstrings=False)


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
