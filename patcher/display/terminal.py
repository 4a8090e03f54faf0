"""What values are made of, in a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree

from patcher.display.parts import Branch, Cell, Chart, Line, Notes, Part, Table, Tone, blocks, is_filled, visible

if TYPE_CHECKING:
    from patcher.display.shown import Shown

#: The width of a page without a terminal.
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
#: How a line of a diff begins -> its style.
_DIFF = {"--- ": "bold", "+++ ": "bold", "+": "green", "-": "red", "@": "cyan", "#": "dim"}
_LIMIT = "┊"


def text(value: Shown) -> str:
    """As it is written where there are no colours."""
    written = io.StringIO()
    Console(file=written, width=WIDTH, color_system=None).print(value, crop=False)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def show(value: Shown, file: IO[str] | None) -> None:
    """Print it: in colours where that is a terminal, as its `str` elsewhere."""
    console = Console(file=file)
    if console.is_terminal:
        console.print(value, crop=False)
    else:
        console.file.write(f"{value}\n")


def rendered(headline: str, verdict: Cell | None, parts: Iterable[Part]) -> RenderableType:
    """A headline and what is below it."""
    first = _text(headline, verdict.tone if verdict is not None else "")
    return Group(first, *(each for part in parts if is_filled(part) for each in _part(part)))


def _text(text: str, tone: Tone = "") -> Text:
    return Text(visible(text), _STYLES.get(tone, ""))


def _line(line: Line) -> Text:
    return Text.assemble(*(_text(*each) if isinstance(each, Cell) else visible(each) for each in line))


def _part(part: Part) -> Iterable[RenderableType]:
    if isinstance(part, Branch):
        yield _tree(part, Tree(_line(part.label), guide_style="dim"))
    elif isinstance(part, Table):
        table = RichTable(title=part.title, title_justify="left", show_edge=False)
        for head in part.heads:
            table.add_column(Text(head), overflow="fold")
        for row in part.rows:
            table.add_row(*(_line([cell]) for cell in row))
        yield table
    elif isinstance(part, Notes):
        yield Text(part.title, "italic")
        for note in part.rows:
            yield _text(" - " + "\n   ".join(note.splitlines()), part.tone)
    elif isinstance(part, Chart):
        yield Text(visible(f"{part.title} ({_LIMIT} {part.mark})"), "italic")
        yield from _bars(part)
    else:  # lines that are neither cut nor wrapped
        lines = ["", *visible(part.text).splitlines()]
        styled = [Text(line, _DIFF.get(line[:4]) or _DIFF.get(line[:1], "")) for line in lines]
        yield Text("\n", no_wrap=True, overflow="ignore").join(styled)


def _tree(branch: Branch, tree: Tree) -> Tree:
    for note in branch.notes:
        tree.add(_line(note))
    for each in branch.below if branch.is_open else ():
        _tree(each, tree.add(_line(each.label)))
    return tree


def _bars(chart: Chart) -> Iterable[Text]:
    length = 20
    names = [visible(("  " if bar.inside else "") + bar.label) for bar in chart.rows]
    mark = round(chart.share(1.0) * length)
    for name, bar in zip(names, chart.rows, strict=True):
        line = blocks(chart.share(bar.value), length).ljust(length + 1)
        if line[mark] == " ":
            line = f"{line[:mark]}{_LIMIT}{line[mark + 1 :]}"
        yield _line([f" {name:<{max(map(len, names))}}  ", Cell(line, bar.tone), bar.text])
