"""`copy.copy` of a patched model, whose original is gone (row 40): it ended in "dead Module"."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from patcher import Patcher, load_original_state_dict, original_state_dict
from tests.support import shared
from tests.support.beside import FUSED_QKV
from tests.support.comparing import logits
from tests.support.replacements import JOINED
from tests.support.tiny import tiny_llama_config, tiny_mixtral_config

PATCHERS = {
    "fused": Patcher(fusions=["qkv", "gate_up"]),
    "converted": FUSED_QKV | JOINED,
    "experts": Patcher(fusions="sequential_experts"),
}
COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "a copy of a copy": lambda model: copy.copy(copy.deepcopy(model)),
}


def load(name: str, patcher: Patcher | None = None) -> Any:
    config = tiny_mixtral_config() if name == "experts" else tiny_llama_config()
    return AutoModelForCausalLM.from_pretrained(shared.checkpoint(config), patcher=patcher)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", PATCHERS)
def test_a_copy_reads_either_layout_when_its_original_is_gone(name: str, way: str) -> None:
    model, stock = load(name, PATCHERS[name]), load(name)
    copied, gone = COPIES[way](model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    values = {key: torch.randn_like(value) for key, value in stock.state_dict().items()}
    stock.load_state_dict(values)
    assert not any(copied.load_state_dict(dict(values)))
    torch.testing.assert_close(logits(copied), logits(stock))
    load_original_state_dict(copied, stock.state_dict())
    assert all(torch.equal(value, values[key]) for key, value in original_state_dict(copied).items())
    layer = copied.model.layers[0]
    layer.load_state_dict({key: torch.zeros_like(value) for key, value in stock.model.layers[0].state_dict().items()})
    assert not any(value.any() for value in layer.parameters())


@pytest.mark.parametrize("name", PATCHERS)
def test_a_model_is_freed_as_soon_as_nobody_holds_it(name: str) -> None:
    """Not by the collector of cycles, which may come after the memory is gone."""
    model = load(name, PATCHERS[name])
    gc.collect()  # what the load has left
    gc.disable()
    try:
        layer = weakref.ref(model.model.layers[0])
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_stock_models_are_loaded_by_torch_alone() -> None:
    model = LlamaForCausalLM(tiny_llama_config())
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())
