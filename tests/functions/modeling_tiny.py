"""A model that calls functions where models of transformers rarely do: in `__init__`, and while it is initialised."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def scale(value: float) -> float:
    return value * 2


def at_first(value: float) -> float:
    return value


def beginning(value: float) -> float:
    return value


def late(value: Any) -> Any:
    return value


def last(value: Any) -> Any:
    return value


TABLE = {"late": late}


class TinyConfig(PretrainedConfig):
    model_type = "patcher_tiny_functions"


class Part(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.offset = scale(start)

    def forward(self, x: Any) -> Any:
        return TABLE["late"](self.linear(x) + self.offset)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part(3.0)

    def forward(self, x: Any) -> Any:
        return self.part(x)


class Final(nn.Module):
    def __init_subclass__(cls) -> None:
        raise TypeError("it is final")

    def forward(self, x: Any) -> Any:
        return last(x)


class TinyPreTrainedModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, at_first(1.0))
            nn.init.zeros_(module.bias)


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.around = Around()
        self.final = Final()
        self.first = beginning(5.0)
        self.post_init()

    def forward(self, x: Any) -> Any:
        return self.final(self.around(x)) * self.first
