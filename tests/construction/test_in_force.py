"""What is in force is a value: threads and tasks carry it, and what happens in one changes no other."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from patcher import Patcher, PatcherWarning, UnmatchedPatchError, report
from patcher.construction import init_hooks, lock
from patcher.monkey_patching import clear_patch_mapping, register_patch_mapping
from tests.support.replacements import OwnMLP
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_mixtral_config


class MyMLP(LlamaMLP):
    pass


def kinds(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


# --- row 21: one block, many threads -------------------------------------------------------------------------------


def test_threads_with_a_copied_context_share_a_block(tmp_path: Path) -> None:
    """As `asyncio.to_thread` does it: every model comes out whole, and the block knows what was matched in all."""
    folder = save_tiny(tiny_llama_config(), tmp_path / "llama")
    barrier = threading.Barrier(4)

    def build(number: int) -> list[Any]:
        barrier.wait()
        found = []
        for turn in range(6):
            kind = (number + turn) % 3
            if kind == 0:
                found.append(LlamaForCausalLM(tiny_llama_config()))
            elif kind == 1:
                found.append(MixtralForCausalLM(tiny_mixtral_config()))
            else:
                found.append(LlamaForCausalLM.from_pretrained(folder))
        return found

    with Patcher({"LlamaMLP": MyMLP}, fusions=["qkv"]).applied(), ThreadPoolExecutor(4) as pool:
        contexts = [contextvars.copy_context() for _ in range(4)]
        models = [
            model
            for future in [pool.submit(context.run, build, number) for number, context in enumerate(contexts)]
            for model in future.result()
        ]
    for number, model in enumerate(models):
        is_llama = isinstance(model, LlamaForCausalLM)
        found = report(model)
        assert len(found.fused) == 2, found
        assert len(found.replaced) == (2 if is_llama else 0), found
        model.save_pretrained(tmp_path / str(number))
        again = type(model).from_pretrained(tmp_path / str(number))
        for name, tensor in again.state_dict().items():
            assert "qkv_proj" not in name
            if is_llama and "q_proj" in name:
                rows = model.state_dict()[name.replace("q_proj", "qkv_proj")]
                assert tensor.equal(rows[: tensor.shape[0]])


def test_a_key_that_matched_in_another_thread_of_the_block_has_matched() -> None:
    with Patcher({"LlamaMLP": MyMLP}).applied():
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(LlamaForCausalLM, tiny_llama_config()))
        thread.start()
        thread.join()


def spawning(built: list[Any]) -> type[LlamaMLP]:
    """A replacement whose first object has a thread, with a copy of the context, build a model into `built`."""

    class Spawning(LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if not built:
                built.append(None)
                context = contextvars.copy_context()
                thread = threading.Thread(
                    target=lambda: built.append(context.run(LlamaForCausalLM, tiny_llama_config()))
                )
                thread.start()
                thread.join()

    return Spawning


@pytest.mark.parametrize("way", ["by hand", "load"])
def test_a_context_that_is_copied_in_the_middle_of_a_construction_builds_models_of_its_own(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this thread does nothing but wait for the other, so that one goes on without the lock of a load."""
    monkeypatch.setattr(lock, "WAIT_SECONDS", 1.0)
    built: list[Any] = []
    patcher = Patcher({"LlamaMLP": spawning(built)})
    if way == "by hand":
        with patcher.applied():
            outer = LlamaForCausalLM(tiny_llama_config())
    else:
        outer = LlamaForCausalLM.from_pretrained(save_tiny(tiny_llama_config(), tmp_path), patcher=patcher)
    for model in (outer, built[1]):
        assert len(report(model).replaced) == 2


