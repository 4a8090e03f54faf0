"""Hundreds of loads in threads, with failures in between: everybody gets what they asked for, nothing stays."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, Concatenate, LlamaConfig, LlamaForCausalLM, WeightConverter
from transformers.core_model_loading import ConversionOps
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from patcher import PatchConstructionError, Patcher, PatcherError
from tests.support import fresh
from tests.support.replacements import JoinedMLP
from tests.support.snapshot import changes, snapshot
from tests.support.tiny import save_tiny, tiny_llama_config

ROOT = Path(__file__).parents[2]


class FirstMLP(LlamaMLP):
    pass


class SecondMLP(LlamaMLP):
    pass


class OtherNorm(LlamaRMSNorm):
    pass


class FailingMLP(LlamaMLP):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        raise ValueError("on purpose")


class InterruptedMLP(LlamaMLP):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        raise KeyboardInterrupt


class Failing(ConversionOps):
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("on purpose")


class Interrupted(ConversionOps):
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


def joining(operation: ConversionOps) -> Patcher:
    sources = ["gate_proj.weight", "up_proj.weight"]
    return Patcher(
        {"LlamaMLP": JoinedMLP},
        extra_weight_conversions=WeightConverter(sources, ["gate_up_proj.weight"], operations=[operation]),
    )


#: patcher, the class of the MLP that it leads to or the error; "cut off" reads a checkpoint whose last file is cut off
LOADS: dict[str, tuple[Patcher | None, type[Any]]] = {
    "none": (None, LlamaMLP),
    "first": (Patcher({"LlamaMLP": FirstMLP}), FirstMLP),
    "second, by expression": (Patcher({"Llama.*MLP$": SecondMLP, "LlamaRMSNorm": OtherNorm}), SecondMLP),
    "joined": (joining(Concatenate(dim=0)), JoinedMLP),
    "fails in __init__": (Patcher({"LlamaMLP": FailingMLP}), PatchConstructionError),
    "interrupted in __init__": (Patcher({"LlamaMLP": InterruptedMLP}), KeyboardInterrupt),
    "fails in a converter": (joining(Failing()), PatcherError),
    "interrupted in a converter": (joining(Interrupted()), KeyboardInterrupt),
    "cut off": (joining(Concatenate(dim=0)), SafetensorError),
    "cut off, no patcher": (None, SafetensorError),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", autouse=True)
def _cut_off(checkpoint: Path) -> None:
    """Beside the checkpoint, one in shards that breaks off in the middle of reading: its last shard is cut short."""
    folder = checkpoint / "cut off"
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder, max_shard_size="100KB")
    *whole, last = sorted(folder.glob("*.safetensors"))
    assert whole
    last.write_bytes(last.read_bytes()[:-100])


def load(checkpoint: Path, name: str) -> None:
    patcher, expected = LOADS[name]
    if name.startswith("cut off"):
        checkpoint = checkpoint / "cut off"
    if issubclass(expected, BaseException):
        with pytest.raises(expected):
            AutoModelForCausalLM.from_pretrained(checkpoint, patcher=patcher)
        return
    model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=patcher)
    assert {type(layer.mlp) for layer in model.model.layers} == {expected}
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def build_by_hand() -> None:
    """A class that another thread may be replacing is what it always was: built, pickled, subclassed, compared."""
    module = LlamaMLP(tiny_llama_config())
    assert type(module) is LlamaMLP
    assert modeling_llama.LlamaMLP is LlamaMLP
    assert module.gate_proj.weight.device.type == "cpu"
    assert type(pickle.loads(pickle.dumps(module))) is LlamaMLP
    assert pickle.loads(pickle.dumps(LlamaMLP)) is LlamaMLP
    derived = type("Derived", (LlamaMLP,), {})
    assert isinstance(derived(tiny_llama_config()), LlamaMLP)


def build_in_a_block() -> None:
    with LOADS["first"][0].applied():  # type: ignore[union-attr]
        assert type(LlamaMLP(tiny_llama_config())) is FirstMLP
    assert type(LlamaMLP(tiny_llama_config())) is LlamaMLP


def run_in_threads(work: Callable[[random.Random], None], threads: int, rounds: int) -> None:
    errors: list[BaseException] = []

    def loop(seed: int) -> None:
        chooser = random.Random(seed)
        try:
            for _ in range(rounds):
                work(chooser)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=loop, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("rounds", [15, pytest.param(60, marks=pytest.mark.nightly)])
def test_hundreds_of_loads_in_threads_with_failures_leave_nothing(rounds: int, checkpoint: Path) -> None:
    load(checkpoint, "joined")  # whatever is imported or made once is there now
    before = snapshot()
    done: list[str] = []

    def work(chooser: random.Random) -> None:
        what = chooser.choice([*LOADS, *LOADS, "by hand", "in a block"])
        done.append(what)
        if what == "by hand":
            build_by_hand()
        elif what == "in a block":
            build_in_a_block()
        else:
            load(checkpoint, what)

    run_in_threads(work, threads=6, rounds=rounds)
    assert len(done) == 6 * rounds
    assert set(done) == {*LOADS, "by hand", "in a block"}
    assert changes(before) == []


@pytest.mark.nightly
def test_control_run_without_any_patcher(checkpoint: Path) -> None:
    """Loads alone, in threads: what goes wrong in the test above would not be transformers' own doing."""
    before = snapshot()
    run_in_threads(lambda chooser: load(checkpoint, "none"), threads=4, rounds=25)
    assert changes(before) == []


