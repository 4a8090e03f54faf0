"""Models that come to be: read from a checkpoint, built by hand, in blocks, threads, tasks and pools."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import PatchedWeightsError, Patcher, monkey_patching, plan
from patcher.construction.lock import construction_lock
from tests.soak.stock import auto_class
from tests.soak.subjects import Subject, any_shards
from tests.soak.table import Turn, action
from tests.support.replacements import OtherMLP, OwnMLP
from tests.support.tiny import tiny_inputs, tiny_llama_config


class OwnGPT2MLP(GPT2MLP):
    pass


@action("plain load", weight=6)
def plain_load(turn: Turn) -> None:
    subject = turn.subjects.any_plain(turn.choose)
    subject.check(subject.load(any_shards(turn.choose)))


@action("patched load", weight=8)
def patched_load(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    subject.check(subject.load(any_shards(turn.choose)))


@action("load in a block", weight=2)
def load_in_a_block(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    assert subject.patcher is not None
    # What is in force further out has nothing to do here, so it may not be strict about it.
    outer = Patcher({"GPT2MLP": OwnGPT2MLP}, strict=False).applied() if turn.choose.random() < 0.3 else nullcontext()
    with outer, subject.patcher.applied():
        subject.check(from_folder(subject, turn.choose))
    plain = turn.subjects.any_plain(turn.choose)
    plain.check_built(plain.load())


def from_folder(subject: Subject, choose: random.Random) -> Any:
    """A load by what is in force around it."""
    return auto_class(subject.config).from_pretrained(subject.folder / any_shards(choose))


@action("contexts shared by threads", weight=2)
def shared_contexts(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    assert subject.patcher is not None
    seeds = [turn.choose.random() for _ in range(3)]
    with subject.patcher.applied(), ThreadPoolExecutor(3) as pool:
        contexts = [copy_context() for _ in seeds]
        models = [
            pool.submit(context.run, from_folder, subject, random.Random(seed))
            for context, seed in zip(contexts, seeds, strict=True)
        ]
        for model in models:
            subject.check(model.result())


@action("asyncio tasks", weight=2)
def asyncio_tasks(turn: Turn) -> None:
    subjects = [turn.subjects.any(turn.choose) for _ in range(3)]

    async def work(subject: Subject) -> None:
        with subject.patcher.applied() if subject.patcher is not None else nullcontext():
            for _ in range(2):
                await asyncio.sleep(0)  # the others go on inside of their blocks meanwhile
                subject.check(await asyncio.to_thread(from_folder, subject, random.Random(turn.choose.random())))

    async def together() -> None:
        await asyncio.gather(*map(work, subjects))

    asyncio.run(together())


@action("by hand in a block", weight=3)
def by_hand(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    assert subject.patcher is not None
    with subject.patcher.applied():
        subject.check_built(subject.model_class(subject.config))
    plain = turn.subjects.any_plain(turn.choose)
    plain.check_built(plain.model_class(plain.config))


@action("from_config", weight=2)
def from_config(turn: Turn) -> None:
    subject = turn.subjects.any(turn.choose)
    model = auto_class(subject.config).from_config(subject.config, patcher=subject.patcher)
    subject.check_built(model)
    model.save_pretrained(turn.folder)
    if not subject.saves_as_stock:
        with pytest.raises(PatchedWeightsError, match="weights that a patcher has added"):
            auto_class(subject.config).from_pretrained(turn.folder)
        return
    stock = auto_class(subject.config).from_pretrained(turn.folder).eval()
    inputs = tiny_inputs(subject.config)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**inputs)[0], stock(**inputs)[0], atol=1e-4, rtol=1e-4)


@action("apply to a model in memory", weight=2)
def apply(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    assert subject.patcher is not None
    stock = turn.subjects.stock_of(subject)
    model = subject.patcher.apply(stock.load())
    subject.check(model)
    stock.check(Patcher().apply(model))


@action("plan")
def dry_run(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    found = plan(subject.folder / any_shards(turn.choose), subject.patcher)
    assert found.ok, str(found)


@action("a class by itself", weight=2)
def stock_class(turn: Turn) -> None:
    """A class that another thread may be replacing is what it always was: built, pickled, subclassed."""
    module = LlamaMLP(tiny_llama_config())
    assert type(module) is LlamaMLP
    assert type(pickle.loads(pickle.dumps(module))) is LlamaMLP
    assert pickle.loads(pickle.dumps(LlamaMLP)) is LlamaMLP
    assert isinstance(type("Derived", (LlamaMLP,), {})(tiny_llama_config()), LlamaMLP)
    replacement = turn.choose.choice([OwnMLP, OtherMLP])
    with Patcher({"LlamaMLP": replacement}).applied():
        assert type(LlamaMLP(tiny_llama_config())) is replacement
    assert type(LlamaMLP(tiny_llama_config())) is LlamaMLP


_registering = threading.Lock()


@action("the registry")
def registry(turn: Turn) -> None:
    """It is the process's, so it names what no other action looks at, and its keys are registered by one at a time."""
    stock = turn.subjects.plain["gpt2"]
    with _registering:
        monkey_patching.register_patch_mapping({"GPT2MLP": OwnGPT2MLP})
        try:
            model = stock.load()
            assert {type(block.mlp) for block in model.transformer.h} == {OwnGPT2MLP}
            with monkey_patching.apply_patches():
                assert type(GPT2LMHeadModel(stock.config).transformer.h[0].mlp) is OwnGPT2MLP
        finally:
            monkey_patching.unregister_patch_mapping(["GPT2MLP"])
        stock.check(stock.load())


@action("loads of several dtypes")
def dtypes(turn: Turn) -> None:
    subject = turn.subjects.any(turn.choose)
    dtype = turn.choose.choice([torch.bfloat16, torch.float16, torch.float32])
    model: PreTrainedModel = subject.load(any_shards(turn.choose), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    with construction_lock.held_for("nothing"):  # while another thread loads, it is that load's
        assert torch.get_default_dtype() == torch.float32


@action("generation")
def generation(turn: Turn) -> None:
    name = turn.choose.choice(["projections", "projections, tied", "experts", "a converter", "projections, experts"])
    subject = turn.subjects.patched[name]
    stock = turn.subjects.stock_of(subject)
    found, expected = (
        each.load().generate(tiny_inputs(each.config)["input_ids"], do_sample=False, max_new_tokens=8)
        for each in (subject, stock)
    )
    assert torch.equal(found, expected)


@action("a pool of threads that is shut down", is_fault=True)
def pool(turn: Turn) -> None:
    subjects = [turn.subjects.any(turn.choose) for _ in range(6)]
    executor = ThreadPoolExecutor(2)
    loads = [executor.submit(subject.load) for subject in subjects]
    loads[0].result()
    executor.shutdown(wait=True, cancel_futures=True)
    for subject, load in zip(subjects, loads, strict=True):
        if not load.cancelled():
            subject.check(load.result())
