"""The locks of process-wide state: what this package installs, and what a construction rebinds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from patcher.errors import PatchConstructionError

#: Guards gates, stand-ins and torch's hook, for moments only. A fork waits for it, so that a child inherits neither a
#: held lock nor a partial update.
process_lock = threading.RLock()

#: How long a thread waits for one that constructs a model: see `ConstructionLock`.
WAIT_SECONDS = 300.0
#: How long a fork waits for it; not longer, since it may be waiting for the thread that forks.
FORK_SECONDS = 10.0


class ConstructionLock:
    """A reentrant lock for constructing and initializing models.

    A thread that has waited for one holder longer than `WAIT_SECONDS` gets an error instead of a deadlock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: thread name, what it constructs, since when
        self._holder: tuple[str, str, float] | None = None

    @contextmanager
    def held_for(self, what: str, *, or_without: bool = False) -> Iterator[None]:
        """Hold the lock inside the block.

        Args:
            what: what is constructed, for errors of waiting threads.
            or_without: go on without the lock rather than raise, where transformers has no lock at all.

        Raises:
            PatchConstructionError: if another thread has held it for too long.
        """
        outer: tuple[str, str, float] | None = None
        while not self._lock.acquire(timeout=WAIT_SECONDS):
            if (holder := self._holder) is None or time.time() - holder[2] < WAIT_SECONDS:
                continue  # the holder has changed meanwhile
            if or_without:
                yield
                return
            thread, other, since = holder
            raise PatchConstructionError(
                f"{what} can't be constructed: the thread {thread!r} has been constructing {other} since "
                f"{time.strftime('%H:%M:%S', time.localtime(since))}, for more than {WAIT_SECONDS:g} seconds. Models "
                "are constructed one at a time, so an __init__ must not wait for a thread that loads a model: "
                "load that model first, and pass it in."
            )
        try:
            outer = self._holder
            self._holder = outer or (threading.current_thread().name, what, time.time())
            yield
        finally:
            self._holder = outer
            self._lock.release()

    def before_fork(self) -> None:
        """Wait for another thread that constructs: in the child, what that has rebound would stay rebound."""
        self._lock.acquire(timeout=FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        """Release the lock, unless it wasn't acquired in time."""
        with suppress(RuntimeError):
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Do the same; the child doesn't have the thread that holds a lock which wasn't acquired."""
        try:
            self._lock.release()
        except RuntimeError:
            self._lock._at_fork_reinit()  # type: ignore[attr-defined]
            self._holder = None


#: transformers rebinds `torch.nn.init`, `torch.linspace` and `tie_weights` for the whole process while it constructs a
#: model, so concurrent loads break each other even without a patcher. Every load holds this lock meanwhile.
construction_lock = ConstructionLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )
    os.register_at_fork(
        before=construction_lock.before_fork,
        after_in_parent=construction_lock.after_fork_in_parent,
        after_in_child=construction_lock.after_fork_in_child,
    )
