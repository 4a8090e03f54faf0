"""Weights that stream where an adapter or a quantizer has been at a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LoraConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    XLoraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, PretrainedConfig

from patcher import (
    InvalidPatcherError,
    PatchedWeightsError,
    Patcher,
    checkpoint_metadata,
    checkpoint_weights,
    load_checkpoint_weights,
)
from tests.support import shared
from tests.support.checkpoints import tensors
from tests.support.quantizers import Quantizer, bnb_int8, quanto_int8, torchao_int8
from tests.support.tiny import tiny_llama_config, tiny_mixtral_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about what is merged, and of quantizers

LORA: dict[str, tuple[Callable[[], PretrainedConfig], Any]] = {
    "layers": (tiny_llama_config, LoraConfig(target_modules=["q_proj", "down_proj"])),
    "DoRA": (tiny_llama_config, LoraConfig(target_modules=["q_proj"], use_dora=True)),
    "IA3": (tiny_llama_config, IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "modules to save": (tiny_llama_config, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "embeddings": (tiny_llama_config, LoraConfig(target_modules=["embed_tokens", "v_proj"])),
    "tokens": (tiny_llama_config, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2])),
    "stacks of experts": (
        tiny_mixtral_config,
        LoraConfig(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    ),
}


def adapted(name: str, patcher: Patcher | None) -> tuple[Path, Any]:
    """The folder of the base model, and a model with an adapter that does something."""
    make, config = LORA[name]
    folder = shared.checkpoint(make())
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, patcher=patcher), copy.deepcopy(config))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return folder, model


def as_bytes(weights: Any) -> dict[str, bytes]:
    return {name: repr((value.dtype, value.shape)).encode() + value.numpy().tobytes() for name, value in weights}


@pytest.mark.parametrize("patcher", [None, Patcher(fusions=["qkv"])], ids=str)
@pytest.mark.parametrize("name", LORA)
def test_adapters_are_merged_or_left_out(name: str, patcher: Patcher | None, tmp_path: Path) -> None:
    folder, model = adapted(name, patcher)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    left_out, merged = (as_bytes(checkpoint_weights(model, adapters=each)) for each in ("left out", "merged"))

    assert left_out == tensors(folder)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.items())
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    assert merged == tensors(tmp_path)
    assert merged != left_out
    assert list(checkpoint_metadata(model, adapters="merged")) == list(merged)
    with pytest.raises(InvalidPatcherError, match=r"has an adapter, and adapters=None doesn't say what becomes of it"):
        checkpoint_weights(model)
    with model.disable_adapter():
        assert as_bytes(checkpoint_weights(model, adapters="merged")) == left_out


def test_the_base_below_an_adapter_is_written_to() -> None:
    _, model = adapted("layers", Patcher(fusions=["qkv"]))
    other = AutoModelForCausalLM.from_config(tiny_llama_config())
    adapter = {key: value.clone() for key, value in model.state_dict().items() if "lora" in key}

    load_checkpoint_weights(model, checkpoint_weights(other))

    assert as_bytes(checkpoint_weights(model, adapters="left out")) == as_bytes(checkpoint_weights(other))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in adapter.items())
    model.merge_adapter()
    assert as_bytes(checkpoint_weights(model, adapters="merged")) != as_bytes(checkpoint_weights(other))
    for call in (
        lambda: checkpoint_weights(model, adapters="left out"),
        lambda: load_checkpoint_weights(model, checkpoint_weights(other)),
    ):
        with pytest.raises(InvalidPatcherError, match=r"merged into its weights, so they can't be separated from it"):
            call()


def test_an_adapter_of_one_of_two_tied_weights_is_not_merged() -> None:
    folder = shared.checkpoint(tiny_llama_config(tie_word_embeddings=True))
    for target in ("lm_head", "embed_tokens"):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=[target]))
        assert as_bytes(checkpoint_weights(model, adapters="left out")) == tensors(folder)
        with pytest.raises(InvalidPatcherError, match=r"can't be merged into .*tied to another that has no adapter"):
            checkpoint_weights(model, adapters="merged")


PROMPTS: dict[str, Any] = {
    "prompt tuning": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "prefix tuning": PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "p-tuning": PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=8, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("patcher", [None, Patcher(fusions=["qkv"])], ids=str)
@pytest.mark.parametrize("name", PROMPTS)
def test_what_is_put_before_the_tokens_is_in_no_weight(name: str, patcher: Patcher | None) -> None:
    folder = shared.checkpoint(tiny_llama_config())
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, patcher=patcher), PROMPTS[name])
    with pytest.raises(InvalidPatcherError, match=r"has an adapter, and adapters=None doesn't say what becomes of it"):
        checkpoint_weights(model)
    with pytest.raises(InvalidPatcherError, match=r"can't be merged into weights: it changes inputs, not weights"):
        checkpoint_weights(model, adapters="merged")
    assert as_bytes(checkpoint_weights(model, adapters="left out")) == tensors(folder)
    assert as_bytes(checkpoint_weights(model.base_model)) == tensors(folder)
    load_checkpoint_weights(model, checkpoint_weights(AutoModelForCausalLM.from_pretrained(folder)))


def _weighed_for_each_token(model: Any, folder: Path) -> Any:
    get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    model.config.use_cache = False
    return XLoraConfig(task_type="CAUSAL_LM", hidden_size=64, adapters={"0": str(folder)})


UNMERGED: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "X-LoRA": (_weighed_for_each_token, "it changes inputs, not weights"),
    "Poly": (lambda *_: PolyConfig(target_modules=["q_proj"], r=2), "PEFT says NotImplementedError"),
    "activated LoRA": (
        lambda *_: LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
        "PEFT says NotImplementedError: aLoRA does not support",
    ),
}


@pytest.mark.parametrize("name", UNMERGED)
def test_what_peft_can_not_merge_is_refused(name: str, tmp_path: Path) -> None:
    folder = shared.checkpoint(tiny_llama_config())
    base = AutoModelForCausalLM.from_pretrained(folder)
    make, reason = UNMERGED[name]
    model = get_peft_model(base, make(base, tmp_path))
    with pytest.raises(InvalidPatcherError, match=rf"can't be merged into weights: {reason}"):
        list(checkpoint_weights(model, adapters="merged"))
    assert as_bytes(checkpoint_weights(model, adapters="left out")) == tensors(folder)


def test_what_is_around_modules_of_the_model_is_refused() -> None:
    config = AdaptionPromptConfig(adapter_len=2, adapter_layers=1, target_modules="self_attn", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(shared.checkpoint(tiny_llama_config())), config)
    for adapters in (None, "merged", "left out"):
        with pytest.raises(
            InvalidPatcherError, match=r"layers\.1\.self_attn is a AdaptedAttention of PEFT, and which"
        ):
            checkpoint_weights(model, adapters=adapters)  # type: ignore[arg-type]


@pytest.mark.parametrize("patcher", [None, Patcher(fusions=["gate_up"])], ids=str)
@pytest.mark.parametrize("quantizer", [bnb_int8, torchao_int8, quanto_int8])
def test_what_is_quantized_is_as_saved_or_refused(
    quantizer: Quantizer, patcher: Patcher | None, tmp_path: Path
) -> None:
    folder = shared.checkpoint(tiny_llama_config())
    skip = ["gate_up_proj", "gate_proj", "up_proj", "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=patcher, quantization_config=quantizer(skip))
    try:
        model.save_pretrained(tmp_path)
    except Exception:
        with pytest.raises(PatchedWeightsError, match=r"is quantized|are quantized by \w+, which can't save them"):
            checkpoint_weights(model)
        return
    assert as_bytes(checkpoint_weights(model)) == tensors(tmp_path)
    with pytest.raises(InvalidPatcherError, match=r"is quantized, so nothing can be written into it in place"):
        load_checkpoint_weights(model, checkpoint_weights(AutoModelForCausalLM.from_pretrained(folder)))
