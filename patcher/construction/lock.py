"""The locks of what is one for the process: what this package has put in place, and what a construction rebinds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from patcher.errors import PatchConstructionError

#: Of gates, stand-ins and torch's hook. Held for moments only: a fork waits for it, so that the child never inherits
#: it held, or what it guards half done.
process_lock = threading.RLock()

#: How long a thread waits for one that constructs a model and doesn't get on: see `ConstructionLock`.
WAIT_SECONDS = 20.0
_LOOKS = 20
#: How long a fork waits for it.
FORK_SECONDS = 10.0
#: Whoever uses less of a core waits for something: a lock, a queue, another thread.
_IDLE = 0.01


def _cpu_clock() -> int | None:
    """The clock that says how long this thread has run, whoever asks; None where there is none, as on macOS."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return int(time.pthread_getcpuclockid(threading.get_ident()))


@dataclass(frozen=True, eq=False)
class _Holder:
    """Who holds the lock, and for what."""

    what: str
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.time)
    clock: int | None = field(default_factory=_cpu_clock)

    def seconds_used(self) -> float:
        """How long its thread has run; where nobody knows, how long the process has, so that it isn't accused."""
        return time.process_time() if self.clock is None else time.clock_gettime(self.clock)


class ConstructionLock:
    """One thread at a time constructs and initialises models; the same thread may enter again.

    A large model takes minutes to construct, and others wait for it. So what ends the wait isn't its length but that
    the holder does nothing: for `WAIT_SECONDS`, looked at again and again, its thread has used no time of a processor.
    It may be waiting for the very thread that waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders: list[_Holder] = []  # of one thread, the outermost first
        self._forking = threading.local()

    @contextmanager
    def held_for(self, what: str) -> Iterator[None]:
        """Hold the lock inside the block.

        Args:
            what: what is constructed, for the error of whoever waits for it.

        Raises:
            PatchConstructionError: another thread holds it, and does nothing.
        """
        self._acquire(what)
        try:
            self._holders.append(_Holder(what))
            yield
        finally:
            self._holders.pop()
            self._lock.release()

    @contextmanager
    def held_if_it_comes_free(self, what: str) -> Iterator[None]:
        """The same for what transformers doesn't guard at all: it goes on without it where the holder does nothing."""
        with ExitStack() as stack:
            with suppress(PatchConstructionError):
                stack.enter_context(self.held_for(what))
            yield

    def _acquire(self, what: str) -> None:
        holder, used, idle = None, 0.0, 0
        # Many short waits: where the whole process has stood still, it was one of them.
        while not self._lock.acquire(timeout=WAIT_SECONDS / _LOOKS):
            before, before_used = holder, used
            try:
                holder = self._holders[0]
                used = holder.seconds_used()
            except (IndexError, OSError):  # it has just let go, or its thread is over
                holder = None
            is_idle = holder is before and used - before_used < WAIT_SECONDS / _LOOKS * _IDLE
            idle = idle + 1 if is_idle else 0
            if holder is not None and idle >= _LOOKS:
                began = time.strftime("%H:%M:%S", time.localtime(holder.since))
                raise PatchConstructionError(
                    f"{what} can't be constructed: the thread {holder.thread!r} has been constructing {holder.what} "
                    f"since {began}, and for {WAIT_SECONDS:g} seconds has done nothing but wait. Models are "
                    "constructed one at a time, so an __init__ that waits for a thread which loads a model waits "
                    "forever: load that model before, and hand it over."
                )

    def before_fork(self) -> None:
        """Wait for another thread that constructs: the child would have what that has rebound, and nobody in it who
        binds it back. Not for ever, for that may be waiting for this thread.
        """
        self._forking.waited = self._lock.acquire(timeout=FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        """Let go of what was waited for."""
        if self._forking.waited:
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """Let go as well; the child has only the thread that forked, so nobody else holds it there."""
        if self._forking.waited:
            self._lock.release()
        else:
            self._lock._at_fork_reinit()  # type: ignore[attr-defined]
            self._holders.clear()


#: Constructing a model rebinds `torch.nn.init`, `torch.linspace` and `tie_weights` for the whole process, so two loads
#: at once make each other wrong, without any patcher. Every load holds this while it constructs and initialises.
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
