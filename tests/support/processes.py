"""Groups of processes: one that is a group by itself, for what asks for a group, and two that work together."""

from __future__ import annotations

import faulthandler
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def two_processes(work: Callable[[int], object], folder: Path) -> None:
    """Call `work(rank)` in both processes of a group; they are forks of this one, and both have to get through.

    One that waits in vain for the other ends after a minute.
    """

    def process(rank: int) -> None:
        # Garbage of the parent stays: a process group that is collected here waits for threads that no fork has.
        gc.freeze()
        torch.set_num_threads(1)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # as torchrun does; who asks finds a group
        os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        method, limit = f"file://{folder}/rendezvous", timedelta(seconds=60)
        errors = (folder / f"error-{rank}.txt").open("w", buffering=1)
        faulthandler.enable(errors)  # a process that a signal ends says where
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=limit)
        try:
            dist.init_device_mesh("cpu", (2,))
            work(rank)
            dist.barrier()
        except BaseException:
            errors.write(traceback.format_exc())
            raise
        dist.destroy_process_group()

    processes = [get_context("fork").Process(target=process, args=(rank,)) for rank in range(2)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(120)
        each.kill()
    errors = "".join(file.read_text() for file in sorted(folder.glob("error-*.txt")))
    codes = [each.exitcode for each in processes]
    assert codes == [0, 0], f"exit codes {codes}\n{errors}"
