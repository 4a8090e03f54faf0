"""Experts without tokens in several processes, and `Trainer` of two processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForCausalLM

from patcher import Patcher, original_optimizer_state_dict, original_state_dict
from tests.compatibility.outcomes import compared
from tests.compatibility.rows import Row
from tests.support.processes import two_processes
from tests.support.splitting import (
    ROUNDING,
    adamw,
    all_whole,
    in_double_of,
    split,
    split_by_hand,
)
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config
from tests.support.trainer import MIDDLE, losses, trained, weights

DDP = nn.parallel.DistributedDataParallel


# --- experts without tokens ------------------------------------------------------------------------------------------

#: So many experts that a few tokens leave most without any; the tokens of each process choose others.
STARVING = Row(
    "experts without tokens",
    Patcher(fusions=["qkv", "sequential_experts"]),
    partial(tiny_mixtral_config, num_local_experts=12),
)
BATCHES = torch.tensor([[3, 4]]), torch.tensor([[50, 60]])
STEPS = 4


def _inputs(rank: int) -> dict[str, Any]:
    return {"input_ids": BATCHES[rank], "use_cache": False}


def _loss(model: Any, rank: int) -> torch.Tensor:
    found: torch.Tensor = model(**_inputs(rank)).logits.square().mean()
    return found


def _starved(row: Row, folder: Path, rank: int) -> None:
    double = in_double_of(row)
    kinds: dict[str, Any] = {
        "DDP": lambda: DDP(row.patched(**double)),
        "by hand": lambda: split_by_hand(row.patched(**double)),
        "by transformers": lambda: row.patched(**double, **split()),
    }
    for kind, make in kinds.items():
        model = make().train()
        optimizer = adamw(model)
        for _ in range(STEPS):
            model.zero_grad()
            _loss(model, rank).backward()
            assert all(parameter.grad is not None for parameter in model.parameters()), kind
            optimizer.step()
        inner = model.module if kind == "DDP" else model
        state = original_optimizer_state_dict(inner, optimizer)["state"]
        found = {"weights": original_state_dict(inner), "state": state}
        if rank == 0:
            torch.save(found, folder / f"{kind}.pt")


def test_experts_without_tokens_train_as_the_stock_model_of_one_process(tmp_path: Path) -> None:
    assert STARVING.folder
    two_processes(partial(_starved, STARVING, tmp_path), tmp_path)

    stock = STARVING.stock(**in_double_of(STARVING)).train()
    optimizer = adamw(stock)
    for _ in range(STEPS):
        stock.zero_grad()
        ((_loss(stock, 0) + _loss(stock, 1)) / 2).backward()
        optimizer.step()
    expected = {"weights": dict(stock.state_dict()), "state": get_optimizer_state_dict(stock, optimizer)["state"]}
    starved = stock.model.layers[0].mlp.experts.down_proj
    assert optimizer.state[starved]["exp_avg"].flatten(1).abs().amax(1).eq(0).sum() > 2  # there are some
    for kind in ("DDP", "by hand", "by transformers"):
        compared({kind: torch.load(tmp_path / f"{kind}.pt")}, {kind: expected}, rounding=ROUNDING)


# --- Trainer ---------------------------------------------------------------------------------------------------------


def _trainers(folder: Path, rank: int) -> None:
    patcher = Patcher(fusions=["qkv", "gate_up"])
    runs = {}
    for name, options in {"stock": {}, "ours": {"patcher": patcher}}.items():
        runs[name] = trained(
            AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64, **options), folder / name
        )
    resumed = trained(
        AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64, patcher=patcher),
        folder / "resumed",
        folder / "ours" / MIDDLE,
    )
    compared([losses(resumed), weights(resumed)], [losses(runs["ours"]), weights(runs["ours"])], rounding=ROUNDING)
    assert resumed.args.world_size == 2
    compared(losses(runs["ours"]), losses(runs["stock"]), rounding=ROUNDING)
    compared(weights(runs["ours"]), weights(runs["stock"]), rounding=ROUNDING)
    if rank == 0:
        places = [folder / name / MIDDLE for name in ("ours", "stock")]
        again = [AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64) for place in places]
        compared(dict(again[0].state_dict()), dict(again[1].state_dict()), rounding=ROUNDING)
    # transformers splits it, and `Trainer` leaves it so.
    split_runs = [
        trained(
            AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64, **split(), **options),
            folder / f"split {name}",
            save_only_model=True,
        )
        for name, options in {"ours": {"patcher": patcher}, "stock": {}}.items()
    ]
    compared(losses(split_runs[0]), losses(split_runs[1]), rounding=ROUNDING)
    compared(weights(split_runs[0]), all_whole(weights(split_runs[1])), rounding=ROUNDING)
    dist.barrier()
    saved = [AutoModelForCausalLM.from_pretrained(folder / f"split {name}" / MIDDLE) for name in ("ours", "stock")]
    compared(dict(saved[0].state_dict()), dict(saved[1].state_dict()), rounding=ROUNDING)


@pytest.mark.nightly
def test_trainers_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    save_tiny(tiny_llama_config(), tmp_path / "llama")
    two_processes(partial(_trainers, tmp_path), tmp_path)
