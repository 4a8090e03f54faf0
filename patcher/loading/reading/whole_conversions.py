"""Conversions of a load that splits its parameters over processes: of whole tensors.

transformers cuts each tensor of a checkpoint first, and runs a conversion on the pieces that a process has. What joins
or transposes them makes other rows then. Here conversions that a patcher has added run on whole tensors, in every
process, and what they make is cut. So do those of transformers that join; but those which stack experts first, of
which it reads in each process what that needs, run there, and only their trace is told by names and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightTransform

from patcher.compat.conversions import copy_transform, dot_natural_key, key_renamer
from patcher.compat.models import state_tensors
from patcher.errors import PatchedWeightsError
from patcher.layouts.groups import Group
from patcher.layouts.sources import Computation, Computed, dtype_of, on_meta
from patcher.layouts.tracing import trace_of
from patcher.layouts.transforms import describe
from patcher.loading.reading.fused_sources import FusedReading
from patcher.loading.reading.stock_parameters import converted


def is_split(model: PreTrainedModel) -> bool:
    """Whether a model holds pieces of parameters, the others of which other processes hold."""
    return any(isinstance(tensor, DTensor) for tensor in state_tensors(model).values())


def with_whole_conversions(
    model: PreTrainedModel,
    reading: FusedReading,
    mapping: Sequence[WeightTransform],
    followed: Sequence[WeightTransform],
    load_config: Any,
) -> tuple[FusedReading, list[WeightTransform]]:
    """The reading with sources for what conversions make, and the conversions that transformers runs itself.

    Args:
        mapping: the conversions of the load, in their order.
        followed: those of them that are transformers' own.
    """
    stacking = {id(item) for item in followed if _stacks(item)}
    own = state_tensors(model)
    rename = key_renamer(mapping, model, own)
    groups: dict[str, Group] = {}
    for key in sorted(reading.rest, key=dot_natural_key):
        renamed, taker, pattern = rename(key)
        if isinstance(taker, WeightConverter) and trace_of(taker) is not None and renamed in own:
            if renamed not in groups:
                groups[renamed] = Group(taker, renamed)
            source = reading.rest[key]
            if id(taker) in stacking:
                groups[renamed].add(key, pattern or "", on_meta(source))
            else:
                read = _Read(source, _dtype(load_config, own, renamed))
                groups[renamed].add(key, pattern or "", on_meta(source), read)
    rest, sources = dict(reading.rest), dict(reading.sources)
    for group in groups.values():
        if id(group.converter) in stacking:
            group.convert(model)  # for its trace
            continue
        taken = {key: rest.pop(key) for key in group.shapes}
        shapes = converted(group, model, {key: on_meta(source) for key, source in taken.items()})
        computation = Computation(_Conversion(group, model, taken))
        for name, tensor in shapes.items():
            source = Computed(computation, name, tuple(tensor.shape), dtype_of(next(iter(taken.values()))))
            (sources if name in own else rest)[name] = source
    plain = [_untraced(item) if id(item) in stacking else item for item in mapping]
    return replace(reading, rest=rest, sources=sources), plain


def in_order(mapping: Sequence[WeightTransform]) -> None:
    """Put what was traced in several threads into the order in which a load of one process has it.

    All processes have to agree on it, for they gather the weights of a module in this order.
    """
    for item in mapping:
        if (trace := trace_of(item)) is not None:
            trace.entries.sort(key=lambda entry: dot_natural_key(entry.target))


class _Read:
    """Reads a tensor of the checkpoint as a load does that isn't split: in the type that its parameter will have."""

    def __init__(self, source: Any, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype

    def __call__(self) -> torch.Tensor:
        tensor: torch.Tensor = self._source[...]
        return tensor.to(self._dtype)


class _Conversion:
    """Runs one conversion for one layer, the first time with the trace of the load."""

    def __init__(self, group: Group, model: PreTrainedModel, sources: Mapping[str, Any]) -> None:
        self._group, self._model, self._sources = group, model, sources
        self._is_traced = False

    def __call__(self) -> dict[str, torch.Tensor]:
        try:
            if self._is_traced:
                return converted(self._group, self._model, self._sources)
            self._is_traced = True
            return self._group.made(self._model)
        except Exception as error:  # in a thread of the load, which has no place for it
            raise PatchedWeightsError(
                f"{describe(self._group.converter)} failed for {self._group.first}: {type(error).__name__}: {error}\n"
                "Check the patterns, the order of the sources and the operations of this conversion."
            ) from error


def _untraced(transform: WeightTransform) -> WeightTransform:
    """A copy for one load, without the trace."""
    trace = trace_of(transform)
    copy: WeightTransform = copy_transform(transform if trace is None else trace.transform)
    return copy


def _stacks(transform: WeightTransform) -> bool:
    """Whether a conversion of transformers stacks the tensors of experts before it does anything else."""
    trace = trace_of(transform)
    operations = getattr(trace.transform if trace is not None else transform, "operations", ())
    first = operations[0] if operations else None
    return type(first) is MergeModulelist and first.dim == 0


def _dtype(load_config: Any, own: Mapping[str, torch.Tensor], name: str) -> torch.dtype:
    """The type that a load gives a parameter."""
    for pattern, dtype in (load_config.dtype_plan or {}).items():
        if re.search(pattern.replace("*", ".*"), name):
            found: torch.dtype = dtype
            return found
    return own[name].dtype
