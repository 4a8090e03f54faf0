"""What is in force is a value: threads and tasks carry it, and what happens in one changes no other."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import os
import signal
import threading
import traceback
from collections import UserDict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import EncoderDecoderModel, LlamaForCausalLM, MixtralForCausalLM
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from patcher import (
    PatchConstructionError,
    Patcher,
    PatcherWarning,
    UnmatchedPatchError,
    original_state_dict,
    report,
)
from patcher.construction import lock
from patcher.construction.in_force import entered
from patcher.fusions import Fusion
from patcher.monkey_patching import clear_patch_mapping, register_patch_mapping
from tests.support.replacements import OwnMLP, OwnNorm
from tests.support.snapshot import changes, snapshot
from tests.support.tiny import save_tiny, tiny_bert_config, tiny_llama_config, tiny_mixtral_config


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
    """While this thread does nothing but wait for the other, so that one goes on without the lock of a load.

    A block is carried by the context, a load is of its thread.
    """
    monkeypatch.setattr(lock, "WAIT_SECONDS", 1.0)
    built: list[Any] = []
    patcher = Patcher({"LlamaMLP": spawning(built)})
    if way == "by hand":
        with patcher.applied():
            outer = LlamaForCausalLM(tiny_llama_config())
    else:
        outer = LlamaForCausalLM.from_pretrained(save_tiny(tiny_llama_config(), tmp_path), patcher=patcher)
    assert len(report(outer).replaced) == 2
    assert ("Spawning" in kinds(built[1])) == (way == "by hand")


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


# --- row 32: blocks end in any order --------------------------------------------------------------------------------


def block(patcher: Patcher) -> Iterator[None]:
    with patcher.applied():
        yield


MINE, OWN = Patcher({"LlamaMLP": MyMLP}), Patcher({"LlamaMLP": OwnMLP, "LlamaRMSNorm": OwnNorm})


def built() -> str:
    """What a block that is in force makes of the two classes that are named."""
    model = LlamaForCausalLM(tiny_llama_config())
    return f"{type(model.model.layers[0].mlp).__name__} {type(model.model.norm).__name__}"


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    before = snapshot()
    yield
    assert built() == "LlamaMLP LlamaRMSNorm"
    assert changes(before) == []
    assert entered() == ()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.usefixtures("nothing_is_left")
def test_two_generators_end_in_any_order(first: int) -> None:
    generators = [block(MINE), block(OWN)]
    next(generators[0])
    assert built() == "MyMLP LlamaRMSNorm"
    next(generators[1])
    assert built() == "OwnMLP OwnNorm"
    next(generators.pop(first), None)
    assert built() == ("OwnMLP OwnNorm" if first == 0 else "MyMLP LlamaRMSNorm")
    next(generators.pop(), None)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.usefixtures("nothing_is_left")
def test_equal_blocks_each_take_out_their_own(order: tuple[int, ...]) -> None:
    """Three of one patcher: how many are left shows in what is in force."""
    generators = [block(MINE) for _ in range(3)]
    for each in generators:
        next(each)
    assert built() == "MyMLP LlamaRMSNorm"  # to all three
    for left, number in zip((2, 1, 0), order, strict=True):
        next(generators[number], None)
        assert [entry.patcher for entry in entered()] == [MINE] * left


@pytest.mark.parametrize("how", ["closed", "thrown into", "forgotten"])
@pytest.mark.usefixtures("nothing_is_left")
def test_a_generator_that_is_ended_from_outside_ends_its_block_alone(how: str) -> None:
    outer, inner = block(OWN), block(MINE)
    next(outer)
    next(inner)
    if how == "closed":
        outer.close()  # type: ignore[attr-defined]
    elif how == "thrown into":
        with pytest.raises(KeyError):
            outer.throw(KeyError("no"))  # type: ignore[attr-defined]
    else:
        del outer
        gc.collect()
    assert built() == "MyMLP LlamaRMSNorm"
    next(inner, None)


@pytest.mark.usefixtures("nothing_is_left")
def test_async_generators_that_other_tasks_close() -> None:
    """Each runs in the context of whoever asks it for its next value: it begins in one task and ends in another."""

    async def block(patcher: Patcher) -> AsyncIterator[None]:
        with patcher.applied():
            yield

    async def run() -> None:
        first, second = block(MINE), block(OWN)
        await anext(first)
        await anext(second)
        assert built() == "OwnMLP OwnNorm"
        await asyncio.create_task(first.aclose())  # type: ignore[attr-defined]
        assert built() == "OwnMLP OwnNorm"
        await asyncio.create_task(second.aclose())  # type: ignore[attr-defined]
        assert built() == "LlamaMLP LlamaRMSNorm"

    asyncio.run(run())


@pytest.mark.usefixtures("nothing_is_left")
def test_tasks_know_nothing_of_the_blocks_of_each_other() -> None:
    async def run(patcher: Patcher, expected: str) -> None:
        assert built() == "LlamaMLP LlamaRMSNorm"
        with patcher.applied():
            for _ in range(3):
                await asyncio.sleep(0)
                assert built() == expected
                assert await asyncio.to_thread(built) == expected

    async def both() -> None:
        await asyncio.gather(run(MINE, "MyMLP LlamaRMSNorm"), run(OWN, "OwnMLP OwnNorm"))

    asyncio.run(both())


@pytest.mark.usefixtures("nothing_is_left")
def test_a_context_that_outlives_a_block_is_outside_of_it() -> None:
    with OWN.replace(fusions="qkv").applied():
        assert built() == "OwnMLP OwnNorm"
        context = contextvars.copy_context()
    assert context.run(built) == "LlamaMLP LlamaRMSNorm"
    assert report(context.run(LlamaForCausalLM, tiny_llama_config())).fused == ()
    with MINE.applied():
        assert built() == "MyMLP LlamaRMSNorm"
        assert context.run(built) == "LlamaMLP LlamaRMSNorm"


# --- row 40: what loads its parts one by one -----------------------------------------------------------------------


class Own(BertIntermediate):
    pass


ATTENDED: list[None] = []


def own_attention(*args: Any, **kwargs: Any) -> Any:
    ATTENDED.append(None)
    return modeling_bert.eager_attention_forward(*args, **kwargs)


@pytest.mark.parametrize(
    "given",
    [
        {"class_mapping": {"BertIntermediate": Own}},
        {"class_mapping": {"BertIntermediate": Own}, "fusions": "qkv"},
        {"module_mapping": {"**.intermediate": Own}},
        {
            "class_mapping": {"BertIntermediate": Own},
            "function_mapping": {"transformers.models.bert.modeling_bert:eager_attention_forward": own_attention},
        },
    ],
    ids=["classes", "fusions", "paths", "functions"],
)
def test_a_model_that_loads_its_parts_one_by_one(given: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny(tiny_bert_config(), tmp_path / "bert")
    eager = {"encoder_attn_implementation": "eager", "decoder_attn_implementation": "eager"}
    stock = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder, **eager)
    with Patcher(**given).applied():
        model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder, **eager)
    layers = [*model.encoder.encoder.layer, *model.decoder.bert.encoder.layer]
    assert {type(layer.intermediate) for layer in layers} == {Own}
    assert len(report(model).replaced) == len(layers)
    assert bool(report(model).fused) == ("fusions" in given)
    stock.load_state_dict(original_state_dict(model))  # what the folder lacks, each has drawn for itself
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": torch.tensor([[6, 7]])}
    with torch.no_grad():
        ATTENDED.clear()
        assert torch.allclose(model.eval()(**inputs).logits, stock.eval()(**inputs).logits, atol=1e-5)
        assert len(ATTENDED) == ("function_mapping" in given) * 6  # the decoder attends to the encoder as well
    model.save_pretrained(tmp_path / "saved")
    stock.save_pretrained(tmp_path / "stock")
    saved, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "stock"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in expected)


# --- where a model that is built by hand begins and ends -----------------------------------------------------------


def test_what_an_init_builds_after_post_init_belongs_to_the_model() -> None:
    class Longer(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.extra = LlamaMLP(config)
            self.other = LlamaModel(config)
            self.post_init()

    with Patcher({"LlamaMLP": MyMLP}).applied():
        model = Longer(tiny_llama_config())
    assert [path for path, *_ in report(model).replaced if "layers" not in path] == ["extra"]
    assert len(report(model).replaced) == 5


def test_a_class_of_models_that_is_defined_in_a_block_is_an_error() -> None:
    before = snapshot()
    with Patcher({"LlamaMLP": MyMLP}, strict=False).applied():

        class Late(LlamaForCausalLM):
            def __init__(self, config: Any) -> None:
                super().__init__(config)

        with pytest.raises(PatchConstructionError, match=r"Late\.__init__ was called without .* defined in the block"):
            Late(tiny_llama_config())
        LlamaForCausalLM(tiny_llama_config())
    assert changes(before) == []


def test_a_class_that_another_tool_gives_an_init_of_its_own_in_a_block_is_an_error() -> None:
    class Rebound(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)

    def anew(self: Any, config: Any) -> None:
        LlamaForCausalLM.__init__(self, config)

    with Patcher({"LlamaMLP": MyMLP}, strict=False).applied():
        Rebound.__init__ = anew  # type: ignore[method-assign]
        with pytest.raises(PatchConstructionError, match=r"Rebound\.__init__ was called without .*another tool"):
            Rebound(tiny_llama_config())
        LlamaForCausalLM(tiny_llama_config())


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
        signal.alarm(60)
        try:
            check()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    _, status = os.waitpid(child, 0)
    assert not said, said
    assert status == 0, "it hangs" if status == signal.SIGALRM else status


@contextmanager
def a_thread_in(work: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Another thread is in the middle of some work, where it calls what the work is given."""
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=work, args=(wait,))
    thread.start()
    try:
        assert reached.wait(60)
        yield
    finally:
        go_on.set()
        thread.join()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_inherits_no_gate_and_no_lock_of_another_thread(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path)
    before = LlamaMLP.__init__

    def load(wait: Callable[[], None]) -> None:
        class Waiting(LlamaMLP):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                wait()

        LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"LlamaMLP": Waiting}))

    def check() -> None:
        assert type(LlamaMLP(tiny_llama_config())) is LlamaMLP
        assert "MyMLP" not in kinds(LlamaForCausalLM.from_pretrained(folder))
        assert "MyMLP" in kinds(LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"LlamaMLP": MyMLP})))

    with a_thread_in(load):
        assert LlamaMLP.__init__ is not before
        in_a_fork(check)
    assert LlamaMLP.__init__ is before


