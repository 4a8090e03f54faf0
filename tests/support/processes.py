"""Groups of processes: one that is a group by itself, for what asks for a group, and two that work together."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from tests.support.fresh import FORKS


@contextmanager
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def two_processes(work: Callable[[int], object], folder: Path) -> None:
    """Call `work(rank)` in both processes of a group, and both have to get through.

    They are forks of a process that has imported what tests need and done nothing else: this one has run other tests,
    and threads and process groups of theirs don't survive a fork. What `work` refers to is pickled: other variables
    of modules are as their imports leave them. A process that waits in vain for the other ends after a minute.
    """
    filters = list(warnings.filters)

    def process(rank: int) -> None:
        warnings.resetwarnings()
        warnings.filters.extend(filters)  # type: ignore[attr-defined]  # as pytest has set them
        torch.manual_seed(0)
        torch.set_num_threads(1)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # as torchrun does; who asks finds a group
        os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        method, limit = f"file://{folder}/rendezvous", timedelta(seconds=60)
        errors = (folder / f"error-{rank}.txt").open("w", buffering=1)
        faulthandler.enable(errors)  # a process that a signal ends says where, also in threads of gloo
        os.dup2(errors.fileno(), 2)
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=limit)
        try:
            dist.init_device_mesh("cpu", (2,))
            work(rank)
            dist.barrier()
        except BaseException:
            errors.write(traceback.format_exc())
            raise
        dist.destroy_process_group()

    server = _server()
    server.send_bytes(cloudpickle.dumps(process))
    codes = server.recv()
    errors = "".join(file.read_text() for file in sorted(folder.glob("error-*.txt")))
    assert codes == [0, 0], f"exit codes {codes}\n{errors}"


@functools.cache
def _server() -> Connection:
    """The process that is forked: it gets what to call with a rank, and sends the exit codes back."""
    ours, theirs = FORKS.Pipe()
    FORKS.Process(target=_serve, args=(theirs,)).start()
    theirs.close()
    atexit.register(ours.close)  # it ends, or the end of this process would wait for it
    return ours


def _serve(requests: Connection) -> None:
    for name in ("hypothesis", "pytest", "tests.compatibility.subjects.data_parallel"):  # what the forks need
        importlib.import_module(name)
    with suppress(EOFError):
        while pickled := requests.recv_bytes():
            processes = [get_context("fork").Process(target=_call, args=(pickled, rank)) for rank in range(2)]
            for each in processes:
                each.start()
            for each in processes:
                each.join(120)
                each.kill()
                each.join()
            requests.send([each.exitcode for each in processes])


def _call(pickled: bytes, rank: int) -> None:
    cloudpickle.loads(pickled)(rank)
