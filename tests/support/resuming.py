"""Runs of a few steps that stop, and go on in another model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim
from transformers import PretrainedConfig

from patcher import (
    load_original_optimizer_state_dict,
    load_original_state_dict,
    original_optimizer_state_dict,
    original_state_dict,
)

Make = Callable[[nn.Module], optim.Optimizer]


def in_double(config: PretrainedConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained`: what rounding explains is far from what is wrong."""
    experts = hasattr(config.get_text_config(), "num_local_experts") or hasattr(config, "num_experts")
    return {"dtype": torch.float64} | ({"experts_implementation": "eager"} if experts else {})


def as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def train(model: Any, optimizer: optim.Optimizer, inputs: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()


def through_a_file(value: Any) -> Any:
    """What is read of what was written, without code."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(model: Any, other: Any, make: Make, inputs: dict[str, Any], steps: tuple[int, int]) -> dict[str, Any]:
    """The weights, and the state of the optimizer, after steps in one model and further ones in another.

    Args:
        make: gives the optimizer of each.
    """
    optimizer = make(model)
    train(model, optimizer, inputs, steps[0])
    saved = through_a_file([original_state_dict(model), original_optimizer_state_dict(model, optimizer)])
    optimizer = make(other)
    load_original_state_dict(other, saved[0])
    load_original_optimizer_state_dict(other, optimizer, saved[1])
    train(other, optimizer, inputs, steps[1])
    return outcome(other, optimizer)


def uninterrupted(model: Any, make: Make, inputs: dict[str, Any], steps: int) -> dict[str, Any]:
    optimizer = make(model)
    train(model, optimizer, inputs, steps)
    return outcome(model, optimizer)


def outcome(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    state = original_optimizer_state_dict(model, optimizer)
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    by_name: Iterable[str] = sorted(state["state"])
    return {
        "weights": original_state_dict(model),
        "state": {name: state["state"][name] for name in by_name},
        "groups": [{key: value for key, value in group.items() if key != "param_names"} for group in groups],
    }
