"""Loads and saves of all kinds in threads and processes, with faults at every stage: what do they leave behind?

    python -m tests.soak                                   # ten minutes
    python -m tests.soak --seconds 60 --seed 7             # others
    python -m tests.soak --threads 1 --processes 1 --only "a fault"   # looks for what is left after every round

Each result is compared with what stock makes of the same checkpoint. At the end nothing may be left: no attribute of
torch, transformers or accelerate that is another object, no thread, descriptor, module, gate or child process; and the
memory held may grow with the actions no more than it does with plain loads. Prints how often each action was taken,
and what went wrong; a failure names the seed of its action.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.memory import growth
from tests.soak.worker import REPORT, Result, Task, control, run

#: Bytes that an action may leave in memory beyond those of a plain load, of which it makes about three. Stock leaves 2
#: to 5 KB, by the tensors that safetensors has read.
ALLOWED = 25_000
#: seconds that a process may take beyond its time, for its imports, its warm-up and its last check
GRACE = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seconds", type=float, help="in place of the minutes")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--threads", type=int, default=4, help="of each process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="actions whose name contains this")
    options = parser.parse_args()
    seconds = 60 * options.minutes if options.seconds is None else options.seconds
    # For the processes that are started: memory counted to the byte, and no more threads than are asked for.
    os.environ |= {"PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    print(f"{seconds:.0f} seconds, {options.processes} processes of {options.threads} threads, seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="patcher-soak-") as temporary:
        folder = Path(temporary)
        command = [sys.executable, "-W", "ignore", "-m", "tests.soak.stock", str(folder / "checkpoints")]
        subprocess.run(command, check=True)
        tasks = [
            Task(
                number,
                options.seed,
                seconds,
                options.threads,
                tuple(options.only),
                folder / "checkpoints",
                folder / name,
            )
            for number, name in enumerate([*(f"process {each}" for each in range(options.processes)), "control"])
        ]
        results, problems = together(tasks, seconds + GRACE)
        left = sorted(each.name for each in folder.glob("process */*") if each.name != REPORT)
    problems += [f"file left: {name}" for name in left]
    if len(results) < len(tasks):
        print(*problems, sep="\n")
        return 1
    return report(results, problems)


def together(tasks: list[Task], patience: float) -> tuple[list[Result], list[str]]:
    """Run every task in a process of its own, the last as the control.

    Returns:
        What they found, and what became of those that found nothing.
    """
    context = multiprocessing.get_context("spawn")
    running = []
    for task in tasks:
        task.folder.mkdir()
        work = control if task is tasks[-1] else run
        running.append(context.Process(target=work, args=(task,), name=task.folder.name))
        running[-1].start()
    deadline = time.monotonic() + patience
    results, problems = [], []
    for task, process in zip(tasks, running, strict=True):
        process.join(max(0, deadline - time.monotonic()))
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGABRT)  # faulthandler prints where its threads stand
            process.join()
        if process.exitcode != 0:
            problems.append(f"{process.name} ended with {process.exitcode}")
        else:
            results.append(Result.read(task.report))
    return results, problems


def report(results: list[Result], problems: list[str]) -> int:
    """Print what was done and what is wrong. The last result is the control's."""
    *soaked, plain = results
    counts: Counter[str] = sum((each.counts for each in soaked), Counter())
    faults = {name for each in soaked for name in each.faults}
    for name, count in sorted(counts.items(), key=lambda item: (item[0] in faults, item[0])):
        print(f"{count:7} {'fault' if name in faults else '':6} {name}")
    of_faults = sum(count for name, count in counts.items() if name in faults)
    print(f"{counts.total():7} in all, {of_faults} with faults; {plain.counts.total()} plain loads of the control")
    unavoidable = max(0.0, growth(plain.held))
    for number, result in enumerate(results):
        name = "control" if result is plain else f"process {number}"
        found = growth(result.held)
        print(f"{name}: {found:+.0f} bytes held an action, {growth(result.resident):+.0f} of the process's size")
        if found - unavoidable > ALLOWED:
            problems.append(f"{name}: memory grows by {found:.0f} bytes an action: {result.held}")
        problems += [f"{name}: left: {line}" for line in result.left]
        problems += [f"{name}: {failure}" for failure in result.failures]
    for problem in problems:
        print(problem)
    print(f"{len(problems)} failures")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
