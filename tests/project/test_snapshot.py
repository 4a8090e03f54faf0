"""What the tests of isolation look at shows every kind of change: otherwise they would prove nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable

import accelerate.big_modeling
import pytest
import torch
import transformers.modeling_utils
from torch import nn
from transformers import LlamaModel, LlamaPreTrainedModel
from transformers.models.jamba import modeling_jamba
from transformers.models.llama import modeling_llama

from tests.support.snapshot import changes, snapshot


def nothing(*args: object, **kwargs: object) -> None:
    return None


class Finder:
    @staticmethod
    def find_spec(*args: object) -> None:
        return None


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "a class of a modeling file": lambda m: m.setattr(modeling_llama, "LlamaMLP", nn.Linear),
    "an entry of a table": lambda m: m.setitem(modeling_jamba.ALL_DECODER_LAYER_TYPES, "mamba", nn.Linear),
    "a method of a class": lambda m: m.setattr(LlamaModel, "forward", nothing),
    "a method that a class inherited": lambda m: m.setattr(LlamaModel, "save_pretrained", nothing, raising=False),
    "a new attribute of a class": lambda m: m.setattr(modeling_llama.LlamaMLP, "_patched", True, raising=False),
    "a recorder": lambda m: m.setitem(LlamaPreTrainedModel._can_record_outputs, "attentions", nn.Linear),
    "a list of a class": lambda m: m.setattr(LlamaPreTrainedModel, "_no_split_modules", []),
    "an item of a list of a class": lambda m: m.setattr(LlamaPreTrainedModel, "_no_split_modules", ["Other"]),
    "a method of nn.Module": lambda m: m.setattr(nn.Module, "register_parameter", nothing),
    "a function of torch.nn.init": lambda m: m.setattr(nn.init, "normal_", nothing),
    "a function of torch": lambda m: m.setattr(torch, "linspace", nothing),
    "a function of accelerate": lambda m: m.setattr(accelerate.big_modeling, "init_empty_weights", nothing),
    "a function of transformers": lambda m: m.setattr(transformers.modeling_utils, "patch_output_recorders", nothing),
    "a flag of a module": lambda m: m.setattr(transformers.modeling_utils, "_is_quantized", not None),
    "an import hook": lambda m: m.setattr(sys, "meta_path", [Finder, *sys.meta_path]),
    "the default dtype": lambda m: m.setattr(torch, "get_default_dtype", lambda: torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_it_is_seen(change: Callable[[pytest.MonkeyPatch], object], taken: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert changes(taken) != []  # type: ignore[arg-type]
    assert changes(taken) == []  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def taken() -> object:
    return snapshot()
