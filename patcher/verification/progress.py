"""The surroundings of a verification: its progress bar or log, and the global state that it restores."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from patcher.verification.passes import seeded

#: The seconds before a bar is shown.
MOMENT = 2.0


@contextmanager
def progress(doing: str, stages: Sequence[str], shown: bool | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar with the current stage and the time left, and remove it at the end.

    It is one of transformers' bars, so `transformers.logging.disable_progress_bar()` disables it. Without a terminal
    or a notebook, each stage is a line of transformers' log: `info`, or `warning` if progress is requested.

    Yields a function to call with the name of a stage, or with another text and the share of the whole that is done.

    Args:
        doing: the text before the stage.
        stages: all stages, if they are known.
        shown: whether to show it; by default on a terminal or in a notebook.
    """
    console, logs = Console(stderr=True), transformers_logging
    bar: Any = None
    if (console.is_terminal or console.is_jupyter) and shown is not False and logs.is_progress_bar_enabled():
        form = "{desc} |{bar:20}| {elapsed}<{remaining}" if stages else "{desc} {elapsed}"
        bar = logs.tqdm(total=1.0, delay=MOMENT, leave=False, bar_format=form, file=sys.stderr)
    # Decided here, since the verbosity of transformers is lowered meanwhile.
    level = logging.WARNING if shown else logging.INFO
    logger = logging.getLogger("transformers.patcher") if level >= logs.get_verbosity() and bar is None else None
    started = time.perf_counter()

    def step(stage: str, done: float = 0.0) -> None:
        if stage in stages:
            done = stages.index(stage) / len(stages)
            stage = f"{stage} ({stages.index(stage) + 1} of {len(stages)})"
        elapsed = time.perf_counter() - started
        if bar is not None:
            bar.set_description_str(f"{doing}: {stage}", refresh=False)
            bar.update(max(0.0, min(1.0, done) - bar.n))
            if elapsed >= MOMENT:
                bar.refresh()
        elif logger is not None:
            logger.setLevel(level)
            logger.log(level, "%s: %s, after %.1f s", doing, stage, elapsed)

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def isolated(
    doing: str, seed: int, stages: Sequence[str], shown: bool | None = None
) -> Iterator[tuple[Path, Callable[..., None]]]:
    """Set the usual random states, default dtype and gradient mode, and restore them at the end, like the threads.

    Bars and warnings of transformers are off: there are a dozen loads, and inputs that are only tried.

    Yields an empty folder, and the function of `progress`.
    """
    logs: Any = transformers_logging
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    bars, verbosity = logs.is_progress_bar_enabled(), logs.get_verbosity()
    try:
        with (
            seeded(seed),
            torch.inference_mode(False),
            torch.enable_grad(),
            tempfile.TemporaryDirectory() as name,
            progress(doing, stages, shown) as step,
        ):
            logs.disable_progress_bar()
            logs.set_verbosity_error()
            torch.set_default_dtype(torch.float32)
            yield Path(name), step
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
