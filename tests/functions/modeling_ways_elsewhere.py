"""The same of another file: each method and function sees the names of its own."""

from __future__ import annotations

from typing import Any

from torch import nn


def double(x: Any) -> Any:
    return x * 2


def through_elsewhere(x: Any) -> Any:
    return double(x)


TABLE = {"double": double}


class Base(nn.Module):
    def forward(self, x: Any) -> Any:
        return double(x)
