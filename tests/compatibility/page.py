"""The page: written from outcomes, and read by the test that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.compatibility.columns import Column
from tests.compatibility.rows import ROWS

PAGE = Path(__file__).with_name("compatibility.md")
INTRODUCTION = """\
# What other libraries do with a patched model

Made by `python -m tests.compatibility`, and held by a test for each cell. The same is done with a patched and with the
stock model, on tiny models of real architectures (Llama, Mixtral for `sequential_experts`, Qwen2-VL for
`patch_embeddings`), and compared:

- *exact*: the same bits; of weights on any machine, of what is computed where this page was made;
- *within rounding*: sums in another order, at most 1e-5 of values near 1;
- *within the quantizer's error*: other tensors are quantized than in stock, and the distance to the model in full
  precision is that of stock;
- *refused*: the error that says so, before anything is changed;
- —: there is nothing to do.
"""


def page(outcomes: Mapping[tuple[str, str], str], columns: Iterable[Column]) -> str:
    """The document.

    Args:
        outcomes: (head of the column, name of the row) -> the text of the cell.
    """
    by_subject: dict[str, list[Column]] = {}
    for column in columns:
        by_subject.setdefault(column.subject, []).append(column)
    lines = [INTRODUCTION]
    for subject, found in by_subject.items():
        lines += [f"## {subject}", "", f"| | {' | '.join(column.name for column in found)} |"]
        lines += ["|" + "---|" * (len(found) + 1)]
        lines += [
            f"| {row.name} | {' | '.join(outcomes[column.name, row.name] for column in found)} |" for row in ROWS
        ]
        lines += [""]
    return "\n".join(lines)


def cells_of(text: str) -> dict[tuple[str, str], str]:
    """(head of the column, name of the row) -> the text of the cell, of a page."""
    found: dict[tuple[str, str], str] = {}
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|") or line.startswith("|---"):
            continue
        first, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
        if first in ("", "|"):
            head = rest
        else:
            found |= {(name, first): cell for name, cell in zip(head, rest, strict=True)}
    return found
