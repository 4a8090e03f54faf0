"""Functions that are called while a model is built and initialised, by hand, from a config and in a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patcher import Patcher, report
from patcher.errors import PatchConstructionError
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


@pytest.mark.parametrize("classes", [{}, {"Part": OwnPart}, {"Around": OwnAround}], ids=str)
def test_what_init_calls_is_replaced(make: Callable[[Patcher], Any], classes: Any) -> None:
    model = make(Patcher(classes, function_mapping={"scale": more}))
    assert model.around.part.offset == 30
    assert isinstance(model.around.part, Part)
    assert "__init__" in vars(Part)
    assert TinyModel(TinyConfig()).around.part.offset == 6
    ((name, _, callers),) = report(model).functions
    assert (name, callers) == ("tests.functions.modeling_tiny:scale", ("OwnPart",) if "Part" in classes else ("Part",))


def test_what_initialises_weights_is_replaced(tmp_path: Path) -> None:
    patcher = Patcher(function_mapping={"at_first": more})
    for make in (by_hand, from_config):
        assert make(patcher, tmp_path).around.part.linear.weight.eq(10).all()
    model = from_a_checkpoint(patcher, tmp_path)
    assert model.around.part.linear.weight.eq(1).all()  # those of the checkpoint
    torch.save({}, tmp_path / "empty.bin")
    missing = TinyModel.from_pretrained(None, config=TinyConfig(), state_dict={}, patcher=patcher)
    assert missing.around.part.linear.weight.eq(10).all()


def test_what_the_init_of_the_model_itself_calls_is_refused_before_it_is_built(
    make: Callable[[Patcher], Any], tmp_path: Path
) -> None:
    with pytest.raises(
        PatchConstructionError, match=r"'beginning' .*: TinyModel.__init__ calls it, and the model its"
    ):
        make(Patcher(function_mapping={"beginning": more}))
    with pytest.raises(PatchConstructionError, match=r"TinyModel.__init__ calls it"):
        Patcher(function_mapping={"beginning": more}).resolve(TinyModel, TinyConfig())
    assert TinyModel(TinyConfig()).first == 5.0


def test_a_class_of_ones_own_that_no_mapping_names_is_refused(make: Callable[[Patcher], Any]) -> None:
    """Its constructor is not modeling code, so it is built as what it is."""
    with pytest.raises(PatchConstructionError, match=r"Foreign.__init__ calls it, and a Foreign is built before"):
        make(Patcher({"Around": WithForeign}, function_mapping={"scale": more}))


class WithForeign(modeling_tiny.Around):
    def __init__(self) -> None:
        from tests.functions.not_modeling import Foreign

        nn.Module.__init__(self)
        self.part = Foreign()
