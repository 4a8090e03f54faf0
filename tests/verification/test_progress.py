"""A bar of what is verified, on a terminal and for whoever waits."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from patcher import verify
from patcher.verification.progress import progress
from tests.support.replacements import OWN


def test_without_a_terminal_each_stage_is_a_line_of_the_log(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of what transformers' verbosity shows: its `info` by default, its warnings where progress is requested."""

    def said() -> list[str]:
        lines = [record.getMessage().partition(", after ")[0] for record in caplog.records]
        caplog.clear()
        return [line for line in lines if line.startswith("verifying: ")]

    verify(llama, OWN, stages=["save"])
    assert said() == []
    verify(llama, OWN, progress=True)
    assert said()[::5] == [
        "verifying: load (1 of 11)",
        "verifying: precision (6 of 11)",
        "verifying: reload (11 of 11)",
    ]
    transformers_logging.set_verbosity_info()
    try:
        verify(llama, OWN, stages=["save"])
    finally:
        transformers_logging.set_verbosity_warning()
    assert said() == ["verifying: load (1 of 2)", "verifying: save (2 of 2)"]


def on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], moment: float = 0, bars: bool = True
) -> str:
    """What is written to stderr where that is a terminal."""
    monkeypatch.setattr(transformers_logging.hf_hub_utils, "enable_progress_bars", lambda: None)  # tests forbid it
    monkeypatch.setattr(transformers_logging, "_tqdm_active", bars)
    monkeypatch.setattr("patcher.verification.progress.MOMENT", moment)
    resource_tracker.ensure_running()  # if it were started later, it would keep the terminal open
    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    with open(terminal, "w") as stderr, monkeypatch.context() as patched:  # noqa: PTH123 - no path
        patched.setattr(sys, "stderr", stderr)
        with ThreadPoolExecutor(1) as reader:
            written = reader.submit(everything, screen)
            run()
            stderr.close()
            return written.result()


def test_a_terminal_shows_a_bar_that_is_gone_afterwards(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_terminal(monkeypatch, lambda: verify(llama, OWN))

    assert "verifying: training (9 of 11) |" in text
    assert re.search(r"\d\d:\d\d<\d\d:\d\d", text)
    assert text.rpartition("\r")[0].rpartition("\r")[2].strip() == ""
    assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.parametrize(
    ("shown", "options"),
    [(None, {"moment": 1000}), (None, {"bars": False}), (False, {})],
    ids=["in a moment", "bars are off", "not asked for"],
)
def test_a_terminal_shows_no_bar_that_nobody_needs(
    monkeypatch: pytest.MonkeyPatch, shown: bool | None, options: dict[str, Any]
) -> None:
    def run() -> None:
        with progress("verifying", ["load", "outputs"], shown) as step:
            for stage in ("load", "outputs"):
                step(stage)
                time.sleep(0.05)

    assert on_a_terminal(monkeypatch, run, **options) == ""


def everything(file: int) -> str:
    """What is written to a terminal until it is closed."""
    parts = []
    with contextlib.suppress(OSError):  # it is closed
        while part := os.read(file, 65536):
            parts.append(part)
    os.close(file)
    return b"".join(parts).decode()
