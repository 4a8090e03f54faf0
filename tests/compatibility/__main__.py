"""Write the table of `compatibility.md` anew: `python -m tests.compatibility [PART OF A COLUMN'S NAME ...]`.

With arguments only these columns are run, and the others stay as they are.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"  # as the tests have it: more threads add in another order

from tests.compatibility.columns import columns
from tests.compatibility.page import PAGE, cells_of, page
from tests.compatibility.rows import ROWS


def main(asked: list[str]) -> int:
    found = cells_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    failed = 0
    for column in columns():
        if asked and not any(part in column.name for part in asked):
            continue
        for row in ROWS:
            with TemporaryDirectory() as folder:
                try:
                    found[column.name, row.name] = column.outcome(row, Path(folder))
                except Exception:
                    traceback.print_exc()
                    failed += 1
                    found[column.name, row.name] = "FAILED"
            print(f"{column.name}, {row.name}: {found[column.name, row.name]}", flush=True)
    if not failed:
        PAGE.write_text(page(found, columns()), encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
