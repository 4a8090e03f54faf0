"""Render the parts of a value in a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree

from patcher.display.parts import Cell, Line, ModuleNode, Notes, Part, Table, Tone, is_filled, visible

if TYPE_CHECKING:
    from patcher.display.shown import Displayable

#: The width of the output if it isn't a terminal.
WIDTH = 119
_STYLES: dict[Tone, str] = {
    "good": "green",
    "bad": "bold red",
    "warning": "yellow",
    "changed": "bold cyan",
    "made": "bold cyan",
    "dim": "dim",
    "name": "bold",
}
#: Prefix of a line of a diff -> its style.
_DIFF = {"--- ": "bold", "+++ ": "bold", "+": "green", "-": "red", "@": "cyan", "#": "dim"}


def text(value: Displayable) -> str:
    """Return a value as text without colours."""
    output = io.StringIO()
    Console(file=output, width=WIDTH, color_system=None).print(value, crop=False)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def show(value: Displayable, file: IO[str] | None) -> None:
    """Print a value: in colours in a terminal, as its `str` elsewhere."""
    console = Console(file=file)
    if console.is_terminal:
        console.print(value, crop=False)
    else:
        encoding = getattr(console.file, "encoding", None) or "utf-8"  # in which a frame may not exist
        console.file.write(f"{value}\n".encode(encoding, "replace").decode(encoding))


def rendered(headline: str, verdict: Cell | None, parts: Iterable[Part]) -> RenderableType:
    """Render a headline and the parts below it."""
    first = _text(headline, verdict.tone if verdict is not None else "")
    return Group(first, *(renderable for part in parts if is_filled(part) for renderable in _part(part)))


def _text(text: str, tone: Tone = "") -> Text:
    return Text(visible(text), _STYLES.get(tone, ""))


def _line(line: Line) -> Text:
    return Text.assemble(*(_text(*text) if isinstance(text, Cell) else visible(text) for text in line))


def _part(part: Part) -> Iterable[RenderableType]:
    if isinstance(part, ModuleNode):
        yield _tree(part, Tree(_line(part.label), guide_style="dim"))
    elif isinstance(part, Table):
        table = RichTable(title=_text(part.title), title_justify="left", show_edge=False)
        for head in part.heads:
            table.add_column(Text(head), overflow="fold")
        for row in part.rows:
            table.add_row(*(_line([cell]) for cell in row))
        yield table
    elif isinstance(part, Notes):
        yield Text(part.title, "italic")
        for note in part.rows:
            yield _text(" - " + "\n   ".join(note.splitlines()), part.tone)
    else:  # lines of code are neither cut nor wrapped
        lines = ["", *visible(part.text).splitlines()]
        styled = [Text(line, _DIFF.get(line[:4]) or _DIFF.get(line[:1], "")) for line in lines]
        yield Text("\n", no_wrap=True, overflow="ignore").join(styled)


def _tree(node: ModuleNode, tree: Tree) -> Tree:
    for note in node.notes:
        tree.add(_line(note))
    for child in node.children if node.is_open else ():
        _tree(child, tree.add(_line(child.label)))
    return tree
