"""What values are made of, in a notebook: HTML that loads nothing, runs nothing and changes nothing around it.

Where a viewer drops the styles, as GitHub does, what remains are lists that fold, tables and words in bold.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path

from patcher.display.parts import Bar, Branch, Cell, Chart, Code, Line, Notes, Part, Table, blocks, is_filled, visible

#: A text of a table that isn't wrapped, in letters.
_SHORT = 24
#: How much further to the right than a line of code its rest begins, where it is wrapped.
_WRAPPED = 4
#: The element of a text, where it isn't bold.
_TAGS = {"": "span", "dim": "span", "arrow": "span", "code": "code", "made": "code"}
#: How a line of a diff begins -> its class.
_DIFF = {"--- ": "head", "+++ ": "head", "+": "ins", "-": "del", "@": "gap", "#": "dim"}


@cache
def _style() -> str:
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def rendered(headline: str, verdict: Cell | None, parts: Iterable[Part]) -> str:
    """A headline and what is below it."""
    name, colon, rest = headline.partition(": ")
    badge = f"{_element('strong', verdict.text, verdict.tone, 'badge')} " if verdict is not None else ""
    title = f"<b>{_escaped(name + colon)}</b>{_escaped(rest)}" if colon else _escaped(headline)
    body = "".join(map(_part, filter(is_filled, parts)))
    return f'<div class="patcher-view"><style>{_style()}</style><p class="headline">{badge}{title}</p>{body}</div>'


def _escaped(text: str) -> str:
    return escape(visible(text))


def _element(tag: str, text: str, *classes: str) -> str:
    named = f' class="{" ".join(filter(None, classes))}"' if any(classes) else ""
    return f"<{tag}{named}>{_escaped(text)}</{tag}>"


def _line(line: Line) -> str:
    return "".join(_cell(each) if isinstance(each, Cell) else _escaped(each) for each in line)


def _cell(cell: Cell) -> str:
    text = "→" if cell.tone == "arrow" else cell.text
    return _element(_TAGS.get(cell.tone, "b"), text, cell.tone) if text else ""


def _part(part: Part) -> str:
    if isinstance(part, Branch):
        return f'<ul class="tree">{_branch(part)}</ul>'
    if isinstance(part, Code):
        return f'<section><pre class="code">{"".join(map(_code, part.text.splitlines()))}</pre></section>'
    if isinstance(part, Notes):
        notes = "".join(f"<li><pre>{_escaped(note)}</pre></li>" for note in part.rows)
        body = f'<ul class="notes {part.tone}">{notes}</ul>'
    else:
        body = _chart(part) if isinstance(part, Chart) else _table(part)
    if isinstance(part, Table) and part.is_long:
        return f"<section><details><summary>{_element('b', part.title)}</summary>{body}</details></section>"
    head = f'<p class="title">{_element("b", part.title)}</p>' if part.title else ""
    return f"<section>{head}{body}</section>"


def _branch(branch: Branch) -> str:
    notes = "".join(f'<br><span class="note">{_line(note)}</span>' for note in branch.notes)
    label = f'<span class="module" title="{_escaped(branch.path)}">{_line(branch.label)}</span>{notes}'
    if not branch.below:
        return f"<li>{label}</li>"
    opened, body = " open" if branch.is_open else "", "".join(map(_branch, branch.below))
    return f"<li><details{opened}><summary>{label}</summary><ul>{body}</ul></details></li>"


def _table(part: Table) -> str:
    heads = "".join(_element("th", head, "short") for head in part.heads)
    rows = "".join(f"<tr>{''.join(map(_column, row))}</tr>" for row in part.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _column(cell: str | Cell) -> str:
    text = cell.text if isinstance(cell, Cell) else cell
    kind = ' class="short"' if len(text) <= _SHORT else ""
    return f"<td{kind}>{_line([cell])}</td>"


def _chart(chart: Chart) -> str:
    left = f'style="left:{chart.share(1.0):.1%}"'
    axis = f'<span class="axis"><span {left}>{chart.mark}</span></span>'
    rows = "".join(_bar(bar, chart.share(bar.value), f'<i class="mark" {left}></i>') for bar in chart.rows)
    heads = f"<tr><th></th><th>{axis}</th><th></th></tr>"
    return f'<table class="chart"><thead>{heads}</thead><tbody>{rows}</tbody></table>'


def _bar(bar: Bar, share: float, mark: str) -> str:
    # The blocks are seen where styles are dropped.
    drawn = f'<span class="blocks" aria-hidden="true">{blocks(share, 20)}</span>'
    drawn += f'<span class="track"><i class="bar {bar.tone}" style="width:{share:.1%}"></i>{mark}</span>'
    title, kind = _escaped(bar.label), ' class="inside"' if bar.inside else ""
    name = f'<code{kind} title="{title}">{title}</code>'
    return f"<tr><td>{name}</td><td>{drawn}</td><td>{_element('span', bar.text, 'number', bar.tone)}</td></tr>"


def _code(line: str) -> str:
    """A line of a diff; where it is wrapped, its rest is further to the right than its code."""
    wrapped = len(line) - len(line[1:].lstrip()) + _WRAPPED
    style = f'style="padding-left:{wrapped}ch;text-indent:-{wrapped}ch"'
    kind = _DIFF.get(line[:4]) or _DIFF.get(line[:1], "same")
    return f'<span class="{kind}" {style}>{_escaped(line)}\n</span>'
