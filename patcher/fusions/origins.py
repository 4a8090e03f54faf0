"""Where the parameters of a stock model come from: which keys of a checkpoint, by which converter."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming

from patcher.compat.conversions import copy_transform, dot_natural_key, rename_key, stock_conversions, stock_revert

__all__ = ["AsStock", "Made", "NotConvertibleError", "origins_of"]


class NotConvertibleError(Exception):
    """Why the checkpoint can't be turned into the joined layout."""


@dataclass(frozen=True)
class Made:
    """How a stock load makes one parameter: from which keys (as renamed), by which converter, as which target."""

    keys: tuple[str, ...]
    converter: WeightConverter | None = None
    #: the converter's source pattern for each key, and all parameters that it makes, by target pattern
    patterns: tuple[str, ...] = ()
    targets: tuple[tuple[str, str], ...] = ()


#: skeleton -> the shapes that it had, and its origins: each fusion asks twice, and some models have 50,000 keys
_known_origins: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, torch.Size], dict[str, Made]]] = (
    weakref.WeakKeyDictionary()
)


def origins_of(model: PreTrainedModel) -> dict[str, Made]:
    """How each parameter of a stock skeleton is made by a load of the checkpoint that the model would save."""
    state_dict = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in state_dict.items()}
    known = _known_origins.get(model)
    if known is None or known[0] != shapes:
        known = _known_origins[model] = (shapes, _origins(model, state_dict))
    return dict(known[1])


def _origins(model: PreTrainedModel, state_dict: dict[str, torch.Tensor]) -> dict[str, Made]:
    conversions = stock_conversions(model)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    if not converters:
        return {name: Made((name,)) for name in state_dict}
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    checkpoint = stock_revert(model, dict(state_dict))
    taken: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    origins: dict[str, Made] = {}
    for key in sorted(checkpoint, key=dot_natural_key):
        between, _, _ = rename_key(key, renamings)
        renamed, taker, pattern = rename_key(key, conversions, model, state_dict)
        if taker is None:
            origins[renamed] = Made((between,))
            continue
        if renamed not in taken:
            taken[renamed] = (copy_transform(taker), [])
        copy, sources = taken[renamed]
        copy.add_tensor(renamed, key, pattern or "", checkpoint[key])
        sources.append((between, pattern or ""))
    for first, (converter, sources) in taken.items():
        made = list(converter.convert(first, model=model, config=model.config))
        patterns = list(converter.target_patterns)
        targets = _by_pattern(first, made, patterns)
        keys, by = tuple(key for key, _ in sources), tuple(pattern for _, pattern in sources)
        for name in made:
            origins[name] = Made(keys, converter, by, targets)
    return origins


def _by_pattern(first: str, made: list[str], patterns: list[str]) -> tuple[tuple[str, str], ...]:
    """(target pattern, parameter): operations name what they make by pattern."""
    if len(made) == 1:
        return ((patterns[0], made[0]),)
    for name in made:
        for pattern in patterns:
            head, found, tail = name.partition(pattern)
            if found and [f"{head}{other}{tail}" for other in patterns] == made:
                return tuple(zip(patterns, made, strict=True))
    return tuple((name, name) for name in made)


class AsStock:
    """A fused model as stock's operations expect it, which look at parameters: with the parts of what is joined.

    Args:
        model: the model.
        shapes: parameters that it doesn't have in any form, and their shapes.
    """

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> None:
        self._model = model
        self._shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        if name in self._shapes:
            return torch.empty(self._shapes[name], device="meta")
        # Not `Module.get_parameter`, for which a joined part is no module.
        found: torch.Tensor = functools.reduce(getattr, name.split("."), self._model)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
