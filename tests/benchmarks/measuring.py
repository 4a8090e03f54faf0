"""How the benchmarks measure: candidates take turns, and what counts is the median of the ratios, turn by turn."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

__all__ = ["in_a_process", "line", "median", "ratio", "taking_turns"]

Times = dict[str, list[float]]


def in_a_process(code: str, *arguments: str) -> float:
    """The number that a program prints last."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def taking_turns(candidates: Mapping[str, Callable[[], object]], repetitions: int, *, warm_up: int = 2) -> Times:
    """The seconds of each candidate. A slow moment of the machine hits all of them."""
    times: Times = {name: [] for name in candidates}
    for number in range(repetitions + warm_up):
        names = list(candidates) if number % 2 else list(reversed(candidates))
        for name in names:
            started = time.perf_counter()
            candidates[name]()
            if number >= warm_up:
                times[name].append(time.perf_counter() - started)
    return times


def ratio(times: Times, one: str, other: str) -> float:
    """How many times as long `one` takes: the median of the ratios, turn by turn."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def median(times: Times, name: str) -> float:
    """The median of a candidate, in milliseconds."""
    return 1000 * statistics.median(times[name])


def line(what: str, figure: str, budget: str = "", kept: bool | None = None) -> None:
    print(f"{what:<78} {figure:>12}  {budget:<12} {'' if kept is None else 'kept' if kept else 'OVER'}", flush=True)
