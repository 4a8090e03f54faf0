"""Every cell of the table is what its column finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.columns import Column, columns
from tests.compatibility.outcomes import EXACT, ROUNDING
from tests.compatibility.page import PAGE, cells_of, page
from tests.compatibility.rows import ROWS, Row

PAGE_CELLS = cells_of(PAGE.read_text(encoding="utf-8"))


def cells() -> Iterator[Any]:
    """Each column with each row. CI runs each column in one row, and at night there is the whole matrix."""
    for number, column in enumerate(columns()):
        for shift, row in enumerate(ROWS):
            marks = () if shift == number % len(ROWS) else pytest.mark.nightly
            yield pytest.param(column, row, id=f"{column.name}-{row.name}", marks=marks)


def test_ci_runs_every_row() -> None:
    assert len(columns()) >= len(ROWS)


@pytest.mark.parametrize(("column", "row"), list(cells()))
def test_the_cell_is_what_happens(column: Column, row: Row, tmp_path: Path) -> None:
    if column.needs:
        pytest.importorskip(column.needs)
    outcome, cell = column.outcome(row, tmp_path), PAGE_CELLS[column.name, row.name]
    if row.joins:  # columns that compute nothing let nothing round
        outcome, cell = (text.replace(ROUNDING, EXACT) for text in (outcome, cell))
    assert outcome == cell


def test_the_page_is_as_it_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(PAGE_CELLS, columns())
