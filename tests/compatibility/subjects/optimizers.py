"""A run that goes on with fusions where it began without, and the reverse; in float64, so that rounding is small."""

from __future__ import annotations

import copy
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from patcher import original_state_dict
from tests.compatibility.columns import column
from tests.compatibility.outcomes import compared, worst
from tests.compatibility.rows import Row
from tests.support.resuming import Make, as_double, in_double, resumed, train, uninterrupted

SUBJECT = "Optimizers: fusions switched on and off when a run resumes"


def switched(row: Row, make: Make) -> str:
    options, inputs = in_double(row.config()), as_double(row.training_inputs())
    on = resumed(row.stock(**options), row.patched(**options), make, inputs, (2, 2))
    off = resumed(row.patched(**options), row.stock(**options), make, inputs, (2, 2))
    expected = uninterrupted(row.stock(**options), make, inputs, 4)
    return worst(*(compared(found, expected, rounding=1e-10) for found in (on, off)))


@column(SUBJECT, "`AdamW`")
def adamw(row: Row, folder: Path) -> str:
    return switched(row, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True))


@column(SUBJECT, "`SGD` with momentum")
def sgd(row: Row, folder: Path) -> str:
    return switched(row, lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True))


@column(SUBJECT, "`Adafactor`")
def adafactor(row: Row, folder: Path) -> str:
    return switched(row, lambda model: torch.optim.Adafactor(model.parameters()))


@cache
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("muon", Path(__file__).parents[3] / "examples/muon.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@column(SUBJECT, "`Muon`, given the parts (`examples/muon.py`)")
def muon(row: Row, folder: Path) -> str:
    """Of stacks of experts and of kernels transformers has no matrices."""

    def chosen(name: str, parameter: Any) -> bool:
        return recipe().is_hidden_matrix(name, parameter) and "experts" not in name

    options, inputs = in_double(row.config()), as_double(row.training_inputs())
    stock, patched = row.stock(**options), row.patched(**options)
    optimizers = [recipe().muon(model, chosen, lr=1e-3) for model in (stock, patched)]
    for model, optimizer in zip((stock, patched), optimizers, strict=True):
        train(model, optimizer, inputs, 2)
    outcome = compared(original_state_dict(patched), original_state_dict(stock), rounding=1e-10)
    on = row.patched(**options)
    on.load_state_dict(original_state_dict(stock))
    resuming = recipe().muon(on, chosen, lr=1e-3)
    resuming.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    train(on, resuming, inputs, 2)
    train(stock, optimizers[0], inputs, 2)
    return worst(outcome, compared(original_state_dict(on), original_state_dict(stock), rounding=1e-10))
