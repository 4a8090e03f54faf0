"""What models compute, compared to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support import shared, tiny
from tests.support.checkpoints import saved


def logits(model: Any, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    """What a model computes: its logits, or its first output where it has none."""
    return shared.output_of(model, _output) if inputs is None else _output(model, inputs)


def _output(model: Any, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(**(tiny.tiny_inputs(model.config) if inputs is None else inputs))
    result: torch.Tensor = found.logits if "logits" in found else found[0]
    return result


def assert_equal_models(
    models: list[PreTrainedModel], stock: PreTrainedModel, folder: Path, inputs: dict[str, Any] | None = None
) -> None:
    """Equal logits among the models; and each saves what the stock model saves, byte for byte."""
    expected = logits(models[0], inputs)
    original = saved(stock, folder / "stock")
    for number, model in enumerate(models):
        assert torch.equal(logits(model, inputs), expected), number
        assert saved(model, folder / str(number)) == original, number
