"""Recorded outputs (row 3): replaced modules are recorded like those that they replace, and no other model notices."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, LlamaForCausalLM, LlamaModel, MixtralForCausalLM
from transformers.models.llama import modeling_llama
from transformers.utils import output_capturing

from patcher import Patcher
from tests.support import shared
from tests.support.replacements import OWN, OwnLayer, OwnMLP
from tests.support.tiny import (
    save_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_llava_config,
    tiny_mixtral_config,
)


class SubAttention(modeling_llama.LlamaAttention):
    pass


class OwnAttention(nn.Module):
    """No `LlamaAttention`: its parts and its code, under no name that transformers knows."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        stock = modeling_llama.LlamaAttention(config, layer_idx)
        vars(self).update({name: value for name, value in vars(stock).items() if name not in vars(self)})
        for name, module in stock.named_children():
            setattr(self, name, module)

    forward = modeling_llama.LlamaAttention.forward


class OwnBlock(nn.Module):
    """No `LlamaDecoderLayer`."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        for name, module in OwnLayer(config, layer_idx).named_children():
            setattr(self, name, module)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


def outputs(model: Any, **more: Any) -> Any:
    with torch.no_grad():
        return model(
            **tiny_inputs(model.config), output_attentions=True, output_hidden_states=True, use_cache=False, **more
        )


def assert_recorded_alike(patched: Any, stock: Any) -> None:
    for name in ("attentions", "hidden_states"):
        mine, theirs = getattr(patched, name), getattr(stock, name)
        assert len(mine) == len(theirs) > 0
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


EAGER: dict[str, Any] = {"attn_implementation": "eager"}  # the only one that returns attentions


@pytest.mark.parametrize(
    "mapping",
    [
        {"LlamaAttention": SubAttention},
        {"LlamaAttention": OwnAttention},
        {"LlamaDecoderLayer": OwnLayer},
        {"LlamaDecoderLayer": OwnBlock},
        {"LlamaDecoderLayer": OwnBlock, "LlamaAttention": OwnAttention},
        {"LlamaMLP": OwnMLP},
    ],
    ids=["sub attention", "own attention", "sub layer", "own layer", "both", "something else"],
)
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, LlamaModel])
def test_a_patched_model_records_what_the_stock_model_does(
    mapping: dict[str, Any], model_class: Any, llama: Path
) -> None:
    before = model_class.from_pretrained(llama, **EAGER)
    expected = outputs(before)
    registry = copy.deepcopy(dict(output_capturing._CAN_RECORD_REGISTRY))
    recorded = dict(model_class._can_record_outputs or {}), dict(LlamaModel._can_record_outputs or {})
    patched = model_class.from_pretrained(llama, patcher=Patcher(mapping), **EAGER)
    assert_recorded_alike(outputs(patched), expected)
    assert_recorded_alike(outputs(patched), expected)  # the hooks are installed at the first call, and once
    assert registry == dict(output_capturing._CAN_RECORD_REGISTRY)
    assert recorded == (dict(model_class._can_record_outputs or {}), dict(LlamaModel._can_record_outputs or {}))
    # A model that stood before, one that is loaded now, and the first one again.
    assert_recorded_alike(outputs(before), expected)
    assert_recorded_alike(outputs(model_class.from_pretrained(llama, **EAGER)), expected)
    with Patcher(mapping).applied():
        made = model_class._from_config(patched.config)
    made.load_state_dict(patched.state_dict())
    assert_recorded_alike(outputs(made.eval()), expected)


class OwnModel(LlamaModel):
    pass


class LooseModel(modeling_llama.LlamaPreTrainedModel):
    """No `LlamaModel`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        stock = LlamaModel(config)
        for name, module in stock.named_children():
            setattr(self, name, module)
        self.post_init()

    forward = LlamaModel.forward


@pytest.mark.parametrize("model", [OwnModel, LooseModel])
def test_a_replaced_sub_model_records_as_well(model: Any, llama: Path) -> None:
    expected = outputs(LlamaForCausalLM.from_pretrained(llama, **EAGER))
    patcher = Patcher({"LlamaModel": model, "LlamaAttention": OwnAttention})
    assert_recorded_alike(outputs(LlamaForCausalLM.from_pretrained(llama, patcher=patcher, **EAGER)), expected)
    assert_recorded_alike(outputs(LlamaForCausalLM.from_pretrained(llama, **EAGER)), expected)


def test_a_sub_model_of_another_kind_records_its_own(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llava_config(), tmp_path)
    expected = outputs(AutoModelForImageTextToText.from_pretrained(folder, **EAGER))
    patcher = Patcher({"LlamaAttention": OwnAttention, "LlamaDecoderLayer": OwnBlock})
    model = AutoModelForImageTextToText.from_pretrained(folder, patcher=patcher, **EAGER)
    assert_recorded_alike(outputs(model), expected)


def test_recorders_of_an_index_and_a_class_follow(tmp_path: Path) -> None:
    """Mixtral's router logits come from the gate: `OutputRecorder(MixtralTopKRouter, index=0)`."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    class OwnRouter(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            for name, value in vars(MixtralTopKRouter(config)).items():
                if not name.startswith("_"):
                    vars(self)[name] = value
            self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))

        forward = MixtralTopKRouter.forward

    folder = save_tiny(tiny_mixtral_config(), tmp_path)
    expected = outputs(MixtralForCausalLM.from_pretrained(folder, **EAGER), output_router_logits=True)
    patcher = Patcher({"MixtralTopKRouter": OwnRouter})
    model = MixtralForCausalLM.from_pretrained(folder, patcher=patcher, **EAGER)
    patched = outputs(model, output_router_logits=True)
    assert len(patched.router_logits) == len(expected.router_logits) == 2
    for one, other in zip(patched.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mapping", [{"LlamaAttention": OwnAttention}, {"LlamaMLP": OwnMLP}])
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_patched_model_can_be_copied_after_its_hooks_are_installed(
    mapping: dict[str, Any], way: str, llama: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher(mapping), **EAGER)
    expected = outputs(model)
    again = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
    assert_recorded_alike(outputs(again), expected)
    del model
    assert_recorded_alike(outputs(again), expected)


@pytest.mark.libraries
def test_outputs_can_be_recorded_after_torch_compile_has_seen_the_model(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=OWN | Patcher({"LlamaAttention": OwnAttention}), **EAGER)
    expected = outputs(LlamaForCausalLM.from_pretrained(llama, **EAGER))
    compiled = torch.compile(model, backend="eager")
    inputs = tiny_inputs(model.config)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert_recorded_alike(outputs(model), expected)
