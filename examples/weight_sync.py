"""Send weights from a training process to a generating one after each step, with different layouts.

    python examples/weight_sync.py                    # four layers of SmolLM2, from a package on the index
    python examples/weight_sync.py Qwen/Qwen2.5-0.5B  # any causal model

The trainer has fused projections; the engine is the stock model, as an inference engine would be. The tensors of the
checkpoint are sent one after the other, without copies of the trainer's weights. It prints, in a minute on two cores:

    step 1: loss 17.8424, 38 tensors, 170 MB sent in 0.40 s
    step 2: loss 16.4364, 38 tensors, 170 MB sent in 0.37 s
    step 3: loss 15.1519, 38 tensors, 170 MB sent in 0.38 s
    after each step the engine has the weights that the trainer would save: True
    written in place: True
    same outputs as the trainer: True (0e+00)
    same generated tokens: True
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
    """Run one process."""
    dist.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(" ".join(topics.values()), return_tensors="pt")["input_ids"][0][:256].view(4, 64)
    (train if dist.get_rank() == TRAINER else generate)(name, ids)
    dist.destroy_process_group()


def train(name: str, ids: torch.Tensor) -> None:
    """Run the process with the fused model."""
    model = AutoModelForCausalLM.from_pretrained(name, patcher=FUSED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # The names, shapes and dtypes are sent once; they don't change while the model trains.
    dist.broadcast_object_list([[(key, t.shape, t.dtype) for key, t in checkpoint_metadata(model).items()]])
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
        dist.broadcast(generate_tokens(model, ids), TRAINER)
        with tempfile.TemporaryDirectory() as folder:  # for the comparison only
            model.save_pretrained(folder)
            dist.broadcast_object_list([folder])
            dist.barrier()


def generate(name: str, ids: torch.Tensor) -> None:
    """Run the process with the stock model."""
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    metadata = receive_object()
    addresses = {key: value.data_ptr() for key, value in model.state_dict().items()}
    same_weights, same_tokens, difference = True, True, 0.0
    for _ in range(STEPS):
        load_checkpoint_weights(model, receive(metadata))
        with torch.no_grad():
            logits = model(ids).logits
        expected = torch.empty_like(logits)
        dist.broadcast(expected, TRAINER)
        difference = max(difference, (logits - expected).abs().max().item())
        tokens = generate_tokens(model, ids)
        expected_tokens = torch.empty_like(tokens)
        dist.broadcast(expected_tokens, TRAINER)
        same_tokens &= torch.equal(tokens, expected_tokens)
        saved = AutoModelForCausalLM.from_pretrained(receive_object()).state_dict()
        same_weights &= all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
        dist.barrier()
    print(f"after each step the engine has the weights that the trainer would save: {same_weights}")
    in_place = all(value.data_ptr() == addresses[key] for key, value in model.state_dict().items())
    print(f"written in place: {in_place}")
    print(f"same outputs as the trainer: {difference < 1e-3} ({difference:.0e})")
    print(f"same generated tokens: {same_tokens}")


def receive(metadata: list[tuple[str, torch.Size, torch.dtype]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the trainer sends."""
    for name, shape, dtype in metadata:
        tensor = torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, TRAINER)
        yield name, tensor


def generate_tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(ids, min_new_tokens=8, max_new_tokens=8, do_sample=False)
    return tokens


def receive_object() -> Any:
    objects: list[Any] = [None]
    dist.broadcast_object_list(objects)
    return objects[0]


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
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
