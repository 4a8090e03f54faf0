"""What models compute and save, compared to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support import tiny


def logits(model: PreTrainedModel, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    """What a model computes: its logits, or its first output where it has none."""
    with torch.no_grad():
        found = model.eval()(**(tiny.tiny_inputs(model.config) if inputs is None else inputs))
    result: torch.Tensor = found.logits if "logits" in found else found[0]
    return result


def saved(model: PreTrainedModel, folder: Path) -> dict[str, bytes]:
    """The files that a model saves, but for the generation config, in which some classes have none."""
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "generation_config.json"}


def assert_equal_models(
    models: list[PreTrainedModel], stock: PreTrainedModel, folder: Path, inputs: dict[str, Any] | None = None
) -> None:
    """Equal logits among the models; and each saves what the stock model saves, byte for byte."""
    expected = logits(models[0], inputs)
    original = saved(stock, folder / "stock")
    for number, model in enumerate(models):
        assert torch.equal(logits(model, inputs), expected), number
        assert saved(model, folder / str(number)) == original, number
