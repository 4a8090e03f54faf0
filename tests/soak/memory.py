"""How much memory a process holds, to the byte, and whether that grows with what it does."""

from __future__ import annotations

import ctypes
import gc
import statistics
from itertools import pairwise
from pathlib import Path

#: (actions so far, bytes)
Samples = list[tuple[int, int]]


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def held() -> int:
    """The bytes that are allocated and not freed.

    The C library's own figure: unlike the size of the process it knows no fragmentation. Python's small objects are in
    it where `PYTHONMALLOC=malloc` has been set before the process began, and tensors are anyway.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2  # glibc 2.33
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resident() -> int:
    """The size of the process, once free memory has been returned to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def growth(samples: Samples) -> float:
    """Bytes an action: the median of the rounds, which a library that is imported late in one of them doesn't move."""
    slopes = [(bytes2 - bytes1) / (done2 - done1) for (done1, bytes1), (done2, bytes2) in pairwise(samples)]
    return statistics.median(slopes) if slopes else 0.0
