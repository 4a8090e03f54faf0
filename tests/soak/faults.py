"""Faults at every stage of a load and of a save: what is raised is what it should be, and the next load is right."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from patcher import PatchConstructionError, PatchedWeightsError, Patcher, PatcherError, UnmatchedPatchError
from tests.soak.injection import injected
from tests.soak.processes import check_refused_or_right
from tests.soak.stock import SHARDS, auto_class
from tests.soak.subjects import Subject, any_shards
from tests.soak.table import Turn, action
from tests.support.replacements import JoinedMLP, OwnMLP, With, Without

SOURCES = ["gate_proj.weight", "up_proj.weight"]


class Stop(BaseException):
    """What no `except Exception` takes."""


#: what is raised on purpose
ERRORS: list[type[BaseException]] = [ValueError, RuntimeError, MemoryError, Stop, KeyboardInterrupt, GeneratorExit]


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """What a call raises, without what it held on to; None if it comes to its end."""
    try:
        call()
    except BaseException as error:
        each: BaseException | None = error
        while each is not None:
            each.__traceback__, each = None, each.__cause__ or each.__context__
        return error
    return None


def expect(call: Callable[[], object], *kinds: type[BaseException]) -> BaseException:
    error = raised_by(call)
    assert isinstance(error, kinds), f"expected {kinds}, found {error!r}"
    return error


def then_all_is_well(turn: Turn) -> None:
    """Right after a fault, in the same thread: a plain load is plain, and a patched one is patched."""
    for subject in (turn.subjects.any_plain(turn.choose), turn.subjects.any_patched(turn.choose)):
        subject.check_built(subject.load())


def llama(turn: Turn, patcher: Patcher | None) -> Subject:
    stock = turn.subjects.plain["llama"]
    return Subject("llama", stock.folder, stock.config, patcher, stock.logits, {}, {})


@action("__init__ of a replacement raises", weight=3, is_fault=True)
def init_raises(turn: Turn) -> None:
    error, late = turn.choose.choice(ERRORS), turn.choose.random() < 0.5

    class Failing(OwnMLP):
        def __init__(self, config: Any) -> None:
            if late:
                super().__init__(config)
            raise error("on purpose")

    patcher = Patcher({"LlamaMLP": Failing}, fusions=turn.choose.choice([(), "qkv"]))
    subject = llama(turn, patcher)

    def in_a_block() -> None:
        with patcher.applied():
            subject.model_class(subject.config)

    def from_config() -> None:
        auto_class(subject.config).from_config(subject.config, patcher=patcher)

    call = turn.choose.choice([subject.load, in_a_block, from_config])
    expect(call, PatchConstructionError if issubclass(error, Exception) else error)
    then_all_is_well(turn)


@action("a conversion raises", weight=2, is_fault=True)
def conversion_raises(turn: Turn) -> None:
    error = turn.choose.choice(ERRORS)

    class Failing(ConversionOps):
        def convert(self, *args: Any, **kwargs: Any) -> Any:
            raise error("on purpose")

    converter = WeightConverter(SOURCES, ["gate_up_proj.weight"], operations=[Failing()])
    subject = llama(turn, Patcher({"LlamaMLP": JoinedMLP}, extra_weight_conversions=converter))
    expect(lambda: subject.load(any_shards(turn.choose)), PatcherError if issubclass(error, Exception) else error)
    then_all_is_well(turn)


@action("a shard is cut off, or gone", weight=2, is_fault=True)
def broken_files(turn: Turn) -> None:
    subject, shards = turn.subjects.any(turn.choose), any_shards(turn.choose)
    shutil.copytree(subject.folder / shards, folder := turn.folder / "broken")
    file = turn.choose.choice(sorted(folder.glob("*.safetensors")))
    if turn.choose.random() < 0.6:
        kept = turn.choose.choice([0, 7, turn.choose.randrange(file.stat().st_size), file.stat().st_size - 1])
        file.write_bytes(file.read_bytes()[:kept])
    else:
        file.unlink()
    auto = auto_class(subject.config)
    expect(
        lambda: auto.from_pretrained(folder, patcher=subject.patcher),
        SafetensorError,
        OSError,
        ValueError,
        PatcherError,
    )
    then_all_is_well(turn)


@action("a patcher that doesn't fit", weight=2, is_fault=True)
def does_not_fit(turn: Turn) -> None:
    patcher, error = turn.choose.choice(
        [
            (Patcher({"LlamaMPL": OwnMLP}), UnmatchedPatchError),
            (Patcher({"LlamaMLP": With}), PatchedWeightsError),
            (Patcher({"LlamaMLP": Without}), PatchedWeightsError),
            (Patcher({"LlamaMLP": OwnMLP}, "no such pattern"), UnmatchedPatchError),
            (Patcher({"LlamaMLP": nn.Linear}), PatchConstructionError),
        ]
    )
    expect(llama(turn, patcher).load, error)
    then_all_is_well(turn)


@action("recursion without end", is_fault=True)
def recursion(turn: Turn) -> None:
    """In `__init__` of a replacement, or everywhere: a load that begins a few frames below the limit."""

    class Endless(OwnMLP):
        def __init__(self, config: Any) -> None:
            Endless.__init__(self, config)

    expect(llama(turn, Patcher({"LlamaMLP": Endless})).load, PatchConstructionError)
    subject = turn.subjects.any_patched(turn.choose)
    room = turn.choose.randrange(10, 120)

    def deep(frames: int) -> None:
        subject.load() if frames <= 0 else deep(frames - 1)

    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    del frame
    with suppress(RecursionError, PatcherError):
        deep(sys.getrecursionlimit() - depth - room)
    then_all_is_well(turn)


@action("a generator is closed in its block", is_fault=True)
def generator_exit(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    assert subject.patcher is not None
    patcher = subject.patcher

    def models() -> Iterator[Any]:
        with patcher.applied():
            while True:
                yield auto_class(subject.config).from_pretrained(subject.folder / "whole")

    made = models()
    subject.check(copy_context().run(next, made))
    made.close()  # type: ignore[attr-defined]  # in another context than it began in
    made = models()
    subject.check(next(made))
    made.close()  # type: ignore[attr-defined]
    then_all_is_well(turn)


@action("a save can't be written", is_fault=True)
def unwritable(turn: Turn) -> None:
    subject = turn.subjects.any(turn.choose)
    model = subject.load()
    (turn.folder / "file").write_text("")
    (turn.folder / "taken" / "model.safetensors").mkdir(parents=True)
    for folder in (turn.folder / "file" / "below", turn.folder / "taken"):
        expect(lambda folder=folder: model.save_pretrained(folder), OSError, SafetensorError)  # type: ignore[misc]
    model.save_pretrained(turn.folder / "free")
    subject.check_saved(turn.folder / "free")
    subject.check(model)


@action("a save is interrupted", weight=2, is_fault=True)
def save_interrupted(turn: Turn) -> None:
    """At any call of stock's code: what is written is refused, or right, and the model can be saved again."""
    subject = turn.subjects.any(turn.choose)
    model = subject.load()
    options = {"save_original_format": turn.choose.random() < 0.5} if subject.is_fused_only else {}
    options["max_shard_size"] = SHARDS[any_shards(turn.choose)]
    name = turn.choose.choice(["interrupted", "over another"])
    if name == "over another":
        subject.load().save_pretrained(turn.folder / name, max_shard_size=SHARDS[any_shards(turn.choose)])

    def save(which: str) -> None:
        model.save_pretrained(turn.folder / ("whole" if which == "whole" else name), **options)

    injected(save, turn.choose, turn.choose.choice(ERRORS))
    check_refused_or_right(turn.folder / name, turn.subjects, subject)
    model.save_pretrained(turn.folder / "again")
    subject.check_saved(turn.folder / "again")
    subject.check(model)


@action("a fault at any call", weight=6, is_fault=True)
def load_interrupted(turn: Turn) -> None:
    """An exception out of any call that stock's code receives in a load, patched or not."""
    subject, shards = turn.subjects.any(turn.choose), any_shards(turn.choose)
    error = turn.choose.choice(ERRORS)
    model = injected(lambda name: subject.load(shards), turn.choose, error)
    if model is not None:  # stock has gone on, without what is optional to it
        subject.check(model)
    then_all_is_well(turn)
