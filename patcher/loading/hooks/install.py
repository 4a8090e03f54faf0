"""The seams of the core: `from_pretrained` and `from_config` learn `patcher=`, models are saved as stock's."""

from __future__ import annotations

import os
import threading

from patcher.compat.seams import check_used, install as install_seams, seams_in
from patcher.loading.hooks import loads, making, recorders, saves

#: Taken by whoever installs seams.
install_lock = threading.RLock()
_installed = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: install_lock._at_fork_reinit())  # type: ignore[attr-defined]


def install_core() -> bool:
    """Install the seams of the core. Done once.

    Returns:
        Whether it was done now.

    Raises:
        PatcherError: this release of transformers lacks a seam.
    """
    global _installed
    if _installed:
        return False
    check_used()
    install_seams(seams_in(*(each.__name__ for each in (loads, making, recorders, saves))))
    _installed = True
    return True
