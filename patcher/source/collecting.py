"""Garbage collection beside large syntax trees."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Hold the garbage collector back; syntax trees are many objects, and none of them is garbage yet.

    Every 700 new objects it looks at some of those that are there, of torch's and transformers' too: with these
    imported it took 40 % of the time of generating a file.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
