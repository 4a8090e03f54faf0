"""Models are constructed one at a time: whoever waits for a thread that waits for it is told, and nobody else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2VLForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

import patcher
from patcher import PatchConstructionError, Patcher
from patcher.construction import lock
from patcher.construction.lock import ConstructionLock
from tests.support import shared
from tests.support.snapshot import changes, snapshot
from tests.support.tiny import tiny_llama_config, tiny_qwen2_vl_config

TOLD = (
    r"LlamaForCausalLM.* can't be constructed: the thread 'the holder' has been constructing LlamaForCausalLM from "
    r"\S+ since \d\d:\d\d:\d\d, for more than 0\.5 seconds\..*: load that model first"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.5)


class Plain(LlamaMLP):  # type: ignore[misc]
    pass


class OwnRotary(Qwen2VLRotaryEmbedding):  # type: ignore[misc]
    pass


def patched_by(cls: type[LlamaMLP]) -> Patcher:
    return Patcher({"LlamaMLP": cls})


LOADS: dict[str, Callable[[Path], Any]] = {
    "a plain load": LlamaForCausalLM.from_pretrained,
    "a patched load": lambda folder: LlamaForCausalLM.from_pretrained(folder, patcher=patched_by(Plain)),
    "from_config": lambda folder: LlamaForCausalLM._from_config(tiny_llama_config()),
    "resolve": lambda folder: patched_by(Plain).resolve(LlamaForCausalLM, tiny_llama_config()),
    "plan": lambda folder: patcher.plan(tiny_llama_config(), patched_by(Plain), model_class=LlamaForCausalLM),
}


def joined(thread: threading.Thread) -> None:
    thread.join()


def polled(thread: threading.Thread) -> None:
    while thread.is_alive():
        time.sleep(0.02)


@pytest.mark.parametrize(("load", "wait"), [*((load, joined) for load in LOADS), ("a patched load", polled)])
def test_an_init_that_waits_for_a_thread_that_loads_ends(
    load: str, wait: Callable[[threading.Thread], None], checkpoint: Path
) -> None:
    found: queue.Queue[Any] = queue.Queue()

    def attempt() -> None:
        try:
            found.put(LOADS[load](checkpoint))
        except BaseException as error:
            found.put(error)

    class Waits(LlamaMLP):  # type: ignore[misc]
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            if found.empty():
                other = threading.Thread(target=attempt)
                other.start()
                wait(other)

    before = snapshot()
    done: list[Any] = []
    holder = threading.Thread(
        target=lambda: done.append(LlamaForCausalLM.from_pretrained(checkpoint, patcher=patched_by(Waits))),
        name="the holder",
    )
    holder.start()
    holder.join(30)
    assert not holder.is_alive()
    assert type(done[0].model.layers[0].mlp) is Waits  # it went on with what the thread left it
    with pytest.raises(PatchConstructionError, match=TOLD):
        raise found.get()
    assert changes(before) == []
    assert type(LOADS["a patched load"](checkpoint).model.layers[0].mlp) is Plain


def test_what_the_error_advises_works(checkpoint: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        helper = pool.submit(LlamaForCausalLM.from_pretrained, checkpoint).result()

    class HandedOver(LlamaMLP):  # type: ignore[misc]
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.register_buffer("seen", helper.model.norm.weight.detach().clone(), persistent=False)

    model = LlamaForCausalLM.from_pretrained(checkpoint, patcher=patched_by(HandedOver))
    assert model.model.layers[1].mlp.seen.equal(helper.model.norm.weight)


def test_a_construction_that_takes_long_is_waited_for(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it stays below the limit, which is minutes."""
    monkeypatch.setattr(lock, "WAIT_SECONDS", 300.0)

    class Sleeps(LlamaMLP):  # type: ignore[misc]
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            begun.set()
            time.sleep(0.7)

    begun = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(LlamaForCausalLM.from_pretrained, checkpoint, patcher=patched_by(Sleeps))
        assert begun.wait(30)
        others = [pool.submit(LOADS[name], checkpoint) for name in ("a plain load", "a patched load")]
        assert type(slow.result().model.layers[0].mlp) is Sleeps
        assert [type(other.result().model.layers[0].mlp) for other in others] == [LlamaMLP, Plain]


def test_many_that_follow_each_other_are_waited_for() -> None:
    """Each of them waits, for less than is allowed: who holds the lock is always another one."""
    alone = ConstructionLock()

    def hold(name: int) -> int:
        with alone.held_for(str(name)), alone.held_for("inside"):
            time.sleep(0.3)
            return name

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(hold, range(5))) == [0, 1, 2, 3, 4]


def by_hand(_: Path) -> Any:
    config = tiny_qwen2_vl_config()
    config.text_config.dtype = config.vision_config.dtype = "bfloat16"
    return Qwen2VLForConditionalGeneration(config)


def by_hand_in_a_block(folder: Path) -> Any:
    """Its parts are made by `from_config`, each in the type that its config says."""
    with Patcher({"Qwen2VLRotaryEmbedding": OwnRotary}, fusions="qkv").applied():
        return by_hand(folder)


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(load, id=name) for name, load in LOADS.items() if name != "resolve"),
        pytest.param(by_hand, id="by hand"),
        pytest.param(by_hand_in_a_block, id="by hand in a block"),
    ],
)
def test_what_is_the_process_s_is_changed_by_who_holds_the_lock(
    make: Callable[[Path], Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type of new tensors, and the functions of `torch.nn.init`: transformers sets them and puts them back."""
    calls = []

    def held(stock: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            calls.append(lock.construction_lock._lock._is_owned())  # type: ignore[attr-defined]
            return stock(*args, **kwargs)

        return checked

    monkeypatch.setattr(torch, "set_default_dtype", held(torch.set_default_dtype))
    monkeypatch.setattr(PreTrainedModel, "initialize_weights", held(PreTrainedModel.initialize_weights))
    make(checkpoint)
    assert calls
    assert all(calls)


def test_an_error_inside_lets_go() -> None:
    alone = ConstructionLock()
    with pytest.raises(ZeroDivisionError), alone.held_for("a"), alone.held_for("b"):
        raise ZeroDivisionError
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: alone.held_for("c").__enter__()).result() is None
