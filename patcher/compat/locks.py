"""Locks of process-wide state that a fork leaves free."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager


def lock_for_forks() -> AbstractContextManager[bool]:
    """Return a lock that is free in a forked child, which doesn't have the thread that may hold it.

    The state that it guards must be complete at any moment.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
