"""State dicts, in memory and in files."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.compatibility.columns import column
from tests.compatibility.outcomes import compared
from tests.compatibility.rows import Row
from tests.support.comparing import logits

SUBJECT = "State dicts"


@column(SUBJECT, "`save_pretrained`")
def save_pretrained(row: Row, folder: Path) -> str:
    from tests.support.checkpoints import saved

    assert saved(row.patched(), folder / "patched") == saved(row.stock(), folder / "stock")
    return compared({}, {})


@column(SUBJECT, "`torch.save`, the model")
def pickled(row: Row, folder: Path) -> str:
    model = row.patched()
    torch.save(model, folder / "model.pt")
    again = torch.load(folder / "model.pt", weights_only=False)
    return compared(logits(again, row.inputs()), logits(model, row.inputs()))
