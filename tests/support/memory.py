"""How much memory a process has held, for tests and benchmarks that start one to measure it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["peak"]


def peak() -> int:
    """The most that this process has held since it began, in bytes.

    Not `ru_maxrss`: Linux hands that on from the process that started this one, so growth below it isn't seen.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "this needs Linux"
    return 1024 * int(found[1])
