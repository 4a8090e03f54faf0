"""A fused model in several processes: with tensor parallelism, then with FSDP2.

    python examples/distributed.py                      # four layers of SmolLM2, from a package on the index
    python examples/distributed.py Qwen/Qwen2.5-0.5B 2  # any Llama-like causal model, and how many processes

It starts `torchrun` itself: three processes, since SmolLM2 has nine heads of queries and three of keys. They print, in
a minute on two cores:

    tensor parallelism: 320 of 960 rows of each qkv_proj
    same outputs as in one process: True (4e-05)
    saved as it was: True
    FSDP2, three steps  17.7931 16.6979 15.6891
    the stock model     17.7931 16.6979 15.6891
    same losses as stock: True (0e+00)
    same weights as stock, under the names of transformers: True (6e-06)
    stock transformers loads what it saved, with the same outputs: True
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
from transformers.distributed import DistributedConfig

from patcher import Patcher, original_state_dict

FUSED = Patcher(fusions=["qkv", "gate_up"])
PROCESSES, STEPS = 3, 3


def work(name: str, folder: Path) -> None:
    """Run one process."""
    ids = AutoTokenizer.from_pretrained(name)(" ".join(topics.values()), return_tensors="pt")["input_ids"][0]
    tensor_parallelism(name, folder / "layers", ids[:64].unsqueeze(0))
    rank = dist.get_rank()  # from here on each process has its own batch
    fsdp(name, folder / "weights", ids[256 * rank : 256 * (rank + 1)].view(4, 64))
    dist.destroy_process_group()


def tensor_parallelism(name: str, folder: Path, ids: torch.Tensor) -> None:
    """Give each process its own heads of queries, keys and values, and its own share of each feed-forward layer."""
    expected = AutoModelForCausalLM.from_pretrained(name)
    config = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
    model = AutoModelForCausalLM.from_pretrained(name, patcher=FUSED, distributed_config=config)
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    with torch.no_grad():
        difference = (model(ids).logits - expected(ids).logits).abs().max().item()
    show(f"tensor parallelism: {weight.to_local().shape[0]} of {weight.shape[0]} rows of each qkv_proj")
    show(f"same outputs as in one process: {difference < 1e-3} ({difference:.0e})")

    model.save_pretrained(folder)  # every process calls it, the first one writes
    if dist.get_rank() == 0:
        saved, original = AutoModelForCausalLM.from_pretrained(folder).state_dict(), expected.state_dict()
        show(f"saved as it was: {all(torch.equal(saved[key], original[key]) for key in original)}")


def fsdp(name: str, folder: Path, ids: torch.Tensor) -> None:
    """Give each process a shard of every weight, and its own batch."""
    model, stock = (
        AutoModelForCausalLM.from_pretrained(
            name, patcher=patcher, distributed_config=DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
        )
        for patcher in (FUSED, None)
    )
    losses = train(model, ids), train(stock, ids)
    for title, values in zip(("FSDP2, three steps", "the stock model"), losses, strict=True):
        show(f"{title:<19}", *(f"{loss:.4f}" for loss in values))
    difference = max(abs(loss - expected) for loss, expected in zip(*losses, strict=True))
    show(f"same losses as stock: {difference < 1e-3} ({difference:.0e})")

    weights, expected = original_state_dict(model), stock.state_dict()  # whole tensors in every process
    difference = max((weights[key] - whole(value)).abs().max().item() for key, value in expected.items())
    show(f"same weights as stock, under the names of transformers: {difference < 1e-4} ({difference:.0e})")

    model.save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        difference = (saved(ids).logits - whole(model.eval()(ids).logits)).abs().max().item()
    show(f"stock transformers loads what it saved, with the same outputs: {difference < 1e-3}")


def train(model: Any, ids: torch.Tensor) -> list[float]:
    """Train for a few steps, and return the losses, averaged over all processes."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    for _ in range(STEPS):
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def show(*words: str) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        work(sys.argv[1], Path(sys.argv[2]))
        sys.exit()
    if len(sys.argv) > 1:
        model = sys.argv[1]
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.real_models import smollm2_small

        model = str(smollm2_small())
    processes = sys.argv[2] if len(sys.argv) > 2 else str(PROCESSES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*torchrun, __file__, model, temporary], env=environment, check=False).returncode)
