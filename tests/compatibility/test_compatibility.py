"""Every cell of the table is what its column finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility.columns import Column, columns
from tests.compatibility.outcomes import EXACT, ROUNDING
from tests.compatibility.page import PAGE, cells_of, page
from tests.compatibility.rows import ROWS, Row

#: what depends on torch, not on the release of transformers
OF_TORCH = ("`torch.compile`", "`torch.export`")
PAGE_CELLS = cells_of(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    "column",
    [
        pytest.param(column, id=column.name, marks=pytest.mark.slow if column.name in OF_TORCH else ())
        for column in columns()
    ],
)
def test_the_cell_is_what_happens(column: Column, row: Row, tmp_path: Path) -> None:
    if column.needs:
        pytest.importorskip(column.needs)
    outcome, cell = column.outcome(row, tmp_path), PAGE_CELLS[column.name, row.name]
    if row.joins:  # columns that compute nothing let nothing round
        outcome, cell = (text.replace(ROUNDING, EXACT) for text in (outcome, cell))
    assert outcome == cell


def test_the_page_is_as_it_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(PAGE_CELLS, columns())
