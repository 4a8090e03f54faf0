"""How the values that tell what happened are shown: `Report`, `Plan`, `Verification`, `Diff`."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from patcher.patterns import compress


class Table(NamedTuple):
    """One titled table: the heads of its columns, and its rows."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Shown:
    """A frozen dataclass of tuples that is read in a terminal, in Jupyter and as JSON.

    A subclass says what is to be seen: one line, and tables; those without rows are left out.
    """

    def _headline(self) -> str:
        raise NotImplementedError

    def _tables(self) -> Iterable[Table]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, for JSON."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        written = io.StringIO()
        console = Console(file=written, width=119, color_system=None)
        console.print(Text(self._headline()))
        for title, heads, rows in self._filled():
            table = RichTable(title=title, title_justify="left", show_edge=False)
            for head in heads:
                table.add_column(Text(head), overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(table)
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())

    def _repr_html_(self) -> str:
        def row(kind: str, cells: Iterable[str]) -> str:
            inside = "".join(f"<{kind} style='text-align:left'>{html.escape(cell)}</{kind}>" for cell in cells)
            return f"<tr>{inside}</tr>"

        parts = [f"<p><b>{html.escape(self._headline())}</b></p>"]
        for title, heads, rows in self._filled():
            body = "".join(row("td", cells) for cells in rows)
            parts.append(
                f"<p>{html.escape(title)}</p><table><thead>{row('th', heads)}</thead><tbody>{body}</tbody></table>"
            )
        return "".join(parts)

    def _filled(self) -> Iterable[Table]:
        return (table for table in self._tables() if table.rows)


def patched_tables(
    told: Any, takes: str, conversions: Iterable[tuple[str, str, str]], weights: Iterable[tuple[str, Iterable[str]]]
) -> Iterator[Table]:
    """The tables of a `Report` and of a `Plan`.

    Args:
        told: either of them.
        takes: the head of the last column of conversions.
        conversions: (how it came there, conversion, what it does) of those that aren't dropped.
        weights: (what they are, names).
    """
    if len(told.patchers) > 1:  # who wins: the first row
        yield Table("Patchers", ("in force by", "patcher"), [(origin, text) for text, origin in told.patchers])
    yield Table("Replaced", ("module", "was", "is"), folded(told.replaced))
    yield Table("Fused", ("module", "was", "is"), folded(told.fused))
    yield Table("Not fused", ("module", "reason"), folded(told.refused))
    functions: list[tuple[str, ...]] = [(name, new, ", ".join(callers)) for name, new, callers in told.functions]
    yield Table("Functions", ("function", "is", "called by"), functions)
    dropped = [
        ("dropped", text, f"by {filtered!r}" if filtered else "an added one takes its tensors")
        for text, filtered in told.conversions_dropped
    ]
    yield Table("Conversions", ("", "conversion", takes), [*dropped, *conversions])
    yield Table("Weights", ("", "name"), [(what, name) for what, names in weights for name in compress(names)])


def counted(told: Any) -> str:
    """How many modules and functions a `Report` or a `Plan` tells of: `2 modules`, `2 modules and 1 function`."""
    modules, functions = len(told.replaced) + len(told.fused), len(told.functions)
    parts = [f"{modules} module{'' if modules == 1 else 's'}"] if modules or not functions else []
    parts += [f"{functions} function{'' if functions == 1 else 's'}"] if functions else []
    return " and ".join(parts)


def folded(rows: Iterable[tuple[Any, ...]], root: str = "(the model)") -> list[tuple[Any, ...]]:
    """Rows that begin with a path and say the same of several layers, as one."""
    by_rest: dict[tuple[Any, ...], list[str]] = {}
    for path, *rest in rows:
        by_rest.setdefault(tuple(rest), []).append(path)
    return [(path or root, *rest) for rest, paths in by_rest.items() for path in compress(paths)]


def _plain(value: Any) -> Any:
    if isinstance(value, Shown):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
