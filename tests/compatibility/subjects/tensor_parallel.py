"""Two processes that share each layer, or the experts of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed as dist
from transformers.distributed import DistributedConfig

from patcher import PatcherError, original_state_dict
from tests.compatibility.columns import column
from tests.compatibility.outcomes import NOT_APPLICABLE, compared, refused, worst
from tests.compatibility.rows import Row
from tests.compatibility.subjects.data_parallel import in_both
from tests.support.checkpoints import files
from tests.support.resuming import as_double
from tests.support.splitting import ROUNDING, adamw, in_double_of, logits, train

SUBJECT = "Tensor and expert parallelism, two processes"


def _shared(asked: dict[str, Any], row: Row, folder: Path) -> str:
    """What is saved; losses, logits and weights after three steps, as of the stock model in one process.

    (The gradients of stock's experts that two processes share are off by 1e-8, also in float64.)
    """
    double, inputs = in_double_of(row), as_double(row.training_inputs())
    row.stock(**double, distributed_config=DistributedConfig(**asked)).save_pretrained(folder / "stock")
    try:
        model = row.patched(**double, distributed_config=DistributedConfig(**asked))
    except PatcherError as error:
        return refused(error)
    stock = row.stock(**double)
    model.save_pretrained(folder / "ours")
    dist.barrier()
    assert files(folder / "ours") == files(folder / "stock")
    outcome = compared(logits(model, inputs), logits(stock, inputs), rounding=ROUNDING)
    found, expected = (train(each, adamw(each), inputs) for each in (model, stock))
    assert all(abs(one - other) < ROUNDING for one, other in zip(found, expected, strict=True))
    weights = compared(original_state_dict(model), dict(stock.state_dict()), rounding=ROUNDING)
    return worst(outcome, weights)


@column(SUBJECT, "`DistributedConfig(tp_size=2)`: `save_pretrained`, trained")
def layers(row: Row, folder: Path) -> str:
    return in_both(partial(_shared, {"tp_size": 2}), row, folder)


@column(SUBJECT, "with `ep_size=2`", needs="transformers.distributed.expert_parallel")
def experts(row: Row, folder: Path) -> str:
    if not row.has_experts:
        return NOT_APPLICABLE
    return in_both(partial(_shared, {"tp_size": 2, "ep_size": 2}), row, folder)
