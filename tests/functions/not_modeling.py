"""A class of somebody's own, of a file that defines no model."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.functions.modeling_tiny import scale


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.offset = scale(3.0)

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.offset
