"""What a patcher costs: loads side by side with stock, and with transformers' own registry. Ratios, not seconds.

    python -m tests.benchmarks.bench_loading [REPETITIONS]

Every figure is the median over repetitions in which the candidates take turns, so that a slow moment of the machine
hits all of them. A figure over the project's budget is printed as such.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.measuring import Worker, in_a_process, line, ratio, taking_turns, workers_taking_turns

# A process that loads once for each line it is sent, and answers with the seconds.
LOADS = """
import sys, time
{imports}
from transformers import LlamaForCausalLM, logging
logging.disable_progress_bar()
for line in sys.stdin:
    started = time.perf_counter()
    LlamaForCausalLM.from_pretrained({folder!r})
    print(time.perf_counter() - started, flush=True)
"""

IMPORT = """
import json, time
import transformers.modeling_utils
started = time.perf_counter()
{statement}
print(json.dumps(time.perf_counter() - started))
"""

PEAK = """
import json, sys
from tests.support.memory import peak
from tests.support.replacements import JOINED
from transformers import AutoModelForCausalLM, logging
logging.disable_progress_bar()
import torch
before = peak()
model = AutoModelForCausalLM.from_pretrained({folder!r}, dtype=torch.bfloat16, **{arguments})
print(json.dumps((peak() - before) / 2**20))
"""


def class_mapping(folder: Path, repetitions: int) -> None:
    from transformers import LlamaForCausalLM, monkey_patching
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    from patcher import Patcher

    class Replaced(LlamaMLP):
        pass

    class ReplacedNorm(LlamaRMSNorm):
        pass

    patcher = Patcher({"LlamaMLP": Replaced})
    both = Patcher({"LlamaMLP": Replaced, "LlamaRMSNorm": ReplacedNorm})
    for name in (f"transformers.models.{each}.modeling_{each}" for each in ("bert", "gpt2", "qwen2_moe", "mixtral")):
        __import__(name)  # as in a process that has seen some models

    def registered() -> None:
        monkey_patching.register_patch_mapping({"LlamaMLP": Replaced})
        try:
            LlamaForCausalLM.from_pretrained(folder)
        finally:
            monkey_patching.clear_patch_mapping()

    times = taking_turns(
        {
            "plain": lambda: LlamaForCausalLM.from_pretrained(folder),
            "patched": lambda: LlamaForCausalLM.from_pretrained(folder, patcher=patcher),
            "both": lambda: LlamaForCausalLM.from_pretrained(folder, patcher=both),
        },
        repetitions * 10,
    )
    times |= taking_turns({"registry": registered}, repetitions)
    plain = statistics.median(times["plain"])
    line("load of a tiny model, plain", f"{plain * 1000:.1f} ms")
    found = ratio(times, "patched", "plain")
    line("load with a class mapping / plain", f"{found:.3f}", "<= 1.05", found <= 1.05)
    more = statistics.median(two - one for one, two in zip(times["patched"], times["both"], strict=True))
    line("  one more replaced class, of five modules", f"{more * 1000:+.2f} ms")
    theirs = statistics.median(times["registry"]) / plain
    line("load with transformers' own registry / plain", f"{theirs:.1f}")


def without_patcher(folder: Path, repetitions: int) -> None:
    """Pairs of processes that take turns: two processes differ by more than what is measured here, pairs average."""
    figures = []
    for number in range(repetitions):
        pair = {"imported": "from patcher import Patcher", "not": ""}
        if number % 2:
            pair = dict(reversed(pair.items()))
        workers = {
            name: Worker("-c", LOADS.format(imports=imports, folder=str(folder))) for name, imports in pair.items()
        }
        times = workers_taking_turns(workers, 10 * repetitions, warm_up=5)
        for worker in workers.values():
            worker.close()
        figures.append(ratio(times, "imported", "not"))
    found = statistics.median(figures)
    line("load without patcher=, package imported / not imported", f"{found:.3f}", "1.00 +- 0.05", found <= 1.05)
    line("  the pairs", f"{min(figures):.2f} to {max(figures):.2f}")


def importing(repetitions: int) -> None:
    for statement in ("import patcher", "from patcher import Patcher"):
        found = statistics.median(in_a_process(IMPORT.format(statement=statement)) for _ in range(repetitions)) * 1000
        line(f"`{statement}` after `import transformers.modeling_utils`", f"{found:.0f} ms", "<= 100 ms", found <= 100)


def peak_memory(folder: Path, repetitions: int) -> None:
    """A load that joins two projections per layer into one, against the plain load. Materialized as bfloat16."""

    def peak(arguments: str) -> float:
        code = PEAK.format(folder=str(folder), arguments=arguments)
        return statistics.median(in_a_process(code) for _ in range(repetitions))

    plain, patched = peak("{}"), peak("dict(patcher=JOINED)")
    fused = 2 * 576 * 1536 * 2 / 2**20  # one joined tensor of SmolLM2, in bfloat16
    allowed = (plain + fused) * 1.05
    line("peak memory of a load that joins projections / plain", f"{patched / plain:.3f}")
    line("  in MiB", f"{patched:.0f}", f"<= {allowed:.0f}", patched <= allowed)


def main(repetitions: int = 5) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    from tests.real_models import smollm2_small
    from tests.support.tiny import tiny_llama_config

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        config: LlamaConfig = tiny_llama_config()
        LlamaForCausalLM(config).save_pretrained(name)
        class_mapping(Path(name), repetitions)
        without_patcher(Path(name), repetitions)
    importing(repetitions)
    peak_memory(smollm2_small(), repetitions)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
