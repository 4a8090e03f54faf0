"""Errors that say what to write instead, and whether that works: tables of cases, run by `test_advice.py`.

A case is a generator function: it yields what raises, is sent the text of the error, and does what that says. Above it
is the advice, word for word as in the source, with `{}` for what is filled in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import Patcher, PatcherError, presets
from patcher.fusions import QKV
from tests.support.tiny import tiny_inputs

__all__ = ["CASES", "Place", "advice", "load", "same", "written"]


@dataclass(frozen=True)
class Place:
    """Where a case runs: checkpoints that all share, and a folder of its own."""

    llama: Path
    moe: Path
    tmp: Path


Steps = Generator[Callable[[], object], str, None]
#: name -> the advice, the function, and the error that it comes with
CASES: dict[str, tuple[tuple[str, ...], Callable[[Place], Steps], type[Exception]]] = {}


def advice(
    *texts: str, error: type[Exception] = PatcherError, name: str = ""
) -> Callable[[Callable[[Place], Steps]], None]:
    """Put a function into the table, by default under its own name."""

    def add(function: Callable[[Place], Steps]) -> None:
        key = name or function.__name__
        assert key not in CASES, key
        CASES[key] = (texts, function, error)

    return add


class OwnMLP(LlamaMLP):
    """What a newcomer begins with."""


def written(said: str, pattern: str, **names: Any) -> Any:
    """The value of the code in an error, where the group of a pattern finds it."""
    found = re.search(pattern, said, re.DOTALL)
    assert found, said
    known = {
        "Patcher": Patcher,
        "QKV": QKV,
        "presets": presets,
        "OwnMLP": OwnMLP,
        "WeightRenaming": WeightRenaming,
        "WeightConverter": WeightConverter,
        "Concatenate": Concatenate,
    }
    return eval(found[1], known | names)


def load(folder: Path, patcher: Any = None, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, patcher=patcher, **options)


@torch.no_grad()
def same(model: Any, folder: Path, **options: Any) -> bool:
    """Whether a model computes what the stock one of a folder does."""
    stock = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    inputs = tiny_inputs(stock.config)
    return torch.allclose(model.eval()(**inputs)[0].float(), stock(**inputs)[0].float(), atol=1e-4)
