r"""A file while it is edited: each definition or assignment that no edit touches is one line, parsed in no time.

In a class that is touched so are its other methods; in a function, statements that hold none of the names that are
looked for.

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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from patcher.source.modules import lines_of
from patcher.source.reading import Definition, first_line
from patcher.source.scopes import blocks, every_statement

# How code binds names of the module around it.
_GLOBAL = re.compile(r"^[ \t\f]*global\b|[:;][ \t]*global\b", re.MULTILINE)
_WALRUS = re.compile(":=")


@dataclass
class Folded:
    """A text with some of its definitions folded.

    Attributes:
        text: what is edited.
        indent: one step of the indentation of the whole text.
        mark: the comment by which a line is known that stands for a definition.
        hidden: the text behind each such line, without the last newline.
    """

    text: str
    indent: str
    mark: str
    hidden: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How the names begin that stand for statements."""
        return f"{self.mark[2:]}_"

    def hide(self, text: str) -> int:
        """Keep a text, and return the number by which it is known."""
        self.hidden.append(text)
        return len(self.hidden) - 1

    def unfold(self, text: str) -> str:
        """A text made from the folded one, with what its lines stand for where they are left as they were."""
        definition = rf"(?:(?:class|def) \w+[^\r\n]*|\w+ = \.\.\.  ){re.escape(self.mark)} (\d+)"
        line = re.compile(rf"(?:\A|(?<=[\r\n]))[ \t\f]*(?:{definition}|{self.name}(\d+))(?=[\r\n]|\Z)")
        return line.sub(lambda match: self.hidden[int(match[1] or match[2])], text)

    def fold_definitions(
        self,
        lines: list[str],
        body: Sequence[ast.stmt],
        after: int,
        kept: Collection[str],
        words: Collection[str] = (),
    ) -> list[ast.stmt]:
        """Fold the definitions of a body, and its assignments over several lines if it is that of the module.

        Args:
            lines: what the body is part of, by the numbers of the syntax tree; a line that is folded away is empty.
            body: statements.
            after: the line behind the last.
            kept: what is not folded, by name.
            words: names that must stay in sight.

        Returns:
            The statements that are left.
        """
        said, left = _said(words), list[ast.stmt]()
        for node, next_one in zip(body, _ends(body, after), strict=True):
            start, end = _start(node), node.end_lineno or node.lineno
            line = lines[start - 1]
            indent = line[: len(line) - len(line.lstrip())]
            if isinstance(node, Definition):
                name, binds = node.name, _GLOBAL
                head = f"class {name}:" if isinstance(node, ast.ClassDef) else f"def {name}():"
                # Comments behind the last statement that are indented are part of it.
                inner = re.compile(rf"{re.escape(indent)}[ \t\f]+[^\s]")
                end = max([end, *(n for n in range(end + 1, next_one) if inner.match(lines[n - 1]))])
            else:
                name, binds = _assigned(node), _WALRUS
                head = f"{name} ="
                if node.col_offset or not start < end < next_one:
                    name = ""
            segment = "".join(lines[start - 1 : end])
            if not name or name in kept or binds.search(segment) or (said and said.search(segment)):
                left.append(node)
                continue
            code = segment.rstrip("\r\n")
            stub = f"{indent}{head} ...  {self.mark} {self.hide(code)}{segment[len(code) :]}"
            lines[start - 1 : end] = [stub, *[""] * (end - start)]
        return left

    def fold_statements(
        self,
        lines: list[str],
        body: Sequence[ast.stmt],
        words: Collection[str] = (),
        indent: str = "",
        newline: str = "\n",
    ) -> None:
        """Fold statements in the functions of a body that hold none of some words.

        Args:
            lines: what the body is part of, by the numbers of the syntax tree; a line that is folded away is empty.
            body: statements.
            words: names that must stay in sight.
            indent: what every line gets in front in the file.
            newline: that of the file.
        """
        said = _said(words)
        for run in _runs(body, lines, said):
            start, end = _start(run[0]), run[-1].end_lineno or 0
            segment = "".join(lines[start - 1 : end])
            if end > start and not _GLOBAL.search(segment) and (not indent or _moves(run, lines)):
                code = segment.rstrip("\r\n")
                first = lines[start - 1]
                stub = f"{first[: len(first) - len(first.lstrip())]}{self.name}{{}}{segment[len(code) :]}"
                if indent:
                    code = "".join(indent + line if line.strip() else line for line in lines_of(code))
                stub = stub.format(self.hide(code.replace("\n", newline) if newline != "\n" else code))
                lines[start - 1 : end] = [stub, *[""] * (end - start)]


