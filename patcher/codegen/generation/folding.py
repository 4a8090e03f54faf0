r"""A file while it is edited: each definition that no edit touches is one line, which is parsed in no time.

>>> text = "class A:\n    x = 1\n\n\ndef f(x):\n    return x\n"
>>> folded = fold(text, ast.parse(text), touched={"f"})
>>> print(folded.text)
class A: ...  # folded 0
<BLANKLINE>
<BLANKLINE>
def f(x):
    return x
<BLANKLINE>
>>> folded.unfold(folded.text) == text
True
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from patcher.source.modules import lines_of
from patcher.source.reading import Definition, first_line

_INDENTED = re.compile(r"[ \t\f]+[^\s]")
_GLOBAL = re.compile(r"^[ \t\f]*global\b|[:;][ \t]*global\b", re.MULTILINE)


@dataclass(frozen=True)
class Folded:
    """A text with some of its definitions folded.

    Attributes:
        text: what is edited.
        indent: one step of the indentation of the whole text.
        hidden: the definitions that it holds one line of each, without the last newline.
        mark: the comment by which that line is known.
    """

    text: str
    indent: str
    hidden: tuple[str, ...]
    mark: str

    def unfold(self, text: str) -> str:
        """A text made from the folded one, with the definitions whose lines are left as they were."""
        line = re.compile(rf"(?:\A|(?<=[\r\n]))(?:class|def) \w+[^\r\n]*{re.escape(self.mark)} (\d+)(?=[\r\n]|\Z)")
        return line.sub(lambda match: self.hidden[int(match[1])], text)


def fold(text: str, tree: ast.Module, touched: Collection[str]) -> Folded:
    """Fold the definitions of the top level that are not called by these names.

    Args:
        text: the source, with whatever newlines it has.
        tree: its syntax tree.
        touched: the names of what is edited.
    """
    mark = "# folded"
    while mark in text:
        mark += "_"
    lines = lines_of(text)
    hidden: list[str] = []
    ends = [*(_start(node) for node in tree.body[1:]), len(lines) + 1]
    for node, after in zip(tree.body, ends, strict=False):
        if not isinstance(node, Definition) or node.name in touched:
            continue
        start, end = first_line(node), node.end_lineno or node.lineno
        # Comments behind the last statement that are indented are part of it.
        end = max([end, *(n for n in range(end + 1, after) if _INDENTED.match(lines[n - 1]))])
        segment = "".join(lines[start - 1 : end])
        if _GLOBAL.search(segment):
            continue  # binds names of the module
        code = segment.rstrip("\r\n")
        head = f"class {node.name}:" if isinstance(node, ast.ClassDef) else f"def {node.name}():"
        lines[start - 1 : end] = [f"{head} ...  {mark} {len(hidden)}{segment[len(code) :]}", *[""] * (end - start)]
        hidden.append(code)
    return Folded("".join(lines), _indent(tree.body, text), tuple(hidden), mark)


def _start(node: ast.stmt) -> int:
    return first_line(node) if isinstance(node, Definition) else node.lineno


def _indent(body: Sequence[ast.stmt], text: str) -> str:
    """The indentation of the first block, four spaces where there is none."""
    lines = lines_of(text)
    for node in body:
        inner = getattr(node, "body", None)
        if isinstance(inner, list) and inner[0].lineno > node.lineno:
            line = lines[_start(inner[0]) - 1]
            return line[: len(line) - len(line.lstrip())]
    return "    "
