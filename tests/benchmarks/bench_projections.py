"""What `qkv` and `gate_up` cost in a load and gain in a forward: SmolLM2 side by side with stock. Ratios.

    python -m tests.benchmarks.bench_projections [REPETITIONS]

A plain load on the CPU only maps the file, so a load is measured with the first forward behind it, which reads it.
A decode step is one token after a prompt of 64, as `generate` takes it; its time goes into reading the weights, and
three small products of one row cost more than one large one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measuring import line, median, ratio, taking_turns

THREADS = 2
PROMPT = 64


def load_and_first_forward(folder: Path, repetitions: int) -> None:
    from transformers import AutoModelForCausalLM

    from patcher import Patcher

    tokens = torch.arange(40, 40 + 16)[None]
    patchers = {"stock": None, "fused": Patcher(fusions=["qkv", "gate_up"])}

    def load(patcher: Patcher | None, dtype: torch.dtype) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, patcher=patcher)
        with torch.no_grad():
            model(tokens)

    for dtype in (torch.float32, torch.bfloat16):
        times = taking_turns({name: partial(load, patcher, dtype) for name, patcher in patchers.items()}, repetitions)
        what = f"load and first forward, {str(dtype).removeprefix('torch.')}"
        line(f"{what}, stock", f"{median(times, 'stock'):.0f} ms")
        found = ratio(times, "fused", "stock")
        line(f"{what}, with qkv and gate_up / without", f"{found:.3f}", "<= 1.15", found <= 1.15)


def decode_step(model: Any) -> Callable[[], None]:
    """One token after a prompt, again and again."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    prompt, token = torch.arange(40, 40 + PROMPT)[None], torch.tensor([[7]])
    with torch.no_grad():
        model(prompt, past_key_values=cache)

    def step() -> None:
        with torch.no_grad():
            model(token, past_key_values=cache)
        cache.crop(-1)

    return step


def decoding(folder: Path, repetitions: int) -> None:
    from transformers import AutoModelForCausalLM

    from patcher import Patcher

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    families = {"qkv": ["qkv"], "gate_up": ["gate_up"], "qkv and gate_up": ["qkv", "gate_up"]}
    models = {"stock": stock} | {name: Patcher(fusions=fusions).apply(stock) for name, fusions in families.items()}
    steps = {name: decode_step(model) for name, model in models.items()}
    times = taking_turns(steps, 20 * repetitions, warm_up=5)
    line("decode step, bfloat16, stock", f"{median(times, 'stock'):.2f} ms")
    for name in families:
        found = ratio(times, name, "stock")
        whole = name == "qkv and gate_up"
        line(f"  with {name} / stock", f"{found:.3f}", "< 1" if whole else "", found < 1 if whole else None)
    prompt = torch.arange(40, 40 + 256)[None]

    def prefill(model: Any) -> None:
        with torch.no_grad():
            model(prompt, use_cache=False)

    names = ("stock", "qkv and gate_up")
    times = taking_turns({name: partial(prefill, models[name]) for name in names}, repetitions)
    line("prompt of 256 tokens, bfloat16, with qkv and gate_up / stock", f"{ratio(times, names[1], 'stock'):.3f}")


def main(repetitions: int = 5, folder: Path | None = None) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import logging

    from tests.real_models import smollm2

    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, threads))
    try:
        load_and_first_forward(folder or smollm2(), repetitions)
        decoding(folder or smollm2(), repetitions)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
