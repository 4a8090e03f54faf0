"""What a module of a user's class carries whose weights conversions have made: how either layout becomes the other."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from patcher.compat.conversions import copy_transform
from patcher.layouts.layouts import Layout
from patcher.layouts.reversal import reverse_layer
from patcher.layouts.tracing import LayerTrace
from patcher.layouts.transforms import describe, single

#: On a module whose weights conversions have made: its `ConvertedWeights`.
CONVERTED = "_patcher_converted"


@dataclass(frozen=True)
class Converted(Layout):
    """What a conversion of a patcher has made for one module.

    Attributes:
        transform: the conversion.
        done: what it did in the load, in the names of that model.
        config: that of the model, which operations look at.
    """

    transform: Any = None
    done: LayerTrace = field(default_factory=lambda: LayerTrace("", {}, {}, []))
    config: Any = None

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        converter = copy_transform(self.transform)
        converter.operations = copy.deepcopy(self.done.operations)
        keys = [(key, pattern) for pattern, sources in self.done.sources.items() for key, _ in sources]
        for (key, pattern), tensor in zip(keys, tensors, strict=True):
            converter.add_tensor(self.done.target, key, pattern, tensor)
        made = converter.convert(self.done.target, model=self._model, config=self.config)
        return [single(made[name]) for name in self.done.produced]

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = dict(zip(self.done.produced, tensors, strict=True))
        restored = reverse_layer(self.transform, self.done, made, self._model)
        return [restored[key] for sources in self.done.sources.values() for key, _ in sources]

    def fused_shapes(self) -> list[torch.Size]:
        return [shape for _, shape, _ in self.done.produced.values()]

    def __str__(self) -> str:
        return describe(self.transform)

    @property
    def _model(self) -> Any:
        """The model as operations look at it."""
        produced = self.done.produced

        def get_parameter(name: str) -> torch.Tensor:
            return torch.empty(produced[name][1], device="meta")

        return SimpleNamespace(config=self.config, get_parameter=get_parameter)


@dataclass(frozen=True)
class ConvertedWeights:
    """The layouts of a module whose class is a user's, and whose weights conversions have made."""

    layouts: tuple[Layout, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedWeights:
        return self

    def __reduce__(self) -> Any:
        return (_unpickled, (self.layouts,))


def _unpickled(layouts: tuple[Layout, ...]) -> ConvertedWeights:
    importlib.import_module("patcher").install()  # so that the model saves there as it does here
    return ConvertedWeights(layouts)


def converted_weights(module: nn.Module) -> ConvertedWeights | None:
    """What a module of a user's class carries, None if no conversion has made its weights."""
    return module.__dict__.get(CONVERTED)
