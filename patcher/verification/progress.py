"""How far a verification is: a line on stderr, where somebody looks at it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

#: How many seconds pass before a bar is shown, and between two looks at the clock.
MOMENT, TICK = 2.0, 0.5
#: A smaller part of the whole says too little about the rest.
ENOUGH = 0.25


class Estimate:
    """What is left of a run, by how its stages share the time.

    >>> estimate = Estimate({"load": 10, "outputs": 30, "training": 60}, started=0.0)
    >>> estimate.reach("training", now=20.0)  # 40 of 100 took 20 s
    >>> estimate.left(now=20.0), estimate.left(now=30.0), estimate.left(now=90.0)
    (30.0, 20.0, 0.0)

    Args:
        shares: of the time that each stage takes, in their order.
        started: on the clock of `time.perf_counter`.
    """

    def __init__(self, shares: Mapping[str, float], started: float) -> None:
        self._shares, self._started = shares, started
        self.done = self._after = 0.0  # of 1: before this stage, after it
        self._pace = 0.0  # seconds for all

    def reach(self, stage: str, now: float) -> None:
        """A stage begins."""
        if stage in self._shares:
            whole, names = sum(self._shares.values()), list(self._shares)
            self.done = sum(self._shares[name] for name in names[: names.index(stage)]) / whole
            self._after = self.done + self._shares[stage] / whole
            self._pace = (now - self._started) / self.done if self.done >= ENOUGH else 0.0

    def left(self, now: float) -> float | None:
        """The seconds that are left, at least those of the stages after this one; None before it can be told."""
        if not self._pace:
            return None
        return self._pace * max(1 - (now - self._started) / self._pace, 1 - self._after)


@contextmanager
def progress(doing: str, shares: Mapping[str, float], shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """A bar on stderr while stages run that are told by name, with what is left; gone when they are done.

    It is one of transformers' bars, so `transformers.logging.disable_progress_bar()` puts it off, and a notebook gets
    that of notebooks. In a log, where it is asked for, each stage is a line.

    Args:
        doing: what is done.
        shares: of the time that each stage takes, where that is known.
        shown: whether to show it; by default where stderr is a terminal, or in a notebook.
    """
    console = Console(stderr=True)
    alive = console.is_terminal or console.is_jupyter
    started = time.perf_counter()
    estimate, ended = Estimate(shares, started), threading.Event()
    bar: Any = None
    logs: Any = transformers_logging
    if alive and shown is not False and logs.is_progress_bar_enabled():
        form = "{desc} |{bar:20}| {elapsed}{postfix}" if shares else "{desc} {elapsed}"
        bar = logs.tqdm(total=1.0, delay=MOMENT, leave=False, bar_format=form, file=sys.stderr)

    def tick() -> None:  # a stage may take minutes
        while not ended.wait(TICK):
            now = time.perf_counter()
            if now - started >= MOMENT:
                left = estimate.left(now)
                bar.set_postfix_str("" if left is None else f"about {told(left)} left", refresh=False)
                bar.refresh()

    def step(stage: str) -> None:
        estimate.reach(stage, time.perf_counter())
        if bar is not None:
            number = f" ({list(shares).index(stage) + 1} of {len(shares)})" if stage in shares else ""
            bar.set_description_str(f"{doing}: {stage}{number}", refresh=False)
            bar.update(estimate.done - bar.n)
        elif shown:
            console.print(f"{doing}: {stage}")

    clock = threading.Thread(target=tick, daemon=True)
    try:
        if bar is not None:
            clock.start()
        yield step
    finally:
        ended.set()
        if bar is not None:
            clock.join()
            bar.close()


def told(seconds: float) -> str:
    """A time, as exact as an estimate is."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and warnings of transformers: a dozen loads, and inputs that are only tried, would say much."""
    logs: Any = transformers_logging
    shown, verbosity = logs.is_progress_bar_enabled(), logs.get_verbosity()
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if shown:
            logs.enable_progress_bar()