def fold(text: str, tree: ast.Module, touched: Collection[str]) -> Folded:
    """Fold what is not called by these names.

    Args:
        text: the source, with whatever newlines it has.
        tree: its syntax tree.
        touched: the names of what is edited: of definitions of the top level, and dotted ones of what is in them.
    """
    mark = "# folded"
    while mark[2:] in text:
        mark += "_"
    folded, lines = Folded(text, _indent(tree.body, text), mark), lines_of(text)
    edited: dict[str, set[str]] = {}
    for each in touched:
        name, *members = each.split(".")
        edited.setdefault(name, {"__init__"}).update(members)
    ends = _ends(tree.body, len(lines) + 1)
    for node, after in zip(tree.body, ends, strict=True):
        if isinstance(node, Definition) and node.name in edited:
            # A class that is replaced may stay under another name, and has its own renamed then.
            words = {node.name, f"Original{node.name}", f"original_{node.name}"}
            body: list[ast.stmt] = [node]
            if isinstance(node, ast.ClassDef):
                body = folded.fold_definitions(lines, node.body, after, edited[node.name], words)
            folded.fold_statements(lines, body, words)
    folded.fold_definitions(lines, tree.body, len(lines) + 1, edited)
    folded.text = "".join(lines)
    return folded


def _ends(body: Sequence[ast.stmt], after: int) -> list[int]:
    """The line that is behind each statement and what may belong to it."""
    return [*(_start(node) for node in body[1:]), after][: len(body)]


def _said(words: Collection[str]) -> re.Pattern[str] | None:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b") if words else None


def _runs(body: Sequence[ast.stmt], lines: Sequence[str], said: re.Pattern[str] | None) -> Iterator[list[ast.stmt]]:
    """Statements in functions, side by side, with none of the words that are looked for."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _runs_in(node.body, lines, said)
        else:
            for block in blocks(node):
                yield from _runs(block, lines, said)


def _runs_in(body: Sequence[ast.stmt], lines: Sequence[str], said: re.Pattern[str] | None) -> Iterator[list[ast.stmt]]:
    run: list[ast.stmt] = []
    for index, node in enumerate(body):
        start, end = _start(node), node.end_lineno or 0
        alone = start < node.lineno or not lines[start - 1][: node.col_offset].strip()
        alone = alone and (index + 1 == len(body) or _start(body[index + 1]) > end)
        if alone and not (said and said.search("".join(lines[start - 1 : end]))):
            run.append(node)
            continue
        if run:
            yield run
        run = []
        for block in blocks(node) if alone else ():
            yield from _runs_in(block, lines, said)
    if run:
        yield run


def _start(node: ast.stmt) -> int:
    return first_line(node) if isinstance(node, Definition) else node.lineno


def _assigned(node: ast.stmt) -> str:
    """The one name that a statement assigns to, but for `__all__`, whose value is looked at."""
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    return target.id if isinstance(target, ast.Name) and target.id != "__all__" else ""


def _indent(body: Sequence[ast.stmt], text: str) -> str:
    """The indentation of the first block, four spaces where there is none."""
    lines = lines_of(text)
    for node in body:
        inner = getattr(node, "body", None)
        if isinstance(inner, list) and inner[0].lineno > node.lineno:
            line = lines[_start(inner[0]) - 1]
            return line[: len(line) - len(line.lstrip())]
    return "    "


def _moves(run: Sequence[ast.stmt], lines: Sequence[str]) -> bool:
    """Whether statements are the same code with more white space in front of their lines."""
    first, last = _start(run[0]), run[-1].end_lineno or 0
    if any(line.strip("\r\n").isspace() for line in lines[first - 1 : last]):
        return False
    for part in (node for node in every_statement(run) if isinstance(node, ast.stmt)):
        if any(line.strip() and line[: part.col_offset].strip() for line in lines[part.lineno : part.end_lineno]):
            return False  # a line further to the left than its statement stays there
    if not any(each in line for each in ('"""', "'''", "\\\n") for line in lines[first - 1 : last]):
        return True  # no string goes over a line
    nodes = [node for each in run for node in ast.walk(each)]
    docstrings = {
        id(node.body[0].value)
        for node in [*nodes, ast.Module([*run], [])]
        if isinstance(node, Definition | ast.Module) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
            text = "".join(lines[node.lineno - 1 : node.end_lineno])
            quotes = text.count('"""') + text.count("'''")
            if "\\\n" in text or (quotes and (quotes != 2 or id(node) not in docstrings)):
                return False  # the indentation in it is text
    return True
