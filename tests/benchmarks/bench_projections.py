"""What `qkv` and `gate_up` cost in a load and gain in a forward: side by side with stock. Ratios.

    python -m tests.benchmarks.bench_projections [REPETITIONS]

SmolLM2, saved in float32, and a Llama of 1 B with random weights, saved in bfloat16 (it is written into a temporary
folder first, 2.5 GB).

A load on the CPU only maps the file where it asks for the dtype of the file, so loads are measured with the first
forward behind them, which reads it: of 16 tokens, and of one for the larger model, for a slow product would hide the
load. Joined weights can't be mapped, so there the budget has room for one plain copy of their bytes, which is measured
in the same turns. The page cache is warm.

Decoding is one token a row after 128 in the cache; its time goes into reading the weights, and three small products
take longer than a large one. A prompt has 128 tokens. Where a turn takes long there are fewer of them: a measurement
is over after a minute.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.forwards import decode_step, prefill
from tests.benchmarks.measuring import line, median, ratio, taking_turns

THREADS = 2
CACHED = PROMPT = 128
SECONDS = 60.0
FUSIONS = ["qkv", "gate_up"]


@dataclass(frozen=True)
class Subject:
    """A model on the disk, and how much it is asked to do."""

    name: str
    folder: Path
    dtype: torch.dtype  # of the file
    first_tokens: int
    decoded_rows: tuple[int, ...] = (1, 8, 32)
    prompt_rows: tuple[int, ...] = (1, 8)
    one_by_one: bool = True  # each fusion alone as well


def load_and_first_forward(subject: Subject, repetitions: int) -> None:
    from transformers import AutoModelForCausalLM

    from patcher import Patcher

    tokens = torch.arange(40, 40 + subject.first_tokens)[None]
    load = partial(AutoModelForCausalLM.from_pretrained, subject.folder)

    def first_forward(dtype: torch.dtype, patcher: Patcher | None) -> None:
        model = load(dtype=dtype, patcher=patcher)
        with torch.no_grad():
            model(tokens)

    fused = Patcher(fusions=FUSIONS)
    for dtype in (torch.float32, torch.bfloat16):
        candidates: dict[str, Callable[[], object]]
        candidates = {"stock": partial(first_forward, dtype, None), "fused": partial(first_forward, dtype, fused)}
        is_mapped = dtype == subject.dtype
        if is_mapped:
            candidates["copy"] = copying(load(dtype=dtype, patcher=fused))
        times = taking_turns(candidates, repetitions, limit=4 * SECONDS, before=gc.collect)
        turns = zip(times["stock"], times["copy"], strict=True) if is_mapped else []
        allowed = statistics.median(1.10 + copy / stock for stock, copy in turns) if is_mapped else 1.15
        what = f"{subject.name}, load and first forward, {str(dtype).removeprefix('torch.')}"
        line(f"{what}, stock", f"{median(times, 'stock'):.0f} ms")
        found = ratio(times, "fused", "stock")
        line(f"{what}, with qkv and gate_up / without", f"{found:.3f}", f"<= {allowed:.2f}", found <= allowed)
        if is_mapped:
            line("  a plain copy of the joined weights", f"{median(times, 'copy'):.0f} ms")


def copying(model: Any) -> Callable[[], object]:
    """Copies the joined weights of a model; the model itself isn't kept."""
    from patcher import fused_parameters

    parameters = dict(model.named_parameters())
    joined = [parameters[name].detach().clone() for name in fused_parameters(model)]
    return lambda: [each.clone() for each in joined]


def forwards(subject: Subject, repetitions: int) -> None:
    from transformers import AutoModelForCausalLM

    from patcher import Patcher

    stock = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.bfloat16).eval()
    families = {"qkv": ["qkv"], "gate_up": ["gate_up"]} if subject.one_by_one else {}
    families |= {"qkv and gate_up": FUSIONS}
    models: dict[str, Any] = {"stock": stock}
    models |= {name: Patcher(fusions=fusions).apply(stock) for name, fusions in families.items()}
    kinds = [(f"a step of decoding, batch {rows}", decode_step, rows, CACHED) for rows in subject.decoded_rows]
    kinds += [(f"a prompt of {PROMPT} tokens, batch {rows}", prefill, rows, PROMPT) for rows in subject.prompt_rows]
    for what, make, rows, length in kinds:
        runs = {name: make(model, rows, length) for name, model in models.items()}
        times = taking_turns(runs, 20 * repetitions, warm_up=1, limit=SECONDS)
        line(f"{subject.name}, bfloat16, {what}, stock", f"{median(times, 'stock'):.1f} ms")
        for name in families:
            found = ratio(times, name, "stock")
            is_whole = name == "qkv and gate_up"
            line(f"  with {name} / stock", f"{found:.3f}", "< 1" if is_whole else "", found < 1 if is_whole else None)


def main(repetitions: int = 5, subjects: tuple[Subject, ...] | None = None) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import logging

    from tests.benchmarks.models import LLAMA_1B, write_checkpoint
    from tests.real_models import smollm2

    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, threads))
    with tempfile.TemporaryDirectory() as name:
        if subjects is None:
            folder = write_checkpoint(LLAMA_1B, Path(name), torch.bfloat16)
            large = Subject("Llama 1 B", folder, torch.bfloat16, first_tokens=1, prompt_rows=(1,), one_by_one=False)
            subjects = (Subject("SmolLM2", smollm2(), torch.float32, first_tokens=16), large)
        try:
            for subject in subjects:
                load_and_first_forward(subject, repetitions)
                forwards(subject, repetitions)
        finally:
            torch.set_num_threads(threads)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
