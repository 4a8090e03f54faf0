"""A minute of the soak; and each of its checks, seen to find what it is there for."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import Patcher
from tests.soak import memory
from tests.soak.__main__ import ALLOWED, report
from tests.soak.injection import Countdown
from tests.soak.leftovers import KINDS, Before
from tests.soak.processes import check_refused_or_right
from tests.soak.stock import write
from tests.soak.subjects import Subjects
from tests.soak.worker import Result
from tests.support.replacements import OwnMLP
from tests.support.sampling import sampled
from tests.support.tiny import tiny_llama_config

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_a_minute_of_it() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak", "--seconds", "60", "--processes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 failures\n")


# --- what is left ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before() -> Before:
    with Patcher({"LlamaMLP": OwnMLP}).applied():
        LlamaMLP(tiny_llama_config())  # whatever is made once is there then
    return Before.now()


def setting(owner: Any, name: str, value: Any, stack: ExitStack) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def thread(stack: ExitStack) -> None:
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    stack.callback(waiting.join)
    stack.callback(over.set)


def mapped(stack: ExitStack, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(4096))
    with (folder / "model.safetensors").open("rb") as file:
        stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def gate(stack: ExitStack, folder: Path) -> None:
    stack.enter_context(Patcher({"LlamaMLP": OwnMLP}).applied())
    LlamaMLP(tiny_llama_config())


def child(stack: ExitStack) -> None:
    sleeping = subprocess.Popen(["sleep", "600"])
    stack.callback(sleeping.wait)
    stack.callback(sleeping.kill)


def held(value: object, stack: ExitStack) -> None:
    stack.callback([value].clear)


#: kind of what is left -> how to leave it until the stack is closed
LEAKS: dict[str, Callable[[ExitStack, Path], object]] = {
    "attribute": lambda stack, folder: setting(modeling_llama, "LlamaMLP", OwnMLP, stack),
    "thread": lambda stack, folder: thread(stack),
    "descriptor": lambda stack, folder: stack.enter_context((folder / "file").open("w")),
    "mapped file": mapped,
    "imported module": lambda stack, folder: setting(
        sys, "modules", sys.modules | {"made": ModuleType("made")}, stack
    ),
    "gate": gate,
    "class": lambda stack, folder: held(type("Left", (nn.Module,), {}), stack),
    "object": lambda stack, folder: held(nn.Linear(2, 2), stack),
    "child process": lambda stack, folder: child(stack),
    "environment": lambda stack, folder: stack.callback(os.environ.pop, os.environ.setdefault("LEFT", "LEFT")),
}


def test_every_kind_is_tried() -> None:
    assert set(LEAKS) == {"attribute", *KINDS}


@pytest.mark.parametrize("kind", sampled(LEAKS, {"object"}))
def test_what_is_left_is_found(kind: str, before: Before, tmp_path: Path) -> None:
    with ExitStack() as stack:
        LEAKS[kind](stack, tmp_path)
        assert any(line.startswith(f"{kind}: ") for line in before.left())
    assert list(before.left()) == []


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leak",
    [
        pytest.param(lambda: bytearray(100_000), id="bytes", marks=pytest.mark.nightly),
        pytest.param(lambda: torch.zeros(25_000), id="tensor"),
    ],
)
@pytest.mark.parametrize("times", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_leak_of_100_kilobytes_a_load_is_seen(leak: Callable[[], object], times: int, subjects: Subjects) -> None:
    kept: list[object] = []
    samples = []
    for number in range(6):
        for _ in range(3):
            subjects.patched["projections"].load()
            kept += [leak() for _ in range(times)]
        samples.append((3 * number, memory.held()))

    assert (memory.growth(samples) > ALLOWED) == (times > 0), samples


def test_a_single_step_is_no_growth() -> None:
    assert memory.growth([(0, 0), (10, 10), (20, 10_000_020), (30, 10_000_030)]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"failures": ["plain load: wrong"]},
        {"left": ["thread: left"]},
        {"held": [(0, 0), (1, 2 * ALLOWED), (2, 4 * ALLOWED)]},
    ],
    ids=["nothing", "a failure", "something left", "memory"],
)
def test_whatever_is_wrong_makes_the_program_fail(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Result(**changes), Result()], []) == (1 if changes else 0)
    assert f"{1 if changes else 0} failures" in capsys.readouterr().out


# --- what is loaded --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subjects]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("soak")
    write(folder)
    yield Subjects(folder)
    torch.set_num_threads(threads)


#: what may be wrong about a loaded model
WRONG: dict[str, Callable[[Any], object]] = {
    "a class": lambda model: setattr(model.model.layers[1], "mlp", OwnMLP(model.config)),
    "a weight": lambda model: model.model.layers[0].self_attn.o_proj.weight.data.mul_(1.5),
    "a layer": lambda model: model.model.layers.pop(1),
    "meta": lambda model: model.model.norm.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("patch", [None, "projections"])
def test_a_wrong_model_is_seen(wrong: str, patch: str | None, subjects: Subjects, tmp_path: Path) -> None:
    subject = subjects.plain["llama"] if patch is None else subjects.patched[patch]
    model = subject.load()
    subject.check(model)
    WRONG[wrong](model)

    with pytest.raises(AssertionError):
        subject.check(model)


def test_a_wrong_file_is_seen(subjects: Subjects, tmp_path: Path) -> None:
    subject = subjects.patched["projections"]
    model = subject.load()
    model.save_pretrained(tmp_path / "right")
    check_refused_or_right(tmp_path / "right", subjects, subject)
    subject.check_saved(tmp_path / "right")
    model.model.norm.weight.data.add_(1)
    model.save_pretrained(tmp_path / "wrong")

    with pytest.raises(AssertionError):
        check_refused_or_right(tmp_path / "wrong", subjects, subject)
    with pytest.raises(AssertionError, match="differ from stock's"):
        subject.check_saved(tmp_path / "wrong")


def test_faults_come_out_of_all_parts_of_a_load(subjects: Subjects) -> None:
    subject = subjects.patched["projections"]
    seen: list[str] = []

    def note() -> None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            seen.append(frame.f_code.co_name)
            frame = frame.f_back

    subject.load()
    with Countdown(0, note) as counted:
        subject.load()
    assert counted.calls > 1000
    for call in range(1, counted.calls, counted.calls // 30):
        with Countdown(call, note):
            subject.load()
    assert {"from_pretrained", "__init__", "convert_and_load_state_dict_in_model"} <= set(seen)
