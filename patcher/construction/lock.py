"""The locks of what is one for the process: what this package has put in place, and what a construction rebinds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from patcher.errors import PatchConstructionError

#: For gates, stand-ins and torch's hook. Held for moments only: a fork waits for it, so that the child never inherits
#: it held, or what it guards half done.
process_lock = threading.RLock()

#: How long a thread waits for one that constructs a model: see `ConstructionLock`.
WAIT_SECONDS = 300.0


class ConstructionLock:
    """One thread at a time constructs and initialises models; the same thread may enter again.

    Whoever waits for longer than `WAIT_SECONDS` gets an error that names its holder: that may be waiting for
    this one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: (thread, what for, since when) of the thread that holds it
        self._holder: tuple[str, str, float] | None = None

    @contextmanager
    def held_for(self, what: str, *, or_without: bool = False) -> Iterator[None]:
        """Hold the lock inside the block.

        Args:
            what: what is constructed, for the error of whoever waits for it.
            or_without: go on without it where it would wait too long: transformers doesn't guard that at all.

        Raises:
            PatchConstructionError: another thread has held it for too long.
        """
        outer: tuple[str, str, float] | None = None
        while not self._lock.acquire(timeout=WAIT_SECONDS):
            if (holder := self._holder) is None or time.time() - holder[2] < WAIT_SECONDS:
                continue  # others take turns, and nothing is stuck
            if or_without:
                yield
                return
            thread, other, since = holder
            raise PatchConstructionError(
                f"{what} can't be constructed: the thread {thread!r} has been constructing {other} since "
                f"{time.strftime('%H:%M:%S', time.localtime(since))}, for more than {WAIT_SECONDS:g} seconds. Models "
                "are constructed one at a time, so an __init__ that waits for a thread which loads a model waits for "
                "it in vain: load that model before, and hand it over."
            )
        try:
            outer = self._holder
            self._holder = outer or (threading.current_thread().name, what, time.time())
            yield
        finally:
            self._holder = outer
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Let go of what a thread holds that the child doesn't have: it has the one that forked only."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock._at_fork_reinit()  # type: ignore[attr-defined]
            self._holder = None


#: Constructing a model rebinds `torch.nn.init`, `torch.linspace` and `tie_weights` for the whole process, so two loads
#: at once make each other wrong, without any patcher. Every load holds this while it constructs and initialises.
construction_lock = ConstructionLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )
    os.register_at_fork(after_in_child=construction_lock.after_fork_in_child)
