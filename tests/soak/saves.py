"""What is done with models that stand: saved, copied, pickled, operated on."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from safetensors.torch import load_file

from tests.soak.stock import SHARDS, auto_class
from tests.soak.subjects import any_shards
from tests.soak.table import Turn, action
from tests.support.comparing import logits
from tests.support.surgery import SURGERY, operated


@action("save", weight=4)
def save(turn: Turn) -> None:
    subject, shards = turn.subjects.any(turn.choose), any_shards(turn.choose)
    model = subject.load(any_shards(turn.choose))
    model.save_pretrained(turn.folder, max_shard_size=SHARDS[shards])
    subject.check_saved(turn.folder, shards)


@action("save in the runtime layout", weight=2)
def save_as_it_is(turn: Turn) -> None:
    subject = turn.subjects.any_fused(turn.choose)
    subject.load().save_pretrained(
        turn.folder / "fused", save_original_format=False, max_shard_size=SHARDS[any_shards(turn.choose)]
    )
    again = auto_class(subject.config).from_pretrained(turn.folder / "fused")
    subject.check(again)
    again.save_pretrained(turn.folder / "original")  # in shards the tensors would have another order
    subject.check_saved(turn.folder / "original")


@action("state dict, there and back", weight=2)
def state_dict(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    one, other = subject.load(), subject.load()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert {name for name, _ in one.named_parameters()} <= one.state_dict().keys()
    other.load_state_dict(one.state_dict())
    subject.check(other)


@action("pickle")
def pickled(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    model = pickle.loads(pickle.dumps(subject.load()))
    subject.check(model)
    model.save_pretrained(turn.folder)
    subject.check_saved(turn.folder)


@action("deepcopy")
def copied(turn: Turn) -> None:
    subject = turn.subjects.any_patched(turn.choose)
    model = copy.deepcopy(subject.load())
    subject.check(model)
    model.save_pretrained(turn.folder)
    subject.check_saved(turn.folder)


@action("surgery", weight=3)
def surgery(turn: Turn) -> None:
    """What is done to the layers of a fused model and of a stock one gives what it gives where both are stock."""
    fused = turn.subjects.patched[turn.choose.choice(["projections", "projections, tied", "experts"])]
    stock = turn.subjects.stock_of(fused)
    steps = [
        (turn.choose.choice(sorted(SURGERY)), turn.choose.randrange(6), turn.choose.randrange(6)) for _ in range(3)
    ]
    models = (fused.load(), stock.load()) if turn.choose.random() < 0.5 else (stock.load(), fused.load())
    found, expected = operated(*models, steps), operated(stock.load(), stock.load(), steps)
    torch.testing.assert_close(logits(found), logits(expected), atol=1e-3, rtol=1e-3)
    files: list[dict[str, Any]] = []
    for model, name in ((found, "found"), (expected, "expected")):
        model.save_pretrained(turn.folder / name)
        files.append(load_file(turn.folder / name / "model.safetensors"))
    assert files[0].keys() == files[1].keys(), steps
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[1]), steps
