"""Where the parameters of a stock model come from: which keys of a checkpoint, by which converter."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming

from patcher.compat.conversions import copy_transform, dot_natural_key, rename_key, stock_conversions, stock_revert
from patcher.compat.models import ModelView
from patcher.conversions.transforms import describe


class NotConvertibleError(Exception):
    """Why the checkpoint can't be turned into the joined layout."""


@dataclass(frozen=True)
class ParameterSource:
    """How a stock load makes parameters: from which keys (as renamed), by which converter, if it takes one.

    Attributes:
        keys: the keys.
        patterns: the source pattern that takes each key; "" without a converter.
        targets: (target pattern, parameter) of all that is made of the keys.
        converter: the converter.
    """

    keys: tuple[str, ...]
    patterns: tuple[str, ...]
    targets: tuple[tuple[str, str], ...]
    converter: WeightConverter | None = None

    def __str__(self) -> str:
        return self.keys[0] if self.converter is None else describe(self.converter)


class Origins(dict[str, ParameterSource]):
    """Parameter -> where it comes from."""

    def __missing__(self, name: str) -> ParameterSource:
        raise NotConvertibleError(f"no checkpoint key makes {name}")


#: skeleton -> the shapes that it had, and its origins: each fusion asks twice, and some models have 50,000 keys
_known_origins: weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, torch.Size], Origins]] = (
    weakref.WeakKeyDictionary()
)


def origins_of(model: PreTrainedModel) -> Origins:
    """How each parameter of a stock skeleton is made by a load of the checkpoint that the model would save."""
    state_dict = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in state_dict.items()}
    known = _known_origins.get(model)
    if known is None or known[0] != shapes:
        known = _known_origins[model] = (shapes, _origins(model, state_dict))
    return known[1]


def _origins(model: PreTrainedModel, state_dict: dict[str, torch.Tensor]) -> Origins:
    conversions = stock_conversions(model)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    if not converters:
        return Origins({name: _unconverted(name, name) for name in state_dict})
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    checkpoint = stock_revert(model, dict(state_dict))
    taken: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    origins = Origins()
    for key in sorted(checkpoint, key=dot_natural_key):
        between, _, _ = rename_key(key, renamings)
        renamed, taker, pattern = rename_key(key, conversions, model, state_dict)
        if taker is None:
            origins[renamed] = _unconverted(between, renamed)
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
            origins[name] = ParameterSource(keys, by, targets, converter)
    return origins


def _unconverted(key: str, name: str) -> ParameterSource:
    return ParameterSource((key,), ("",), (("", name),))


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


def as_separate(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> ModelView:
    """A fused model as stock's operations expect it, which look at parameters: with the parts of what is joined.

    Args:
        model: the model.
        shapes: parameters that it doesn't have in any form, and their shapes.
    """

    def get_parameter(name: str) -> torch.Tensor:
        if name in shapes:
            return torch.empty(shapes[name], device="meta")
        # Not `Module.get_parameter`, for which a joined part is no module.
        found: torch.Tensor = functools.reduce(getattr, name.split("."), model)
        return found

    return ModelView(model, get_parameter=get_parameter)
