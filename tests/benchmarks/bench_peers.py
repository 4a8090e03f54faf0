"""A patcher beside what others offer for the same effect: what a load costs, and what it leaves in the process.

    pip install -e '.[peers]'    # Defuser and Liger; what isn't installed is left out by name
    python -m tests.benchmarks.bench_peers [REPETITIONS]

Models of random weights, some 100 M parameters, in a file of float32; loaded as bfloat16, so that every load reads all
of it. Each candidate is a process of its own and does what its documentation says for one load; for the times these
processes take turns with one that loads without any of it. Then, each in another process:

- names rebound: attributes of modules, classes and tables in transformers, torch, accelerate and safetensors that are
  other objects once it is imported (a hook, that is), and those that are after one load with the effect, with the
  entries that tables have got by it;
- whether the next plain load builds the stock classes again, and one in another thread that begins while the first
  model is built;
- whether the model saves the file that it was loaded from, byte for byte.

The effect is the same for all: of Liger the norm and the MLP, as the preset has them, and nothing else that it offers.
Its kernels don't run on a CPU, but they are put in place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from tests.benchmarks.measuring import Times, Worker, median, ratio, table, workers_taking_turns
from tests.benchmarks.models import write_checkpoint
from tests.benchmarks.peers import EFFECTS, PLAIN

COLUMNS = ("effect", "by", "load; / plain", "peak memory / plain", "names rebound by its import; by a load")
COLUMNS += ("next load is stock", "load in another thread is stock", "saves the original")


def main(repetitions: int = 3, is_small: bool = False) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    left_out: set[str] = set()
    rows: list[tuple[str, ...]] = []
    for name, effect in EFFECTS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(effect.tiny_config() if is_small else effect.config, Path(folder), torch.float32)
            here = [each for each, candidate in effect.candidates.items() if not candidate.missing]
            left_out |= {package for candidate in effect.candidates.values() for package in candidate.missing}
            rows += rows_of(name, here, folder, repetitions) if here != [PLAIN] else []
    table(COLUMNS, rows)
    for package in sorted(left_out):
        print(f"{package}: not installed")


def rows_of(effect: str, candidates: list[str], folder: str, repetitions: int) -> Iterator[tuple[str, ...]]:
    times: Times = {each: [] for each in candidates}
    peaks: Times = {each: [] for each in candidates}
    for _ in range(repetitions):  # two processes differ, several average
        workers = {each: Worker(*command(effect, each, folder, "loads")) for each in candidates}
        for each, worker in workers.items():
            peaks[each].append(worker())
        for each, seconds in workers_taking_turns(workers, 2 * repetitions).items():
            times[each] += seconds
        for worker in workers.values():
            worker.close()
    for each in candidates:
        found = answer(effect, each, folder, "traces")
        yield (
            effect,
            each,
            f"{ratio(times, each, PLAIN):.2f}" if each != PLAIN else f"{median(times, each):.0f} ms",
            f"{ratio(peaks, each, PLAIN):.2f}",
            f"{found['imported']}; {found['rebound']}",
            *("yes" if found[what] else "no" for what in ("next", "beside", "saved")),
        )


def command(*arguments: str) -> list[str]:
    return ["-m", "tests.benchmarks.peers", *arguments]


def answer(*arguments: str) -> dict[str, Any]:
    started = [sys.executable, "-W", "ignore", *command(*arguments)]
    done = subprocess.run(started, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
