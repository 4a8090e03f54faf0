"""Adapters of peft for tests: made of random numbers, loaded by every way that there is, compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from patcher import Patcher
from tests.support.comparing import logits
from tests.support.tiny import tiny_inputs

#: What people adapt.
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: (the base, the adapter, options of the base) -> a model
Load = Callable[..., Any]


def base(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def as_peft_model(folder: Path, adapter: Path, **options: Any) -> Any:
    return PeftModel.from_pretrained(base(folder, **options), adapter)


def with_little_memory(folder: Path, adapter: Path, **options: Any) -> Any:
    return PeftModel.from_pretrained(base(folder, **options), adapter, low_cpu_mem_usage=True)


def by_load_adapter(folder: Path, adapter: Path, **options: Any) -> Any:
    model = base(folder, **options)
    model.load_adapter(str(adapter))
    return model


def from_its_folder(folder: Path, adapter: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(adapter, **options)


LOADS: list[Load] = [as_peft_model, with_little_memory, by_load_adapter, from_its_folder]


def config(**settings: Any) -> LoraConfig:
    """Of an adapter whose matrices are random, so that it does something."""
    return LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False} | settings)


def new_adapter(model: Any, into: Path, seed: int = 0, **settings: Any) -> torch.Tensor:
    """Save a random adapter of a model; what the model computes with it."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config(**settings))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if value.requires_grad or (settings.get("bias") and name.endswith("bias")):
                value.add_(torch.randn_like(value) * 0.05)
    result = logits(adapted)
    adapted.save_pretrained(into)
    return result


def train(model: Any, steps: int = 2) -> Any:
    """A few steps; the model in eval mode."""
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)
    inputs = tiny_inputs(model.config)
    model.train()
    for _ in range(steps):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def trained(folder: Path, into: Path, patcher: Patcher, **settings: Any) -> Any:
    """A model with an adapter that was trained on it, and saved."""
    torch.manual_seed(0)
    model = train(get_peft_model(base(folder, patcher=patcher), config(**settings)))
    model.save_pretrained(into)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def settings_of(folder: Path) -> dict[str, Any]:
    """What the config of an adapter says; lists of names in one order."""
    found = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    return {key: sorted(value) if isinstance(value, list) else value for key, value in found.items()}


def assert_same_files(one: Path, other: Path) -> None:
    """Two saved adapters are the same, byte for byte."""
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}
    assert settings_of(one) == settings_of(other)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


def adapted_layers(model: Any) -> int:
    return sum(hasattr(module, "lora_A") for module in model.modules())
