"""How the benchmarks measure: candidates take turns, and what counts is the median of the ratios, turn by turn."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "Times",
    "Worker",
    "in_a_process",
    "line",
    "median",
    "ratio",
    "table",
    "taking_turns",
    "workers_taking_turns",
]

Times = dict[str, list[float]]


def in_a_process(code: str, *arguments: str) -> float:
    """The number that a program prints last."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


class Worker:
    """A process of its own that does its work once for each line it is sent, and answers with a number."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def taking_turns(
    candidates: Mapping[str, Callable[[], object]],
    repetitions: int,
    *,
    warm_up: int = 2,
    limit: float = math.inf,
    before: Callable[[], object] = lambda: None,
) -> Times:
    """The seconds of each candidate. A slow moment of the machine hits all of them.

    Args:
        candidates: name -> what is measured.
        repetitions: how many turns are counted.
        warm_up: how many turns come first, uncounted.
        limit: after so many seconds what has been measured is enough, once a turn is counted.
        before: called before each of them, and not measured.
    """
    times: Times = {name: [] for name in candidates}
    begun = time.perf_counter()
    for number in range(repetitions + warm_up):
        if number > warm_up and time.perf_counter() - begun > limit:
            break
        names = list(candidates) if number % 2 else list(reversed(candidates))
        for name in names:
            before()
            started = time.perf_counter()
            candidates[name]()
            if number >= warm_up:
                times[name].append(time.perf_counter() - started)
    return times


def workers_taking_turns(workers: Mapping[str, Worker], repetitions: int, *, warm_up: int = 2) -> Times:
    """What each worker answers."""
    times: Times = {name: [] for name in workers}
    for number in range(repetitions + warm_up):
        for name, worker in workers.items():
            found = worker()
            if number >= warm_up:
                times[name].append(found)
    return times


def ratio(times: Times, one: str, other: str) -> float:
    """How many times as long `one` takes: the median of the ratios, turn by turn."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def median(times: Times, name: str) -> float:
    """The median of a candidate, in milliseconds."""
    return 1000 * statistics.median(times[name])


def line(what: str, figure: str, budget: str = "", kept: bool | None = None) -> None:
    print(f"{what:<78} {figure:>12}  {budget:<12} {'' if kept is None else 'kept' if kept else 'OVER'}", flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table in Markdown."""
    for row in (columns, ["---"] * len(columns), *rows):
        print("|", " | ".join(row), "|", flush=True)
