"""Processes that are forked in the middle of everything: they load as well, or are killed while they save."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from patcher import PatcherError
from tests.soak.injection import Countdown
from tests.soak.stock import SHARDS, auto_class, class_names
from tests.soak.subjects import Subject, Subjects, any_shards
from tests.soak.table import Turn, action

#: how long a child may take for a few loads that take a second
PATIENCE = 120


def forked(work: Callable[[], None], errors: Path) -> int:
    """Do some work in a forked child, and end it. It writes what goes wrong into a file.

    Returns:
        Its exit code; less than 0 for a signal.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            errors.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGABRT)  # faulthandler prints where its threads stand
            os.waitpid(child, 0)
            raise TimeoutError("a forked child hangs")
        time.sleep(0.01)


def load_some(turn: Turn) -> None:
    for subject in (turn.subjects.any_plain(turn.choose), turn.subjects.any_patched(turn.choose)):
        subject.check(subject.load(any_shards(turn.choose)))


@action("a forked child loads", weight=2)
def fork(turn: Turn) -> None:
    errors = turn.folder / "errors"
    code = forked(lambda: load_some(turn), errors)
    assert code == 0, (code, errors.read_text() if errors.exists() else "")


@action("multiprocessing, forked")
def fork_by_multiprocessing(turn: Turn) -> None:
    child = multiprocessing.get_context("fork").Process(target=load_some, args=(turn,))
    child.start()
    child.join(PATIENCE)
    hangs = child.is_alive()
    if hangs and child.pid is not None:
        os.kill(child.pid, signal.SIGABRT)
        child.join()
    code = child.exitcode
    child.close()
    assert code == 0, code


@action("a process is killed in a load", is_fault=True)
def killed_in_a_load(turn: Turn) -> None:
    subject = turn.subjects.any(turn.choose)
    killed(turn, lambda folder: subject.load())
    subject.check(subject.load())


@action("a process is killed in a save", weight=4, is_fault=True)
def killed_in_a_save(turn: Turn) -> None:
    """At a random call: what is on the disk is refused, or right; also where an earlier save is being overwritten."""
    subject = turn.subjects.any(turn.choose)
    model = subject.load()
    options = {"save_original_format": turn.choose.random() < 0.5} if subject.is_fused_only else {}
    folder = turn.folder / "killed"
    if turn.choose.random() < 0.5:
        first = {"save_original_format": turn.choose.random() < 0.5} if subject.is_fused_only else {}
        model.save_pretrained(folder, max_shard_size=SHARDS[any_shards(turn.choose)], **first)
    size = SHARDS[any_shards(turn.choose)]
    killed(turn, lambda name: model.save_pretrained(turn.folder / name, max_shard_size=size, **options))
    check_refused_or_right(folder, turn.subjects, subject)
    model.save_pretrained(folder)
    if subject.saves_as_stock:
        subject.check(subject.load())


def killed(turn: Turn, work: Callable[[str], object]) -> None:
    """Have a child do some work twice, and be killed in the middle of the second time."""

    def child() -> None:
        with Countdown(0, lambda: None) as counted:
            work("whole")
        with Countdown(turn.choose.randrange(counted.calls) + 1, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            work("killed")

    errors = turn.folder / "errors"
    code = forked(child, errors)
    assert code in (0, -signal.SIGKILL), (code, errors.read_text() if errors.exists() else "")


def check_refused_or_right(folder: Path, subjects: Subjects, subject: Subject) -> None:
    """A save that didn't come to its end can't be loaded, or the model is that which was saved."""
    auto = auto_class(subject.config)
    try:
        model = auto.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError, PatcherError):
        return
    stock = subjects.stock_of(subject)
    (stock if class_names(model) == stock.classes else subject).check(model)
