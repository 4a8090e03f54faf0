"""The lock of what this package has put in place for the process: gates, stand-ins and torch's hook."""

from __future__ import annotations

import os
import threading

#: Held for moments only: a fork waits for it, so that the child never inherits it held, or what it guards half done.
process_lock = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )
