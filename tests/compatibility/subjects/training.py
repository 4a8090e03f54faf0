"""`Trainer`, on a patched and on the stock model: a run that is taken up again equals the one that never stopped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from patcher import original_state_dict
from tests.compatibility.columns import column
from tests.compatibility.outcomes import EXACT, compared
from tests.compatibility.rows import Row
from tests.support.trainer import FIRST_IS_BEST, MIDDLE, fine_tuned, in_shards, losses, trained, weights

SUBJECT = "Trainer"


@dataclass(frozen=True)
class Whole:
    """A run that was never interrupted, and the folder with its checkpoints."""

    folder: TemporaryDirectory[str]
    losses: list[torch.Tensor]
    weights: dict[str, torch.Tensor]

    @property
    def middle(self) -> Path:
        return Path(self.folder.name, MIDDLE)


@cache
def whole(row: Row, *, patched: bool) -> Whole:
    folder = TemporaryDirectory()
    run = trained(row.patched() if patched else row.stock(), Path(folder.name))
    return Whole(folder, losses(run), weights(run))


def _resumed(row: Row, folder: Path, checkpoint: Path) -> str:
    expected = whole(row, patched=True)
    run = trained(row.patched(), folder, checkpoint)
    assert compared([losses(run), weights(run)], [expected.losses, expected.weights], rounding=0) == EXACT
    stock = whole(row, patched=False)
    return compared([losses(run), weights(run)], [stock.losses, stock.weights])


@column(SUBJECT, "`Trainer`, resumed")
def resumed(row: Row, folder: Path) -> str:
    return _resumed(row, folder, whole(row, patched=True).middle)


@column(SUBJECT, "resumed from shards")
def resumed_from_shards(row: Row, folder: Path) -> str:
    return _resumed(row, folder, in_shards(whole(row, patched=True).middle, folder / MIDDLE))


@column(SUBJECT, "`load_best_model_at_end`")
def best_model(row: Row, folder: Path) -> str:
    run = trained(row.patched(), folder, **FIRST_IS_BEST)
    assert run.state.best_model_checkpoint == str(folder / MIDDLE)
    itself = original_state_dict(row.load(folder / MIDDLE, patcher=row.patcher))
    assert compared(weights(run), itself, rounding=0) == EXACT
    return compared(weights(run), row.load(whole(row, patched=False).middle).state_dict())


@column(SUBJECT, "a run of the stock model, resumed")
def resumed_run_of_stock(row: Row, folder: Path) -> str:
    stock = whole(row, patched=False)
    run = trained(row.patched(), folder, stock.middle)
    return compared([losses(run), weights(run)], [stock.losses, stock.weights])


@column(SUBJECT, "TRL's `SFTTrainer`, resumed", needs="trl")
def fine_tuned_by_trl(row: Row, folder: Path) -> str:
    """Its loss isn't the model's: it runs the base model, and a head of its own."""
    whole, stock = fine_tuned(row.patched(), folder / "whole"), fine_tuned(row.stock(), folder / "stock")
    resumed = fine_tuned(row.patched(), folder / "resumed", folder / "whole" / MIDDLE)
    found, itself, expected = (
        [losses(run), [line.get("mean_token_accuracy") for line in run.state.log_history], weights(run)]
        for run in (resumed, whole, stock)
    )
    assert compared(found, itself, rounding=0) == EXACT
    return compared(found, expected)
