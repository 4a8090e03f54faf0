"""What stands at the places where weights are read into a model that stands: those of an adapter, for one."""

from __future__ import annotations

from typing import Any

from torch import nn

from patcher.compat.conversions import copy_transform
from patcher.compat.hooks import Stock
from patcher.compat.models import as_stock
from patcher.conversions.selection import select_conversions
from patcher.loading.record import record_of


def conversions_of(stock: Stock, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The conversions of a model that stands, as whoever loads an adapter into it asks for them."""
    record = record_of(model)
    if record is None:
        return stock(model, *args, **kwargs)
    found = stock(as_stock(model), *args, **kwargs)
    selected = select_conversions(found, record.patchers, record.fusion_transforms)
    return [*map(copy_transform, selected.added), *selected.kept]
