"""What values are made of, in a notebook: HTML that loads nothing, runs nothing and changes nothing around it.

Where a viewer drops the styles, as GitHub does, what remains are lists that fold, tables and words in bold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from pathlib import Path

from patcher.display.parts import Bar, Cell, Chart, Code, Notes, Part, Table
from patcher.display.side_by_side import Line, Row, rows_of
from patcher.display.terminal import blocks
from patcher.display.tree import ModuleNode, Weights, in_rows
from patcher.display.visible import visible
from patcher.patterns import inside

#: A text of a table that isn't wrapped, in letters.
_SHORT = 24
#: How much further to the right than a line of code its rest begins, where it is wrapped.
_WRAPPED = 4


@cache
def _style() -> str:
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def rendered(headline: str, verdict: Cell | None, parts: Iterable[Part]) -> str:
    """A headline and what is below it."""
    name, colon, rest = headline.partition(": ")
    badge = f"{_element('strong', verdict.text, verdict.tone, 'badge')} " if verdict is not None else ""
    title = f"<b>{_escaped(name + colon)}</b>{_escaped(rest)}" if colon else _escaped(headline)
    body = "".join(_part(part) for part in parts)
    return f'<div class="patcher-view"><style>{_style()}</style><p class="headline">{badge}{title}</p>{body}</div>'


def _escaped(text: str) -> str:
    return escape(visible(text))


def _element(tag: str, text: str, *classes: str) -> str:
    named = f' class="{" ".join(filter(None, classes))}"' if any(classes) else ""
    return f"<{tag}{named}>{_escaped(text)}</{tag}>"


def _titled(title: str, body: str) -> str:
    head = f'<p class="title">{_element("b", title)}</p>' if title else ""
    return f"<section>{head}{body}</section>"


def _part(part: Part) -> str:
    if isinstance(part, ModuleNode):
        return f'<ul class="tree">{_item(part, "")}</ul>'
    if isinstance(part, Table):
        if part.is_long:
            return _titled("", f"<details><summary>{_element('b', part.title)}</summary>{_table(part)}</details>")
        return _titled(part.title, _table(part))
    if isinstance(part, Notes):
        notes = "".join(f"<li><pre>{_escaped(note)}</pre></li>" for note in part.texts)
        return _titled(part.title, f'<ul class="notes {part.tone}">{notes}</ul>')
    if isinstance(part, Chart):
        return _titled(part.title, _chart(part))
    return _code(part)


# --- the tree


def _item(node: ModuleNode, path: str) -> str:
    path = inside(path) + node.name
    notes = "".join(_notes(node))
    body = "".join(_row(row, path) for row in in_rows(node.children))
    label = _label(node, path)
    if not body:
        return f"<li>{label}{notes}</li>"
    opened = " open" if node.is_open else ""
    return f"<li><details{opened}><summary>{label}{notes}</summary><ul>{body}</ul></details></li>"


def _row(row: list[ModuleNode], path: str) -> str:
    items = "".join(_item(node, path) for node in row)
    if len(row) == 1:
        return items
    names = _element("span", ", ".join(node.name for node in row), "quiet")
    return f"<li><details><summary>{names}</summary><ul>{items}</ul></details></li>"


def _label(node: ModuleNode, path: str) -> str:
    name, was = _element("code", node.name, "name"), _element("span", node.was, "class")
    if node.stands_out:
        name = f"<b>{name}</b>"
    if node.becomes:
        was += f' <span class="arrow">→</span> {_element("strong", node.becomes, "changed")}'
    kind = "module" if node.stands_out or node.is_open else "module quiet"
    return f'<span class="{kind}" title="{_escaped(path)}">{f"{name} " if node.name else ""}{was}</span>'


def _notes(node: ModuleNode) -> Iterator[str]:
    for function, becomes in node.functions:
        yield _note("calls " + _becomes([function], [becomes]))
    for weights in node.weights:
        yield _note(_weights(weights))
    if node.reason:
        yield _note(f"{_element('b', 'not fused:', 'warning')} {_escaped(node.reason)}")


def _note(body: str) -> str:
    return f'<br><span class="note">{body}</span>'


def _weights(weights: Weights) -> str:
    if weights.what == "converted":
        return f"{_becomes(weights.keys, weights.parameters)} {_element('span', weights.operations, 'how')}"
    tone = "" if weights.what in ("new", "dropped") else "bad"
    names = _element("code", ", ".join(weights.parameters or weights.keys))
    how = f" {_escaped(weights.conversion)}" if weights.conversion else ""
    return f"{_element('b', f'{weights.what}:', tone)} {names}{how}"


def _becomes(old: Iterable[str], new: Iterable[str]) -> str:
    return f'{_element("code", ", ".join(old))} <span class="arrow">→</span> {_element("code", ", ".join(new))}'


# --- tables, charts and code


def _table(part: Table) -> str:
    heads = "".join(_element("th", head, "short") for head in part.heads)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in part.rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(cell: str | Cell) -> str:
    text, tone = cell if isinstance(cell, Cell) else (cell, "")
    kind = ' class="short"' if len(text) <= _SHORT else ""
    return f"<td{kind}>{_element('b', text, tone) if tone else _escaped(text)}</td>"


def _chart(chart: Chart) -> str:
    left = f'style="left:{chart.share(chart.allowed):.1%}"'
    axis = f'<span class="axis"><span {left}>{chart.mark}</span></span>'
    rows = "".join(_bar(chart, bar, f'<i class="allowed" {left}></i>') for bar in chart.bars)
    heads = f"<tr><th></th><th>{axis}</th><th></th></tr>"
    return f'<table class="chart"><thead>{heads}</thead><tbody>{rows}</tbody></table>'


def _bar(chart: Chart, bar: Bar, allowed: str) -> str:
    share, tone = chart.share(bar.value), chart.tone(bar)
    # The blocks are seen where styles are dropped.
    drawn = f'<span class="blocks" aria-hidden="true">{blocks(share, 20)}</span>'
    drawn += f'<span class="track"><i class="bar {tone}" style="width:{share:.1%}"></i>{allowed}</span>'
    number = _element("span", chart.number(bar), "number", tone)
    note = f" {_element('b', f'← {bar.note}', 'bad')}" if bar.note else ""
    title, kind = _escaped(bar.label), "inside" if bar.inside else "layer"
    name = f'<code class="{kind}" title="{title}">{title}</code>'
    begins = ' class="marked"' if bar.note else ""
    return f"<tr{begins}><td>{name}</td><td>{drawn}</td><td>{number}{note}</td></tr>"


def _code(part: Code) -> str:
    where = _element("p", part.where, "where")
    if not part.diff:
        return f"<section>{where}<p>{_escaped(f'{part.was} → {part.becomes}: the same code')}</p></section>"
    heads = f"<tr>{_head(part.was)}{_head(part.becomes)}</tr>"
    rows = "".join(_code_row(row) for row in rows_of(part.diff))
    return f'<section>{where}<table class="code"><thead>{heads}</thead><tbody>{rows}</tbody></table></section>'


def _head(text: str) -> str:
    return f"<th>{_element('code', text)}</th>"


def _code_row(row: Row | str) -> str:
    if isinstance(row, str):
        return f'<tr class="gap"><td colspan="2">{_escaped(row)}</td></tr>'
    same = row.before == row.after
    return f"<tr>{_side(row.before, 'del', same)}{_side(row.after, 'ins', same)}</tr>"


def _marked(tag: str, text: str) -> str:
    """What changed, without the blanks in front of it."""
    bare = text.lstrip()
    return text[: len(text) - len(bare)] + _element(tag, bare)


def _side(line: Line | None, tag: str, same: bool) -> str:
    if line is None:
        return '<td class="none"></td>'
    pieces = [_marked(tag, text) if changed and text.strip() else _escaped(text) for text, changed in line]
    kind = "" if same else f' class="{tag} {"whole" if len(line) == 1 else ""}"'
    text = "".join(text for text, _ in line)
    wrapped = len(text) - len(text.lstrip()) + _WRAPPED
    style = f' style="padding-left:{wrapped}ch;text-indent:-{wrapped}ch"'
    return f"<td{kind}><pre{style}>{''.join(pieces) or ' '}</pre></td>"
