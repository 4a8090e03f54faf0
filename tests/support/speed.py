"""How slow the machine is at the moment: limits in seconds are those of a quiet one."""

from __future__ import annotations

import time

__all__ = ["slowness"]


def slowness() -> float:
    """How many times longer a million additions take than 0.06 s, as where the limits were set; at least 1."""
    started, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return max(1.0, (time.thread_time() - started) / 0.06)
