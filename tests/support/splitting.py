"""Models that are split over two processes, or repeated in both: by transformers and by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from tests.support.resuming import as_double, in_double

#: What rounding in float64 explains, after a few steps.
ROUNDING = 1e-9


def split(**options: Any) -> dict[str, Any]:
    """The keyword argument of `from_pretrained` that splits a model over both processes."""
    return {"distributed_config": DistributedConfig(fsdp_size=2, **options)}


def split_by_hand(model: Any) -> Any:
    """A model of which `fully_shard` has split each decoder layer, and the rest."""
    text = getattr(model.model, "language_model", model.model)
    for layer in text.layers:
        fully_shard(layer)
    return fully_shard(model)


def whole(value: Any) -> Any:
    """All of a tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def all_whole(values: dict[str, Any]) -> dict[str, Any]:
    return {name: whole(value) for name, value in values.items()}


def in_double_of(row: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained`, of a row of the table: what rounding explains is far from what is wrong."""
    return in_double(row.config())


def batch(row: Any) -> dict[str, Any]:
    """Arguments of `forward` with labels, of a row of the table: others in each process, where it takes text alone."""
    inputs = as_double(row.training_inputs())
    if row.has_images:
        return inputs
    rank = dist.get_rank()
    return {name: value if "mask" in name else torch.roll(value, rank, dims=-1) for name, value in inputs.items()}


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = whole(model.eval()(**inputs).logits)
    return found


def adamw(model: nn.Module) -> optim.Optimizer:
    # With the usual eps a gradient that is rounding alone would be a step of the usual length.
    return optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(model: Any, optimizer: optim.Optimizer, inputs: dict[str, Any], steps: int = 3) -> list[float]:
    """The losses of a few steps."""
    losses = []
    model.train()
    for _ in range(steps):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def zeroed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model