def test_loads_of_mixed_dtypes_in_threads_get_their_dtype(checkpoint: Path) -> None:
    def work(chooser: random.Random) -> None:
        dtype = chooser.choice([torch.float32, torch.bfloat16, torch.float16])
        patcher = chooser.choice([None, LOADS["joined"][0]])
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, patcher=patcher)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert not model.lm_head.weight.isnan().any()

    run_in_threads(work, threads=4, rounds=25)


@contextmanager
def paused(checkpoint: Path, patcher: Patcher, cls: type[nn.Module]) -> Iterator[None]:
    """A load under `patcher` in another thread, stopped inside of the first `__init__` of `cls`."""
    inside, go_on, errors = threading.Event(), threading.Event(), []
    original = cls.__init__

    def waiting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        inside.set()
        assert go_on.wait(60)

    def work() -> None:
        try:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=patcher)
            assert {type(layer.mlp) for layer in model.model.layers} == {cls}
        except BaseException as error:
            errors.append(error)

    cls.__init__ = waiting  # type: ignore[method-assign]
    thread = threading.Thread(target=work)
    try:
        thread.start()
        assert inside.wait(60)
        yield
    finally:
        go_on.set()
        thread.join()
        cls.__init__ = original  # type: ignore[method-assign]
    assert errors == []


def test_stock_class_is_itself_for_other_threads_while_a_load_is_paused(checkpoint: Path) -> None:
    with paused(checkpoint, Patcher({"LlamaMLP": FirstMLP}), FirstMLP):
        build_by_hand()
        with Patcher({"LlamaMLP": SecondMLP}).applied():
            assert type(LlamaMLP(tiny_llama_config())) is SecondMLP
        build_by_hand()


@contextmanager
def naively_replaced(cls: type[nn.Module], replacement: type[nn.Module]) -> Iterator[None]:
    """How it is done without this package: the name is rebound for the whole process."""
    setattr(modeling_llama, cls.__name__, replacement)
    yield
    setattr(modeling_llama, cls.__name__, cls)


def test_the_naive_way_fails_the_same_checks() -> None:
    before = snapshot()
    with pytest.raises(AssertionError), naively_replaced(LlamaMLP, FirstMLP):
        build_by_hand()
    assert changes(before) != []  # an exception in the block has left it replaced
    modeling_llama.LlamaMLP = LlamaMLP  # type: ignore[misc]
    assert changes(before) == []


def test_each_task_and_the_threads_that_it_asks_have_its_patcher(checkpoint: Path) -> None:
    gc.collect()  # contexts of torch that tests before this one have left to the garbage collector end here
    before = snapshot()

    async def work(name: str) -> None:
        patcher, cls = LOADS[name]
        if patcher is None:
            module = LlamaMLP(tiny_llama_config())
            assert type(module) is cls
            return
        with patcher.applied():
            for _ in range(5):
                await asyncio.sleep(0)  # the others go on inside of their blocks meanwhile
                model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, checkpoint)
                assert {type(layer.mlp) for layer in model.model.layers} == {cls}

    async def together() -> None:
        await asyncio.gather(*(work(name) for name in ("first", "none", "second, by expression", "joined", "none")))

    asyncio.run(together())
    assert changes(before) == []


def test_a_block_that_another_thread_closes_leaves_no_gate() -> None:
    """A generator, of a fixture or of asyncio: Python says that a context variable can't be reset there."""
    before = snapshot()

    def block() -> Iterator[None]:
        with LOADS["first"][0].applied():  # type: ignore[union-attr]
            assert type(LlamaMLP(tiny_llama_config())) is FirstMLP
            yield

    generator, errors = block(), []

    def close() -> None:
        try:
            generator.close()  # type: ignore[attr-defined]
        except ValueError as error:
            errors.append(str(error))

    copy_context().run(next, generator)
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert not errors
    assert changes(before) == []


