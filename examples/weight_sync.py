"""Weights that go from a model that trains to one that generates, after each step: another process, another layout.

    python examples/weight_sync.py                    # four layers of SmolLM2, from a package on the index
    python examples/weight_sync.py Qwen/Qwen2.5-0.5B  # any causal model

The trainer has its projections fused; the engine is the stock model, as an inference engine is. What is sent are the
tensors of the checkpoint, one after the other, in the memory of the trainer's own weights. It prints, in a minute on
two cores:

    step 1: loss 17.8424, 38 tensors, 170 MB sent in 0.40 s
    step 2: loss 16.4364, 38 tensors, 170 MB sent in 0.37 s
    step 3: loss 15.1519, 38 tensors, 170 MB sent in 0.38 s
    the engine has the weights that the trainer would save, after each step: True
    in the memory that it had: True
    it computes what the trainer does: True (0e+00)
    it generates the same tokens: True
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from patcher import Patcher, checkpoint_metadata, checkpoint_weights, load_checkpoint_weights

FUSED = Patcher(fusions=["qkv", "gate_up"])
TRAINER, ENGINE, STEPS = 0, 1, 3


def work(name: str) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(" ".join(topics.values()), return_tensors="pt")["input_ids"][0][:256].view(4, 64)
    (train if dist.get_rank() == TRAINER else generate)(name, ids)
    dist.destroy_process_group()


def train(name: str, ids: torch.Tensor) -> None:
    """The process with the fused model."""
    model = AutoModelForCausalLM.from_pretrained(name, patcher=FUSED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # The engine asks first what it will be sent; that doesn't change while the model trains.
    dist.broadcast_object_list([[(key, each.shape, each.dtype) for key, each in checkpoint_metadata(model).items()]])
    for step in range(1, STEPS + 1):
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        start, sizes = time.perf_counter(), []
        for _, tensor in checkpoint_weights(model):
            dist.broadcast(tensor, TRAINER)
            sizes.append(tensor.nbytes)
        seconds = time.perf_counter() - start
        print(
            f"step {step}: loss {loss.item():.4f}, {len(sizes)} tensors, {sum(sizes) / 1e6:.0f} MB sent in "
            f"{seconds:.2f} s",
            flush=True,
        )
        with torch.no_grad():
            dist.broadcast(model.eval()(ids).logits, TRAINER)
        dist.broadcast(generated(model, ids), TRAINER)
        with tempfile.TemporaryDirectory() as folder:  # for the comparison alone
            model.save_pretrained(folder)
            dist.broadcast_object_list([folder])
            dist.barrier()


def generate(name: str, ids: torch.Tensor) -> None:
    """The process with the stock model."""
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    expected = received_object()
    addresses = {key: value.data_ptr() for key, value in model.state_dict().items()}
    same_weights, same_tokens, apart = True, True, 0.0
    for _ in range(STEPS):
        load_checkpoint_weights(model, received(expected))
        with torch.no_grad():
            logits = model(ids).logits
        theirs = torch.empty_like(logits)
        dist.broadcast(theirs, TRAINER)
        apart = max(apart, (logits - theirs).abs().max().item())
        tokens = generated(model, ids)
        theirs = torch.empty_like(tokens)
        dist.broadcast(theirs, TRAINER)
        same_tokens &= torch.equal(tokens, theirs)
        saved = AutoModelForCausalLM.from_pretrained(received_object()).state_dict()
        same_weights &= all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
        dist.barrier()
    print(f"the engine has the weights that the trainer would save, after each step: {same_weights}")
    stays = all(value.data_ptr() == addresses[key] for key, value in model.state_dict().items())
    print(f"in the memory that it had: {stays}")
    print(f"it computes what the trainer does: {apart < 1e-3} ({apart:.0e})")
    print(f"it generates the same tokens: {same_tokens}")


def received(expected: list[tuple[str, torch.Size, torch.dtype]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the trainer sends."""
    for name, shape, dtype in expected:
        tensor = torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, TRAINER)
        yield name, tensor


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(ids, min_new_tokens=8, max_new_tokens=8, do_sample=False)
    return tokens


def received_object() -> Any:
    found: list[Any] = [None]
    dist.broadcast_object_list(found)
    return found[0]


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this one
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        work(sys.argv[1])
        sys.exit()
    if len(sys.argv) > 1:
        model = sys.argv[1]
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.real_models import smollm2_small

        model = str(smollm2_small())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run([*torchrun, __file__, model], env=environment, check=False).returncode)
