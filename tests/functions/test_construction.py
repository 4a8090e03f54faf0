"""Functions that an `__init__` calls (refused), and what initialises weights: by hand, from a config, in a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patcher import Patcher
from patcher.errors import PatchConstructionError, UnmatchedPatchError
from tests.functions import modeling_tiny
from tests.functions.modeling_tiny import Part, TinyConfig, TinyModel


def more(value: float) -> float:
    return value * 10


class OwnPart(Part):
    pass


class OwnAround(modeling_tiny.Around):
    """Builds the class of modeling code in its own code."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.part = Part(3.0)


def by_hand(patcher: Patcher, folder: Path) -> Any:
    with patcher.applied():
        return TinyModel(TinyConfig())


def from_config(patcher: Patcher, folder: Path) -> Any:
    return TinyModel._from_config(TinyConfig(), patcher=patcher)


def from_a_checkpoint(patcher: Patcher, folder: Path) -> Any:
    TinyModel(TinyConfig()).save_pretrained(folder)
    return TinyModel.from_pretrained(folder, patcher=patcher)


@pytest.fixture(params=[by_hand, from_config, from_a_checkpoint])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Patcher], Any]:
    return lambda patcher: request.param(patcher, tmp_path)


@pytest.mark.parametrize(
    ("classes", "function", "caller"),
    [
        ({}, "scale", "Part"),
        ({"Part": OwnPart}, "scale", "OwnPart"),
        ({"Around": OwnAround}, "scale", "Part"),
        ({}, "beginning", "TinyModel"),
    ],
    ids=str,
)
def test_what_an_init_calls_is_refused(
    make: Callable[[Patcher], Any], classes: Any, function: str, caller: str
) -> None:
    patcher = Patcher(classes, function_mapping={function: more})
    text = rf"'{function}' can't be replaced for TinyModel alone: {caller}\.__init__ calls it.* Replace {caller} as a"
    with pytest.raises(PatchConstructionError, match=text):
        make(patcher)
    with pytest.raises(PatchConstructionError, match=text):
        patcher.resolve(TinyModel, TinyConfig())
    assert TinyModel(TinyConfig()).around.part.offset == 6


def test_a_misspelt_function_of_a_modeling_file_of_ones_own() -> None:
    with pytest.raises(UnmatchedPatchError, match=r"calls 'at_frist'; nearest: at_first"):
        TinyModel._from_config(TinyConfig(), patcher=Patcher(function_mapping={"at_frist": more}))


def test_what_initialises_weights_is_replaced(tmp_path: Path) -> None:
    patcher = Patcher(function_mapping={"at_first": more})
    for make in (by_hand, from_config):
        assert make(patcher, tmp_path).around.part.linear.weight.eq(10).all()
    model = from_a_checkpoint(patcher, tmp_path)
    assert model.around.part.linear.weight.eq(1).all()  # those of the checkpoint
    torch.save({}, tmp_path / "empty.bin")
    missing = TinyModel.from_pretrained(None, config=TinyConfig(), state_dict={}, patcher=patcher)
    assert missing.around.part.linear.weight.eq(10).all()