TIED = {"tie_word_embeddings": True}


def test_models_built_by_hand_beside_loads_are_tied_and_leave_torch_as_it_was(checkpoint: Path) -> None:
    """A load unties what is built anywhere, and two that initialise at once leave `torch.nn.init` rebound for good."""
    before = snapshot()

    def work(chooser: random.Random) -> None:
        if chooser.random() < 0.5:
            load(checkpoint, "none")
        else:
            model = LlamaForCausalLM(tiny_llama_config(**TIED))
            assert model.lm_head.weight is model.model.embed_tokens.weight

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run_in_threads(work, threads=4, rounds=20)
    finally:
        sys.setswitchinterval(interval)
    assert changes(before) == []


def forks_in_the_middle_of_loads(checkpoint: Path) -> None:
    """Run in a process of its own: forked children look at what a construction rebinds for the whole process."""
    load(checkpoint, "first")  # whatever is imported or made once is there now
    before, over = snapshot(), threading.Event()

    def loads() -> None:
        while not over.is_set():
            load(checkpoint, "first")

    thread = threading.Thread(target=loads)
    thread.start()
    try:
        for _ in range(40):
            child = os.fork()
            if not child:
                if found := changes(before):
                    print(found, file=sys.stderr, flush=True)
                os._exit(len(found) > 0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        over.set()
        thread.join()


@pytest.mark.process
def test_a_fork_waits_for_what_another_thread_constructs(checkpoint: Path) -> None:
    code = (
        f"from tests.construction.test_concurrency import *; forks_in_the_middle_of_loads(Path({str(checkpoint)!r}))"
    )
    fresh.run(code)


FORK = """
import os, sys, threading
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from patcher import Patcher

inside, go_on = threading.Event(), threading.Event()

class Waiting(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        inside.set()
        assert go_on.wait(60)

class Other(LlamaMLP):
    pass

patcher = Patcher({"LlamaMLP": Waiting})
thread = threading.Thread(target=lambda: LlamaForCausalLM.from_pretrained(sys.argv[1], patcher=patcher))
thread.start()
inside.wait(60)
child = os.fork()
if not child:
    code = 1
    try:
        stock = LlamaForCausalLM.from_pretrained(sys.argv[1])
        patched = LlamaForCausalLM.from_pretrained(sys.argv[1], patcher=Patcher({"LlamaMLP": Other}))
        code = 0 if (type(stock.model.layers[0].mlp), type(patched.model.layers[0].mlp)) == (LlamaMLP, Other) else 2
    finally:
        os._exit(code)
import time
deadline = time.monotonic() + 60
while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
    time.sleep(0.05)
go_on.set()
thread.join()
if not done[0]:
    os.kill(child, 9)
    raise SystemExit("the child hangs")
raise SystemExit(os.waitstatus_to_exitcode(done[1]))
"""


@pytest.mark.process
@pytest.mark.nightly
def test_a_process_forked_in_the_middle_of_a_load_can_load(checkpoint: Path) -> None:
    """The lock that the load in the other thread holds has no owner in the child."""
    fresh.run(FORK, checkpoint)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids=["first in, first out", "first in, last out"])
def test_overlapping_blocks_end_in_any_order(order: tuple[str, str]) -> None:
    before = snapshot()
    classes = {"a": FirstMLP, "b": SecondMLP}
    entered = {name: threading.Event() for name in classes}
    leave = {name: threading.Event() for name in classes}
    left = {name: threading.Event() for name in classes}
    seen: dict[str, list[type]] = {name: [] for name in classes}

    def work(name: str) -> None:
        with Patcher({"LlamaMLP": classes[name]}).applied():
            seen[name].append(type(LlamaMLP(tiny_llama_config())))
            entered[name].set()
            leave[name].wait(60)
            seen[name].append(type(LlamaMLP(tiny_llama_config())))
        seen[name].append(type(LlamaMLP(tiny_llama_config())))
        left[name].set()

    threads = {name: threading.Thread(target=work, args=(name,)) for name in classes}
    threads["a"].start()
    assert entered["a"].wait(60)
    threads["b"].start()
    assert entered["b"].wait(60)
    assert type(LlamaMLP(tiny_llama_config())) is LlamaMLP
    for name in order:
        leave[name].set()
        assert left[name].wait(60)
    for thread in threads.values():
        thread.join()
    assert seen == {"a": [FirstMLP, FirstMLP, LlamaMLP], "b": [SecondMLP, SecondMLP, LlamaMLP]}
    assert changes(before) == []
