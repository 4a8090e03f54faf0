"""Render the parts of a value in a notebook: HTML without scripts, external resources or global styles.

A viewer that drops the styles, as GitHub does, still shows lists that fold, tables and bold text.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path

from patcher.display.parts import Cell, Code, Line, ModuleNode, Notes, Part, Table, is_filled, visible
from patcher.patterns import inside

#: Up to how many characters the text of a table cell isn't wrapped.
_SHORT = 24
#: The hanging indent of wrapped lines of code, in characters.
_HANGING = 4
#: Tone -> the tag of a text; others are bold.
_TAGS = {"": "span", "dim": "span", "arrow": "span", "code": "code", "made": "code"}
#: Prefix of a line of a diff -> its class.
_DIFF = {"--- ": "head", "+++ ": "head", "+": "ins", "-": "del", "@": "gap", "#": "dim"}


@cache
def _style() -> str:
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def rendered(headline: str, verdict: Cell | None, parts: Iterable[Part]) -> str:
    """Render a headline and the parts below it."""
    name, colon, rest = headline.partition(": ")
    badge = f"{_element('strong', verdict.text, verdict.tone, 'badge')} " if verdict is not None else ""
    title = f"<b>{_escaped(name + colon)}</b>{_escaped(rest)}" if colon else _escaped(headline)
    body = "".join(map(_part, filter(is_filled, parts)))
    return f'<div class="patcher-view"><style>{_style()}</style><p class="headline">{badge}{title}</p>{body}</div>'


def _escaped(text: str) -> str:
    return escape(visible(text))


def _element(tag: str, text: str, *classes: str) -> str:
    attribute = f' class="{" ".join(filter(None, classes))}"' if any(classes) else ""
    return f"<{tag}{attribute}>{_escaped(text)}</{tag}>"


def _line(line: Line) -> str:
    return "".join(_cell(text) if isinstance(text, Cell) else _escaped(text) for text in line)


def _cell(cell: Cell) -> str:
    text = "→" if cell.tone == "arrow" else cell.text
    return _element(_TAGS.get(cell.tone, "b"), text, cell.tone) if text else ""


def _part(part: Part) -> str:
    if isinstance(part, ModuleNode):
        return f'<ul class="tree">{_branch(part)}</ul>'
    if isinstance(part, Code):
        return f'<section><pre class="code">{"".join(map(_code, part.text.splitlines()))}</pre></section>'
    if isinstance(part, Notes):
        notes = "".join(f"<li><pre>{_escaped(note)}</pre></li>" for note in part.rows)
        body = f'<ul class="notes {part.tone}">{notes}</ul>'
    else:
        body = _table(part)
    if isinstance(part, Table) and part.is_long:
        return f"<section><details><summary>{_element('b', part.title)}</summary>{body}</details></section>"
    head = f'<p class="title">{_element("b", part.title)}</p>' if part.title else ""
    return f"<section>{head}{body}</section>"


def _branch(node: ModuleNode, around: str = "") -> str:
    path = f"{inside(around)}{node.name}"
    notes = "".join(f'<br><span class="note">{_line(note)}</span>' for note in node.notes)
    label = f'<span class="module" title="{_escaped(path)}">{_line(node.label)}</span>{notes}'
    if not node.children:
        return f"<li>{label}</li>"
    opened, body = " open" if node.is_open else "", "".join(_branch(child, path) for child in node.children)
    return f"<li><details{opened}><summary>{label}</summary><ul>{body}</ul></details></li>"


def _table(part: Table) -> str:
    heads = "".join(_element("th", head, "short") for head in part.heads)
    rows = "".join(f"<tr>{''.join(map(_column, row))}</tr>" for row in part.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _column(cell: str | Cell) -> str:
    text = cell.text if isinstance(cell, Cell) else cell
    kind = ' class="short"' if len(text) <= _SHORT else ""
    return f"<td{kind}>{_line([cell])}</td>"


def _code(line: str) -> str:
    """Render a line of a diff, with a hanging indent where it is wrapped."""
    indent = len(line) - len(line[1:].lstrip()) + _HANGING
    style = f'style="padding-left:{indent}ch;text-indent:-{indent}ch"'
    kind = _DIFF.get(line[:4]) or _DIFF.get(line[:1], "same")
    return f'<span class="{kind}" {style}>{_escaped(line)}\n</span>'
