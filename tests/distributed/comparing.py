"""A model that is split over processes, or of one of them, compared with the stock one."""

from __future__ import annotations

from torch import nn

from patcher import original_state_dict
from tests.compatibility.outcomes import compared
from tests.support.splitting import ROUNDING, all_whole


def assert_same_weights(model: nn.Module, stock: nn.Module, rounding: float = ROUNDING) -> None:
    """A patched model has the weights of the stock one, under its names and in its order."""
    compared(original_state_dict(model), all_whole(dict(stock.state_dict())), rounding=rounding)
