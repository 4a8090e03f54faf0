"""Adapters of peft that can't be put on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from transformers import BitsAndBytesConfig, MixtralForCausalLM

from patcher import Patcher, compare
from patcher.fusions import QKV
from tests.project.advice import Place, Steps, advice, load, written
from tests.support.adapters import adapted_layers, as_peft_model, assert_close, base, config, new_adapter
from tests.support.beside import FUSED_QKV
from tests.support.comparing import logits


def adapter(at: Place, name: str = "adapter", seed: int = 0, **settings: Any) -> Path:
    new_adapter(load(at.llama), at.tmp / name, seed, **{"target_modules": ["q_proj", "v_proj"]} | settings)
    return at.tmp / name


@advice("Load the model with a patcher that leaves this module out: modules=... of the fusion says which it takes.")
def an_adapter_of_quantized_weights(at: Place) -> Steps:
    quantizer = BitsAndBytesConfig(load_in_8bit=True)
    settings = LoraConfig(target_modules=["model.layers.1.self_attn.q_proj"])
    yield lambda: get_peft_model(load(at.llama, Patcher(fusions="qkv"), quantization_config=quantizer), settings)
    left_out = Patcher(fusions=QKV(modules="model.layers.0.self_attn"))
    model = get_peft_model(load(at.llama, left_out, quantization_config=quantizer), settings)
    assert adapted_layers(model) == 1


@advice("Leave it out, and write target_modules as an expression: {}.")
def numbers_of_layers_beside_experts(at: Place) -> Steps:
    def new(**settings: Any) -> Any:
        model = MixtralForCausalLM.from_pretrained(at.moe, patcher=Patcher(fusions="sequential_experts"))
        return get_peft_model(model, config(**settings))

    said = yield lambda: new(target_modules=["gate_proj"], layers_to_transform=[1])
    assert adapted_layers(new(target_modules=written(said, r"expression: ('.*')\.$"))) == 4


@advice(
    "Load the model with the patcher that the adapter was trained with, such as Patcher(fusions='sequential_experts')."
)
def an_adapter_of_single_experts(at: Place) -> Steps:
    experts = Patcher(fusions="sequential_experts")
    expected = new_adapter(base(at.moe, patcher=experts), at.tmp / "own", target_modules=["q_proj", "gate_proj"])
    said = yield lambda: as_peft_model(at.moe, at.tmp / "own")
    model = as_peft_model(at.moe, at.tmp / "own", patcher=written(said, r"such as (Patcher\(.*\))\.$"))
    assert_close(logits(model), expected)


@advice("Un-fuse it by model = Patcher().apply(model), and prepare that.")
def values_that_peft_computes_before_there_is_an_adapter(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"))
    settings = LoraConfig(
        r=4, target_modules=["q_proj", "o_proj"], init_lora_weights="corda", corda_config=CordaConfig()
    )

    def prepared(model: Any) -> Any:
        preprocess_corda(model, settings, run_model=lambda: model(torch.arange(3, 120)[None]))
        return get_peft_model(model, settings)

    yield lambda: prepared(model)
    assert adapted_layers(prepared(Patcher().apply(model))) == 4


@advice("Name the layers of {}, or load the model without this class mapping.")
def an_adapter_of_layers_that_a_class_has_not(at: Place) -> Steps:
    folder = adapter(at)
    yield lambda: as_peft_model(at.llama, folder, patcher=FUSED_QKV)
    assert adapted_layers(as_peft_model(at.llama, folder)) == 4
    model = get_peft_model(load(at.llama, FUSED_QKV), config(target_modules=["qkv_proj", "o_proj"]))
    model.save_pretrained(at.tmp / "own")
    assert_close(logits(as_peft_model(at.llama, at.tmp / "own", patcher=FUSED_QKV)), logits(model))


@advice("compare takes a PreTrainedModel, found a {}; pass the model inside of it, as peft_model.get_base_model().")
def a_comparison_of_an_adapted_model(at: Place) -> Steps:
    peft_model = as_peft_model(at.llama, adapter(at))
    yield lambda: compare(peft_model, peft_model)
    assert compare(peft_model.get_base_model(), peft_model.get_base_model(), stages=["outputs"], quick=True)
