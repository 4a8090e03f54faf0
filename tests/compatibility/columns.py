"""The columns of the table: each is a function that does one thing with a patched model as with the stock one.

    @column("Quantizers", "torchao int8", needs="torchao")
    def torchao(row: Row, folder: Path) -> str:
        ...
        return compared(logits(patched), logits(stock))

It says how the two compare; an error of ours that it raises is a refusal, any other is a failure.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from patcher import PatcherError
from tests.compatibility.outcomes import refused
from tests.compatibility.rows import Row

#: The files in `subjects/`, in the order of the page.
SUBJECTS = (
    "state_dicts",
    "training",
    "optimizers",
    "data_parallel",
    "tensor_parallel",
    "adapters",
    "quantizers",
    "device_maps",
    "front_doors",
    "compilers",
)

Cell = Callable[[Row, Path], str]


@dataclass(frozen=True)
class Column:
    """One library, or one of its functions.

    Attributes:
        subject: the section of the page.
        name: the head of the column.
        needs: the package that it is about, where that is an extra.
    """

    subject: str
    name: str
    cell: Cell
    needs: str = ""

    def outcome(self, row: Row, folder: Path) -> str:
        """The text of the cell. `folder` is empty."""
        try:
            with warnings.catch_warnings():  # a cell may ignore those that the library says of itself
                return self.cell(row, folder)
        except PatcherError as error:
            return refused(error)


_COLUMNS: list[Column] = []


def column(subject: str, name: str, needs: str = "") -> Callable[[Cell], Cell]:
    """Make a function one of the columns."""

    def made(cell: Cell) -> Cell:
        _COLUMNS.append(Column(subject, name, cell, needs))
        return cell

    return made


@cache
def columns() -> tuple[Column, ...]:
    """All columns, in the order of the page."""
    for subject in SUBJECTS:
        importlib.import_module(f"tests.compatibility.subjects.{subject}")
    # Not in the order in which they were imported: whoever looks for doctests goes by the alphabet.
    return tuple(sorted(_COLUMNS, key=lambda found: SUBJECTS.index(found.cell.__module__.rpartition(".")[2])))
