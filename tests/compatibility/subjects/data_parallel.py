"""Two processes: each has a part of the parameters (FSDP2), or all of them (DDP). With the stock model just so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed as dist, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from patcher import original_optimizer_state_dict, original_state_dict
from tests.compatibility.columns import column
from tests.compatibility.outcomes import compared, worst
from tests.compatibility.rows import Row
from tests.support.checkpoints import files
from tests.support.processes import two_processes
from tests.support.splitting import (
    ROUNDING,
    adamw,
    all_whole,
    batch,
    in_double_of,
    logits,
    split,
    split_by_hand,
    train,
    whole,
)

SUBJECT = "Data parallelism, two processes"


def in_both(work: Callable[[Row, Path], str], row: Row, folder: Path) -> str:
    """What a function returns in the first of two processes."""
    assert row.folder  # made before there are two
    two_processes(partial(_written, work, row, folder), folder)
    return (folder / "outcome").read_text()


def _written(work: Callable[[Row, Path], str], row: Row, folder: Path, rank: int) -> None:
    outcome = work(row, folder)
    if rank == 0:
        (folder / "outcome").write_text(outcome)


def _trained(model: Any, stock: Any, row: Row) -> str:
    """The losses of three steps; the logits, the weights and the state of the optimizer then."""
    inputs = batch(row)
    optimizers = adamw(model), adamw(stock)
    found, expected = train(model, optimizers[0], inputs), train(stock, optimizers[1], inputs)
    assert all(abs(one - other) < ROUNDING for one, other in zip(found, expected, strict=True))
    inner = [each.module if isinstance(each, nn.parallel.DistributedDataParallel) else each for each in (model, stock)]
    weights = all_whole(dict(inner[1].state_dict()))
    outcomes = [compared(original_state_dict(inner[0]), weights, rounding=ROUNDING)]
    state = original_optimizer_state_dict(model, optimizers[0])["state"]
    theirs = get_optimizer_state_dict(stock, optimizers[1])["state"]
    expected_state = {name: {key: whole(value) for key, value in each.items()} for name, each in theirs.items()}  # type: ignore[union-attr]
    outcomes.append(compared(state, expected_state, rounding=ROUNDING))
    # The last: a forward without gradients leaves whole parameters in the root of what `fully_shard` has split.
    return worst(*outcomes, compared(logits(model, inputs), logits(stock, inputs), rounding=ROUNDING))


def _split_by_transformers(row: Row, folder: Path) -> str:
    double = in_double_of(row)
    stock, model = row.stock(**double, **split()), row.patched(**double, **split())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    stock.save_pretrained(folder / "stock")
    model.save_pretrained(folder / "ours")
    dist.barrier()
    assert files(folder / "ours") == files(folder / "stock")
    return _trained(model, stock, row)


def _split_by_hand(row: Row, folder: Path) -> str:
    double = in_double_of(row)
    stock, model = split_by_hand(row.stock(**double)), split_by_hand(row.patched(**double))
    # transformers saves a model that it hasn't split itself from a whole state dict alone.
    state_dict = get_model_state_dict(stock, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    stock.save_pretrained(folder / "stock", state_dict=state_dict)
    model.save_pretrained(folder / "ours")
    model.save_pretrained(folder / "given", state_dict=get_model_state_dict(model))
    dist.barrier()
    assert files(folder / "ours") == files(folder / "given") == files(folder / "stock")
    return _trained(model, stock, row)


def _repeated(row: Row, folder: Path) -> str:
    double = in_double_of(row)
    stock, model = (nn.parallel.DistributedDataParallel(each) for each in (row.stock(**double), row.patched(**double)))
    return _trained(model, stock, row)


@column(SUBJECT, "FSDP2 by `DistributedConfig`: `save_pretrained`, trained")
def split_by_transformers(row: Row, folder: Path) -> str:
    return in_both(_split_by_transformers, row, folder)


@column(SUBJECT, "FSDP2 by `fully_shard`: `save_pretrained`, trained")
def split_with_torch(row: Row, folder: Path) -> str:
    return in_both(_split_by_hand, row, folder)


@column(SUBJECT, "DDP, trained")
def repeated(row: Row, folder: Path) -> str:
    return in_both(_repeated, row, folder)
