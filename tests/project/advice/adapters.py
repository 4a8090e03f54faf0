"""Adapters of peft that are no adapters of the layers that a fused model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import save_file
from transformers import MixtralForCausalLM, WhisperConfig, WhisperForConditionalGeneration

import patcher
from patcher import Patcher
from tests.project.advice import Place, Steps, advice, load, written
from tests.support.adapters import (
    adapted_layers,
    as_peft_model,
    assert_close,
    assert_same_files,
    config,
    new_adapter,
    tensors_of,
    train,
    trained,
)
from tests.support.beside import FUSED_QKV
from tests.support.comparing import logits
from tests.support.tiny import ENCODER_DECODER_SIZES

QKV = Patcher(fusions="qkv")
WHISPER = WhisperConfig(**ENCODER_DECODER_SIZES, num_mel_bins=8, max_source_positions=32, max_target_positions=64)
EXPERTS = Patcher(fusions="sequential_experts")
_UNFUSED = "load the model without the fusion"


def adapter(at: Place, name: str = "adapter", seed: int = 0, **settings: Any) -> Path:
    new_adapter(load(at.llama), at.tmp / name, seed, **{"target_modules": ["q_proj", "v_proj"]} | settings)
    return at.tmp / name


@advice("It is an adapter: write the model that it is for, {}.")
def the_folder_of_an_adapter(at: Place) -> Steps:
    folder = adapter(at)
    said = yield lambda: patcher.plan(folder, QKV)
    assert patcher.plan(written(said, r"that it is for, ('.*?')\."), QKV).ok


@advice(
    "A new adapter is asked for {}, which are rows of {} in this model: they have no layers of their own to be "
    "adapted. Write target_modules={}; saved, the adapter is one of the layers of transformers. Or {} of "
    "these layers.",
    _UNFUSED,
)
def a_new_adapter_of_layers_that_are_joined(at: Place) -> Steps:
    model = load(at.llama, QKV)
    said = yield lambda: get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"]))
    targets = written(said, r"Write target_modules=(\[.*?\]);")
    adapted = train(get_peft_model(model, config(target_modules=targets)))
    adapted.save_pretrained(at.tmp)
    assert_close(logits(as_peft_model(at.llama, at.tmp)), logits(adapted))
    assert adapted_layers(get_peft_model(load(at.llama), LoraConfig(target_modules=["q_proj", "o_proj"]))) == 4


@advice(
    "Load the model without the fusion of this layer to go on with it.",
)
def an_adapter_that_is_trained_later(at: Place) -> Steps:
    folder = adapter(at)
    model = as_peft_model(at.llama, folder, patcher=QKV)
    model.set_adapter("default")
    yield lambda: train(model)
    train(PeftModel.from_pretrained(load(at.llama), folder, is_trainable=True))


@advice(
    "The adapters {} have matrices of their own for the layers that are joined in {}. combination_type={} would mix "
    "them: write combination_type='cat', or combine them in a model without the fusion of these layers.",
)
def adapters_that_are_mixed(at: Place) -> Steps:
    found = []
    for patched in (QKV, None):
        model = as_peft_model(at.llama, adapter(at), patcher=patched)
        model.load_adapter(adapter(at, "other", 1), "other")
        found.append(model)

    def combined(model: Any, kind: str) -> Any:
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], kind, combination_type=kind)
        model.set_adapter(kind)
        return logits(model)

    said = yield lambda: combined(found[0], "svd")
    kind = written(said, r"write combination_type=('\w+')")
    assert_close(combined(found[0], kind), combined(found[1], kind))
    combined(found[1], "svd")


@advice(
    "another one can't be put in its place: load it under a name of its own, with load_adapter().",
    "can't be put in the place of another one: load it under a name of its own, with load_adapter().",
)
def an_adapter_in_the_place_of_another(at: Place) -> Steps:
    plain, ranks = adapter(at), adapter(at, "ranks", rank_pattern={"v_proj": 2})
    for one, other in ((ranks, plain), (plain, ranks)):
        model = as_peft_model(at.llama, one, patcher=QKV)
        yield lambda model=model, other=other: hotswap_adapter(model, str(other), "default", torch_device="cpu")
        model.load_adapter(other, "other")
        model.set_adapter("other")
        assert_close(logits(model), logits(as_peft_model(at.llama, other)))


@advice(
    "{} has an adapter {} of rank {} of its own, and what is loaded into it has {}, which is no adapter "
    "that was trained "
    "on it. Load it under another name, with load_adapter().",
)
def an_adapter_into_one_that_was_trained(at: Place) -> Steps:
    model = trained(at.llama, at.tmp / "ours", QKV, target_modules=["qkv_proj"])
    other = adapter(at)
    yield lambda: model.load_adapter(other, "default")
    model.load_adapter(other, "other")
    model.set_adapter("other")
    assert_close(logits(model), logits(as_peft_model(at.llama, other)))


@advice(
    "The adapter is for {}, and the model has other layers in their place ({}). What an adapter of the first is for "
    "these isn't known: load the model without the patcher.",
)
def an_adapter_of_layers_that_a_class_has_not(at: Place) -> Steps:
    folder = adapter(at)
    yield lambda: as_peft_model(at.llama, folder, patcher=FUSED_QKV)
    assert adapted_layers(as_peft_model(at.llama, folder)) == 4


@advice(
    "modules_to_save={} means {}, of which the model has joined layers. A copy of a part of one can't be "
    "trained: {} of "
    "these layers, or leave them out of modules_to_save.",
)
def a_part_that_is_to_be_saved(at: Place) -> Steps:
    settings = {"target_modules": ["o_proj"], "modules_to_save": ["v_proj"]}
    yield lambda: get_peft_model(load(at.llama, QKV), LoraConfig(**settings))
    get_peft_model(load(at.llama), LoraConfig(**settings))
    get_peft_model(load(at.llama, QKV), LoraConfig(**settings | {"modules_to_save": None}))


@advice(
    "Load the model with the patcher of the adapter; what save_pretrained then writes of a fused model is for the "
    "layers of transformers.",
)
def an_adapter_of_joined_layers_on_a_stock_model(at: Place) -> Steps:
    model = trained(at.llama, at.tmp / "saved", QKV, target_modules=["qkv_proj", "o_proj"])
    raw = {key.replace(".default", ""): value for key, value in model.state_dict().items() if "lora_" in key}
    model.peft_config["default"].save_pretrained(at.tmp)
    save_file(raw, at.tmp / "adapter_model.safetensors")
    yield lambda: as_peft_model(at.llama, at.tmp)
    loaded = as_peft_model(at.llama, at.tmp, patcher=QKV)
    loaded.save_pretrained(at.tmp / "again")
    assert_close(logits(as_peft_model(at.llama, at.tmp / "again")), logits(model))


def experts(at: Place, **settings: Any) -> Any:
    return get_peft_model(MixtralForCausalLM.from_pretrained(at.moe, patcher=EXPERTS), config(**settings))


@advice(
    "A new adapter is asked for {}, and the model has a layer for each expert in its place. Write target_modules={}."
)
def a_new_adapter_of_stacks(at: Place) -> Steps:
    said = yield lambda: experts(at, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    targets = written(said, r"Write target_modules=(\[.*?\])\.")
    assert adapted_layers(experts(at, target_modules=targets)) == 2 * 4


@advice(
    "{}=True for {}: peft has no such adapter of {}, as which this one is saved. Leave it out, or leave "
    "the experts out "
    "of target_modules.",
)
def an_adapter_that_stacks_can_not_have(at: Place) -> Steps:
    targets = ["q_proj", "gate_proj"]
    yield lambda: experts(at, target_modules=targets, use_dora=True)
    experts(at, target_modules=targets)
    experts(at, target_modules=targets[:1], use_dora=True)


@advice(
    "rank_pattern and alpha_pattern give {} different ranks or alphas, and {}, as whose adapter this one "
    "is saved, has "
    "one for all experts. Use expressions that mean all of them.",
)
def experts_of_different_ranks(at: Place) -> Steps:
    yield lambda: experts(at, target_modules=["gate_proj"], rank_pattern={"experts.1.gate_proj": 2})
    model = experts(at, target_modules=["gate_proj"], rank_pattern={r"experts\.\d+\.gate_proj": 2})
    model.save_pretrained(at.tmp)
    assert tensors_of(at.tmp)


@advice("peft doesn't know these for theirs. Write bias='none', or {} of these layers.")
def biases_of_some_parts(at: Place) -> Steps:
    folder, model_class = at.tmp / "base", WhisperForConditionalGeneration
    model_class(WHISPER).save_pretrained(folder)

    def new(targets: list[str], bias: str, **options: Any) -> Any:
        return get_peft_model(
            model_class.from_pretrained(folder, **options), config(target_modules=targets, task_type=None, bias=bias)
        )

    inputs = {"input_features": torch.randn(1, 8, 64), "decoder_input_ids": torch.arange(3, 9).unsqueeze(0)}
    for bias in ("lora_only", "all"):
        said = yield lambda bias=bias: new(["qkv_proj"], bias, patcher=QKV)
        new(["qkv_proj"], written(said, r"Write bias=('\w+'), or"), patcher=QKV)
        adapted = new(["q_proj", "k_proj"], bias)
        with torch.no_grad():
            for name, value in adapted.named_parameters():
                if value.requires_grad and name.endswith("bias"):
                    value += 1
        adapted.save_pretrained(at.tmp / bias)
        fused = PeftModel.from_pretrained(model_class.from_pretrained(folder, patcher=QKV), at.tmp / bias)
        assert_close(logits(fused, inputs), logits(adapted, inputs))
        fused.save_pretrained(at.tmp / "again" / bias)
        assert_same_files(at.tmp / "again" / bias, at.tmp / bias)