def test_a_model_that_raised_leaves_its_construction_to_nobody() -> None:
    failed: list[Any] = []

    class Failing(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            failed.append(self)  # somebody holds on to it, as a traceback does
            super().__init__(config)
            raise KeyError("no")

    with Patcher({"LlamaMLP": MyMLP}, fusions="qkv").applied():
        with pytest.raises(KeyError):
            Failing(tiny_llama_config())
        model = LlamaForCausalLM(tiny_llama_config())
    assert len(report(model).replaced) == len(report(model).fused) == 2


# --- one patcher beside another ------------------------------------------------------------------------------------


def test_the_warning_of_one_patcher_survives_the_next(tmp_path: Path) -> None:
    """`strict=False` beside the fusions that a config names: both have something to say, and both do."""
    config = tiny_llama_config()
    config.fusion_config = {"patcher": ["patch_embeddings"]}
    folder = save_tiny(tiny_llama_config(), tmp_path)
    first = Patcher({"LlamaMPL": MyMLP}, strict=False)
    with pytest.raises(UnmatchedPatchError, match="patch_embeddings"):
        LlamaForCausalLM.from_pretrained(folder, config=config, patcher=first)

    config.fusion_config = {"patcher": ["qkv"]}
    with pytest.warns(PatcherWarning, match="no class of the model matches 'LlamaMPL'") as caught:
        model = LlamaForCausalLM.from_pretrained(folder, config=config, patcher=first)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert len(report(model).fused) == 2
    assert "LlamaMPL" in report(model).warnings[0]


def test_all_that_is_not_as_asked_is_in_one_warning(tmp_path: Path) -> None:
    class Longer(LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(3))

    folder = save_tiny(tiny_llama_config(), tmp_path)
    patcher = Patcher({"LlamaMLP": Longer, "LlamaMPL": MyMLP}, strict=False)
    with pytest.warns(PatcherWarning, match=r"(?s)'LlamaMPL'.*mlp\.scale") as caught:
        model = LlamaForCausalLM.from_pretrained(folder, patcher=patcher)
    assert len(caught) == 1
    assert len(report(model).warnings) == 2


def test_apply_goes_by_its_own_patcher_alone(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(save_tiny(tiny_llama_config(), tmp_path))
    try:
        with Patcher({"LlamaMLP": MyMLP}, strict=False).applied():
            assert "MyMLP" in kinds(LlamaForCausalLM(tiny_llama_config()))
            assert kinds(Patcher().apply(model)) == kinds(model)
            assert "MyMLP" not in kinds(Patcher(fusions="qkv").apply(model))
        register_patch_mapping({"LlamaMLP": OwnMLP})
        stock = Patcher().apply(model)
        assert kinds(stock) == kinds(model)
        assert report(stock).replaced == ()
    finally:
        clear_patch_mapping()


def test_conversions_of_a_live_model_are_found_without_touching_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may run the model while an adapter is loaded into it: no class changes, not even for a moment."""
    from transformers import conversion_mapping

    class OwnModel(LlamaModel):
        pass

    folder = save_tiny(tiny_llama_config(), tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"LlamaModel": OwnModel}))
    stock = conversion_mapping.get_checkpoint_conversion_mapping
    asked: list[str] = []

    def asking(name: str) -> Any:
        asked.append(name)
        assert type(model.model) is OwnModel
        return stock(name)

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", asking)
    conversion_mapping.get_model_conversion_mapping(model)
    assert "LlamaModel" in asked
    assert "OwnModel" not in asked


# --- forks ---------------------------------------------------------------------------------------------------------


def in_a_fork(check: Callable[[], None]) -> None:
    """Run a check in a fork of this process, which has only this thread."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            check()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    assert not said, said


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_inherits_no_gate_and_no_lock_of_another_thread(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path)
    before = LlamaMLP.__init__
    reached, go_on = threading.Event(), threading.Event()

    class Waiting(LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            reached.set()
            assert go_on.wait(60)

    def check() -> None:
        assert LlamaMLP.__init__ is before
        assert not init_hooks._Cover.active
        assert init_hooks._watcher not in sys.meta_path
        assert "MyMLP" not in kinds(LlamaForCausalLM.from_pretrained(folder))
        assert "MyMLP" in kinds(LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"LlamaMLP": MyMLP})))
        assert LlamaMLP.__init__ is before

    thread = threading.Thread(
        target=lambda: LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"LlamaMLP": Waiting}))
    )
    thread.start()
    try:
        assert reached.wait(60)
        assert LlamaMLP.__init__ is not before
        in_a_fork(check)
    finally:
        go_on.set()
        thread.join()
    assert LlamaMLP.__init__ is before


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_inside_a_block_is_inside_the_block() -> None:
    def check() -> None:
        assert "MyMLP" in kinds(LlamaForCausalLM(tiny_llama_config()))

    with Patcher({"LlamaMLP": MyMLP}).applied():
        in_a_fork(check)
        check()
