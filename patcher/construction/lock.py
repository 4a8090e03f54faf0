"""The locks of what is one for the process: what this package has put in place, and what a construction rebinds."""

from __future__ import annotations

import os
import threading

#: Of gates, stand-ins and torch's hook. Held for moments only: a fork waits for it, so that the child never inherits
#: it held, or what it guards half done.
process_lock = threading.RLock()

#: Constructing a model rebinds `torch.nn.init`, `torch.linspace` and `tie_weights` for the whole process, so two loads
#: at once make each other wrong, without any patcher. Every load holds this while it constructs and initialises.
construction_lock = threading.RLock()

#: Seconds.
PATIENCE_OF_A_FORK = 10.0

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )

    def _before_fork() -> None:
        # For as long as another thread constructs: the child would have what that has rebound, and nobody in it who
        # binds it back. Not for ever: what is constructed there may be waiting for this thread.
        _forking.waited = construction_lock.acquire(timeout=PATIENCE_OF_A_FORK)

    def _after_fork_in_parent() -> None:
        if _forking.waited:
            construction_lock.release()

    def _after_fork_in_child() -> None:
        if _forking.waited:
            construction_lock.release()
        else:
            construction_lock._at_fork_reinit()  # type: ignore[attr-defined]

    _forking = threading.local()
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
