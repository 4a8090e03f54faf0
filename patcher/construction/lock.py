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

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )
    # The child has only the thread that forked; another one may have held the lock, for as long as a load takes.
    os.register_at_fork(after_in_child=lambda: construction_lock._at_fork_reinit())  # type: ignore[attr-defined]
