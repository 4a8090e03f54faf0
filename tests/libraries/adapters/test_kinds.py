"""Every kind of adapter on a fused model: it computes what it does on stock, and goes to stock and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, TaskType, get_peft_model

from patcher import Patcher
from tests.support import shared
from tests.support.adapters import SEVEN, assert_close, base, tensors_of
from tests.support.comparing import logits
from tests.support.tiny import tiny_llama_config

# What kinds say of themselves.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FUSED = Patcher(fusions=["qkv", "gate_up"])
ATTENTION = ["q_proj", "v_proj"]
TOKENS = {"num_virtual_tokens": 3}

#: name -> the config class of peft, and what it is given
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"target_modules": SEVEN}),
    "LoRA of the usual layers": ("LoraConfig", {}),
    "LoRA of all linear layers": ("LoraConfig", {"target_modules": "all-linear"}),
    "rsLoRA": ("LoraConfig", {"target_modules": ATTENTION, "use_rslora": True}),
    "DoRA": ("LoraConfig", {"target_modules": SEVEN, "use_dora": True}),
    "PiSSA": ("LoraConfig", {"target_modules": SEVEN, "init_lora_weights": "pissa"}),
    "OLoRA": ("LoraConfig", {"target_modules": SEVEN, "init_lora_weights": "olora"}),
    "aLoRA": ("LoraConfig", {"target_modules": ATTENTION, "alora_invocation_tokens": [5]}),
    "AdaLoRA": ("AdaLoraConfig", {"target_modules": SEVEN, "total_step": 10}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"target_modules": SEVEN}),
    "LoKr": ("LoKrConfig", {"target_modules": SEVEN}),
    "OFT": ("OFTConfig", {"target_modules": SEVEN, "oft_block_size": 8}),
    "BOFT": ("BOFTConfig", {"target_modules": ATTENTION, "boft_block_size": 4}),
    "HRA": ("HRAConfig", {"target_modules": SEVEN}),
    "VeRA": ("VeraConfig", {"target_modules": SEVEN, "r": 4}),
    "VB-LoRA": ("VBLoRAConfig", {"target_modules": ATTENTION, "num_vectors": 8, "vector_length": 8, "topk": 2}),
    "RandLora": ("RandLoraConfig", {"target_modules": ATTENTION, "r": 4}),
    "TinyLoRA": ("TinyLoraConfig", {"target_modules": SEVEN}),
    "FourierFT": ("FourierFTConfig", {"target_modules": SEVEN, "n_frequency": 10}),
    "MiSS": ("MissConfig", {"target_modules": ATTENTION, "r": 4}),
    "C3A": ("C3AConfig", {"target_modules": ["q_proj", "o_proj"], "block_size": 8}),
    "RoAd": ("RoadConfig", {"target_modules": SEVEN, "group_size": 8}),
    "SHiRA": ("ShiraConfig", {"target_modules": SEVEN, "r": 4, "random_seed": 1}),
    "LN tuning": ("LNTuningConfig", {}),
    "prompt tuning": ("PromptTuningConfig", TOKENS),
    "p-tuning": ("PromptEncoderConfig", TOKENS | {"encoder_hidden_size": 16}),
    "prefix tuning": ("PrefixTuningConfig", TOKENS),
}
#: With the token in it that turns an aLoRA on.
TEXT = torch.tensor([[4, 3, 5, 6, 7]])
#: Those that change the weights beneath: saved as they are, they are for the model as it was after that.
CHANGE_THE_BASE = {"PiSSA", "OLoRA"}


def config_of(name: str) -> Any:
    cls, settings = KINDS[name]
    given = {"init_lora_weights": False} if cls == "LoraConfig" else {}
    return getattr(peft, cls)(task_type=TaskType.CAUSAL_LM, **given | settings)


def adapted(name: str, model: Any) -> Any:
    """A model with an adapter of random numbers."""
    torch.manual_seed(0)
    found = get_peft_model(model, config_of(name))
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return found.eval()


def outputs(model: Any) -> torch.Tensor:
    return torch.cat([logits(model, {"input_ids": text}).flatten() for text in (TEXT, TEXT[:, :2])])


def step(model: Any) -> Any:
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.05)
    model.train()
    torch.manual_seed(1)
    model(input_ids=TEXT, labels=TEXT).loss.backward()
    optimizer.step()
    return model.eval()


def loaded(model: Any, folder: Path) -> Any:
    return PeftModel.from_pretrained(model, folder).eval()


@pytest.mark.parametrize("name", KINDS)
def test_it_is_what_it_is_on_stock(name: str, llama: Path, tmp_path: Path) -> None:
    """Made, saved, loaded across, trained: five comparisons."""
    ours, theirs = (adapted(name, base(llama, patcher=patcher)) for patcher in (FUSED, None))
    plain = outputs(base(llama))
    expected = outputs(theirs)
    assert_close(outputs(ours), expected)
    assert expected.shape != plain.shape or not torch.allclose(expected, plain, atol=1e-3)
    for model, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        model.save_pretrained(folder)
    one, other = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    onto_stock = loaded(base(llama), tmp_path / "ours")
    onto_ours = loaded(base(llama, patcher=FUSED), tmp_path / "theirs")
    assert_close(outputs(onto_ours), outputs(onto_stock))
    if name not in CHANGE_THE_BASE:
        assert_close(outputs(onto_ours), expected)
    if name not in ("AdaLoRA",):  # whose step needs its trainer's budget
        assert_close(outputs(step(ours)), outputs(step(theirs)))


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_one_that_changes_the_base_is_converted_to_one_that_does_not(start: str, llama: Path, tmp_path: Path) -> None:
    """By peft's own `path_initial_model_for_weight_conversion`."""
    for patcher, folder in ((FUSED, tmp_path / "ours"), (None, tmp_path / "theirs")):
        torch.manual_seed(0)
        settings = peft.LoraConfig(target_modules=SEVEN, init_lora_weights=start, task_type="CAUSAL_LM")
        model = get_peft_model(base(llama, patcher=patcher), settings)
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(folder / "start")
        model.peft_config["default"].init_lora_weights = start
        step(model)
        model.save_pretrained(folder / "plain", path_initial_model_for_weight_conversion=folder / "start")
        expected = outputs(model)
        for onto in (FUSED, None):
            assert_close(outputs(loaded(base(llama, patcher=onto), folder / "plain")), expected)


def test_biases_that_are_trained_with_it_have_the_names_of_stock(tmp_path: Path) -> None:
    """`bias="all"` names every bias of the model, also of layers that the adapter doesn't target."""
    folder = shared.checkpoint(tiny_llama_config(mlp_bias=True, attention_bias=True))
    settings = peft.LoraConfig(target_modules=["down_proj"], bias="all", task_type="CAUSAL_LM")
    model = get_peft_model(base(folder, patcher=FUSED), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.add_(1.0)
    model.save_pretrained(tmp_path)
    assert any(key.endswith("q_proj.bias") for key in tensors_of(tmp_path))
    for onto in (FUSED, None):
        assert_close(outputs(loaded(base(folder, patcher=onto), tmp_path)), outputs(model.eval()))
