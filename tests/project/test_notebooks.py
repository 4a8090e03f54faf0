"""The notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.sampling import sampled

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs, f"clear the outputs of {path.name}"
            assert cell.execution_count is None, f"clear the execution counts of {path.name}"


@pytest.mark.parametrize("path", sampled(NOTEBOOKS, {"01_quickstart"}))
def test_notebook_runs(path: Path) -> None:
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    # A raised exception of a cell, and a cell that takes too long, end it with the cell's traceback.
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
