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

#: what depends on torch, not on the release of transformers
OF_TORCH = ("`torch.compile`", "`torch.export`")
#: columns that train, compile or start processes: of their cells CI runs every third, in another row of each
LONG = (
    *OF_TORCH,
    "`OnnxExporter`, ONNX Runtime",
    "`DynamoExporter`",
    "continuous batching",
    "TRL's `SFTTrainer`, resumed",
    "`Trainer`, resumed",
    "`load_best_model_at_end`",
    "resumed from shards",
    "FSDP2 by `DistributedConfig`: `save_pretrained`, trained",
    "FSDP2 by `fully_shard`: `save_pretrained`, trained",
    "`DistributedConfig(tp_size=2)`: `save_pretrained`, trained",
)
PAGE_CELLS = cells_of(PAGE.read_text(encoding="utf-8"))


def cells() -> Iterator[Any]:
    """Each column with each row, and whether CI runs it."""
    for number, column in enumerate(columns()):
        for shift, row in enumerate(ROWS):
            marks = [pytest.mark.nightly] if column.name in LONG and (number + shift) % 4 else []
            yield pytest.param(column, row, id=f"{column.name}-{row.name}", marks=marks)


def test_the_long_columns_are_columns() -> None:
    assert {*LONG} <= {column.name for column in columns()}


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
