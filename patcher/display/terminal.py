"""What values are made of, in a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree

from patcher.display.parts import Bar, Cell, Chart, Code, Notes, Part, Table, Tone
from patcher.display.tree import ModuleNode, Weights, in_rows
from patcher.display.visible import visible
from patcher.patterns import compress, without_numbers

if TYPE_CHECKING:
    from patcher.display.shown import Shown

#: The width of a page without a terminal.
WIDTH = 119
_STYLES: dict[Tone, str] = {
    "": "",
    "good": "green",
    "bad": "bold red",
    "warning": "yellow",
    "changed": "bold cyan",
    "dim": "dim",
}
_BAR = 40
_LIMIT = "┊"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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
    tone: Tone = verdict.tone if verdict is not None else ""
    return Group(_text(headline, tone), *(each for part in parts for each in _part(part)))


def _text(text: str, tone: Tone = "") -> Text:
    return Text(visible(text), _STYLES[tone])


def _part(part: Part) -> Iterable[RenderableType]:
    if isinstance(part, ModuleNode):
        yield _branch(part, Tree(_label(part), guide_style="dim"))
    elif isinstance(part, Table):
        yield _table(part)
    elif isinstance(part, Notes):
        yield Text(part.title, "italic")
        for note in part.texts:
            first, *rest = visible(note).splitlines() or [""]
            yield Text("\n".join([f" - {first}", *(f"   {line}" for line in rest)]), _STYLES[part.tone])
    elif isinstance(part, Chart):
        yield Text(visible(f"{part.title} ({_LIMIT} {part.mark})"), "italic")
        yield from _bars(part)
    else:
        yield unified([part])


# --- the tree


def _branch(node: ModuleNode, branch: Tree) -> Tree:
    for function, becomes in node.functions:
        branch.add(_becomes("calls ", [function], [becomes]))
    for weights in node.weights:
        branch.add(_weights(weights))
    if node.reason:
        branch.add(_text(f"not fused: {node.reason}", "warning"))
    if node.is_open:
        for row in in_rows(node.children):
            if len(row) > 1:
                branch.add(_text(", ".join(each.name for each in row), "dim"))
            else:
                _branch(row[0], branch.add(_label(row[0])))
    return branch


def _label(node: ModuleNode) -> Text:
    quiet: Tone = "" if node.stands_out or node.is_open else "dim"
    label = Text.assemble(_text(node.name, quiet), "  " if node.name else "", _text(node.was, "dim"))
    if node.stands_out:
        label.stylize("bold", 0, len(visible(node.name)))
    if node.becomes:
        label.append(" -> ").append_text(_text(node.becomes, "changed"))
    return label


def _weights(weights: Weights) -> Text:
    if weights.what == "converted":
        return _becomes("", weights.keys, weights.parameters, f"  {weights.operations}")
    tone: Tone = "dim" if weights.what in ("new", "dropped") else "bad"
    names = ", ".join(weights.parameters or weights.keys)
    return _text(f"{weights.what}: {names}{f': {weights.conversion}' if weights.conversion else ''}", tone)


def _becomes(before: str, old: Iterable[str], new: Iterable[str], after: str = "") -> Text:
    changed = _text(", ".join(new), "changed")
    return Text.assemble(before, _text(", ".join(old)), " -> ", changed, _text(after, "dim"))


# --- tables, charts and code


def _table(part: Table) -> RichTable:
    table = RichTable(title=part.title, title_justify="left", show_edge=False)
    for head in part.heads:
        table.add_column(Text(head), overflow="fold")
    for row in part.rows:
        table.add_row(*(_text(*cell) if isinstance(cell, Cell) else _text(cell) for cell in row))
    return table


def _bars(chart: Chart) -> Iterable[Text]:
    runs = [(list(run), key) for key, run in groupby(chart.bars, partial(_seen, chart))]
    names = [visible(("  " if run[0].inside else "") + compress(bar.label for bar in run)[0]) for run, _ in runs]
    width = max(map(len, names))
    length = _length(chart)
    allowed = round(chart.share(chart.allowed) * length)
    for name, (run, (drawn, *_)) in zip(names, runs, strict=True):
        worst = max(run, key=lambda bar: bar.value)
        line = drawn.ljust(length + 1)
        if line[allowed] == " ":
            line = f"{line[:allowed]}{_LIMIT}{line[allowed + 1 :]}"
        note = _text(f" <- {worst.note}" if worst.note else "", "bad")
        yield Text.assemble(f" {name:<{width}}  ", _text(line, chart.tone(worst)), f"{chart.number(worst):<8}", note)


def _length(chart: Chart) -> int:
    return _BAR // 2 if chart.is_share else _BAR  # beside shares there is more to say


def _seen(chart: Chart, bar: Bar) -> tuple[str, Tone, str, bool, str]:
    """What is seen of a bar, but for the number of its layer: those in a row that look alike are one."""
    length = _length(chart)
    drawn = blocks(round(chart.share(bar.value) * length) / length, length)
    label = bar.label if chart.is_share else without_numbers(bar.label)
    return drawn, chart.tone(bar), label, bar.inside, bar.note


def blocks(share: float, length: int) -> str:
    """A bar of block characters.

    >>> blocks(0.3, 4)
    '█▎'
    """
    eighths = round(share * length * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).strip()


_KINDS = {"+": "green", "-": "red", "@": "cyan"}


def unified(parts: Iterable[Code]) -> Text:
    """Unified diffs, whose lines are neither cut nor wrapped."""
    together = Text("\n", no_wrap=True, overflow="ignore")
    return together.join(line for number, part in enumerate(parts) for line in _unified(part, number))


def _unified(part: Code, number: int) -> Iterable[Text]:
    if number:
        yield Text()
    yield _text(f"# {part.where}", "dim")
    if not part.diff:
        yield _text(f"# {part.was} -> {part.becomes}: the same code", "dim")
    for place, line in enumerate(part.diff.splitlines()):
        yield Text(visible(line), "bold" if place < 2 else _KINDS.get(line[:1], ""))
