"""One process of the soak: rounds of threads that each take actions at random, and then what is left."""

from __future__ import annotations

import faulthandler
import json
import random
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak import memory

REPORT = "result.json"


@dataclass
class Result:
    """What one process did, and what it found."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    #: (actions so far, bytes held) and (actions so far, size of the process) after each round
    held: list[tuple[int, int]] = field(default_factory=list)
    resident: list[tuple[int, int]] = field(default_factory=list)

    def measure(self) -> None:
        """Note how much memory is held now, if anything was done since the last time."""
        if self.held and self.held[-1][0] == self.counts.total():
            return
        self.held.append((self.counts.total(), memory.held()))
        self.resident.append((self.counts.total(), memory.resident()))

    @classmethod
    def read(cls, file: Path) -> Result:
        values = json.loads(file.read_text())
        return cls(**values | {"counts": Counter(values["counts"])})


@dataclass(frozen=True)
class Task:
    """What one process is to do, as it is sent there: the actions whose name contains one of `only`, all if empty."""

    number: int
    seed: int
    seconds: float
    threads: int
    only: tuple[str, ...]
    checkpoints: Path
    folder: Path

    @property
    def report(self) -> Path:
        return self.folder / REPORT


def run(task: Task) -> None:
    """Work until the time is up, and write the result."""
    prepare()
    # Here, where the environment says how to allocate and how many threads torch may have.
    from transformers import AutoModelForCausalLM

    from tests.soak.faults import expect
    from tests.soak.leftovers import Before
    from tests.soak.subjects import Subjects

    result = Result()
    soak = _Soak(task, Subjects(task.checkpoints), result)
    # Whatever is imported or made once is there then; for what looks for a file that is gone, the client of the hub.
    expect(lambda: AutoModelForCausalLM.from_pretrained(task.folder / "none"), OSError, ValueError)
    expect(lambda: AutoModelForCausalLM.from_pretrained("none/none"), OSError, ValueError)
    for each in soak.table:
        for number in range(2):
            soak.act(each.name, f"warm-up-{number}")
    soak.round(min(5.0, task.seconds / 10), 0)
    before = Before.now()
    for number, seconds in rounds(task.seconds):
        soak.round(seconds, number)
        result.measure()
        if task.threads == 1:
            result.left += [f"after round {number}: {line}" for line in before.left()]
    result.left += before.left()
    task.report.write_text(json.dumps(vars(result)))


def control(task: Task) -> None:
    """Plain loads in a process that never imports patcher: what stock leaves in memory, round for round."""
    prepare()
    from tests.soak.stock import CONFIGS, SHARDS, auto_class, class_names
    from tests.support.comparing import logits

    result, choose = Result(), random.Random(task.seed)
    for _, seconds in rounds(task.seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            name, shards = choose.choice(list(CONFIGS)), choose.choice(list(SHARDS))
            model = auto_class(CONFIGS[name]).from_pretrained(task.checkpoints / name / shards)
            logits(model), class_names(model), model.state_dict()
            result.counts["plain load"] += 1
        result.measure()
    assert "patcher" not in sys.modules
    task.report.write_text(json.dumps(vars(result)))


def prepare() -> None:
    """What both begin with."""
    faulthandler.enable()
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # some faults end in warnings; 3.12 warns of forks where there are threads


def rounds(seconds: float) -> Iterator[tuple[int, float]]:
    """The number and length of each round, until the time is up."""
    deadline, number = time.monotonic() + seconds, 0
    while (remaining := deadline - time.monotonic()) > 0:
        number += 1
        yield number, min(remaining, 30.0, max(2.0, seconds / 15))


class _Soak:
    def __init__(self, task: Task, subjects: object, result: Result) -> None:
        from tests.soak import faults, loads, processes, saves  # noqa: F401 - they fill the table
        from tests.soak.table import ACTIONS

        self.task = task
        self.subjects = subjects
        self.result = result
        self.table = [each for name, each in ACTIONS.items() if not task.only or any(map(name.count, task.only))]
        result.faults = [each.name for each in self.table if each.is_fault]
        self._lock = threading.Lock()

    def round(self, seconds: float, number: int) -> None:
        """Some threads, from their beginning to their end."""
        until = time.monotonic() + seconds
        running = [
            threading.Thread(target=self._loop, args=(until, f"{number}-{thread}"), name=f"soak {thread}")
            for thread in range(self.task.threads)
        ]
        for each in running:
            each.start()
        for each in running:
            each.join()

    def _loop(self, until: float, where: str) -> None:
        choose = random.Random(f"{self.task.seed}-{self.task.number}-{where}")
        weights = [each.weight for each in self.table]
        taken = 0
        while time.monotonic() < until:
            (chosen,) = choose.choices(self.table, weights)
            taken += 1
            self.act(chosen.name, f"{where}-{taken}")

    def act(self, name: str, where: str) -> None:
        """Take one action, with random numbers of its own."""
        from tests.soak.table import ACTIONS, Turn

        seed = f"{self.task.seed}-{self.task.number}-{where}-{name}"
        folder = self.task.folder / f"{threading.get_ident()}-{time.monotonic_ns()}"
        folder.mkdir()
        try:
            ACTIONS[name].run(Turn(random.Random(seed), folder, self.subjects))  # type: ignore[arg-type]
        except BaseException:
            with self._lock:
                self.result.failures.append(f"{name} ({seed}):\n{traceback.format_exc()}")
        shutil.rmtree(folder)
        with self._lock:
            self.result.counts[name] += 1