class WaitingFusion(Fusion):
    """Its class is made while the process forks."""

    target_modules_patterns = (r"\.mlp$",)

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.wait = wait

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        self.wait()
        return FusedMLP


class FusedMLP(LlamaMLP):
    from_module = classmethod(lambda cls, module: cls(module.config))


class WaitingMapping(UserDict[str, Any]):
    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.wait = wait

    def keys(self) -> Any:
        self.wait()
        return super().keys()


def apply_a_fusion(wait: Callable[[], None]) -> None:
    Patcher(fusions=[WaitingFusion(wait)]).apply(LlamaForCausalLM(tiny_llama_config()))


def register(wait: Callable[[], None]) -> None:
    register_patch_mapping(WaitingMapping(wait))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("work", [apply_a_fusion, register])
def test_a_child_can_do_what_another_thread_did_at_the_fork(work: Callable[..., None], tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path)

    def check() -> None:
        model = LlamaForCausalLM.from_pretrained(folder, patcher=Patcher(fusions=["qkv"]))
        assert "FusedLlamaAttention" in kinds(model)
        register_patch_mapping({"LlamaMLP": MyMLP})
        assert "MyMLP" in kinds(LlamaForCausalLM.from_pretrained(folder))

    with a_thread_in(work):
        in_a_fork(check)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_inside_a_block_is_inside_the_block() -> None:
    def check() -> None:
        assert "MyMLP" in kinds(LlamaForCausalLM(tiny_llama_config()))

    with Patcher({"LlamaMLP": MyMLP}).applied():
        in_a_fork(check)
        check()
