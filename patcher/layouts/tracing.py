"""What each conversion did in one load: per target, which tensors of which shapes went into it.

transformers reverses a conversion by pattern, so it takes every key that looks like a result. A trace names the
results, and `reversal.py` takes exactly those apart.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightTransform

from patcher.compat.conversions import copy_transform, source_patterns
from patcher.layouts.concatenate import ReversibleConcatenate
from patcher.layouts.located import as_written, pattern_as_written


@dataclass
class LayerTrace:
    """What one conversion did for one layer."""

    target: str
    #: source pattern -> (key, shape) of each tensor that it collected, in order
    sources: dict[str, list[tuple[str, torch.Size]]]
    #: parameter -> (the target pattern that made it, shape, dtype before any quantization)
    produced: dict[str, tuple[str, torch.Size, torch.dtype]]
    operations: list[ConversionOps]


@dataclass
class ConversionTrace:
    """What one conversion did in one load. Copies of a conversion, which a load makes per layer, share it."""

    transform: WeightTransform
    entries: list[LayerTrace] = field(default_factory=list)
    #: for a renaming: the key before -> the key after
    renamed: dict[str, str] = field(default_factory=dict)
    current: tuple[str, str] = ("", "")
    #: the layers where it raised
    failed: list[str] = field(default_factory=list)
    #: whether its own operations had run by then, so that it was the quantizer that raised
    failed_quantizing: bool = False
    #: a quantizer has put another conversion in its place
    lost: bool = False

    def had_effect(self, parameters: set[str], prefix: str) -> bool:
        """Whether something that it made or renamed is a parameter, or was taken further."""
        if self.lost or self.entries:
            return True
        if isinstance(self.transform, WeightConverter):
            return False
        names = parameters | {name.removeprefix(f"{prefix}.") for name in parameters}
        return any(name in names or f"{prefix}.{name}" in names for name in self.renamed.values()) or bool(
            self.renamed and not names.intersection(self.renamed)
        )

    def idle_sources(self) -> list[str]:
        """The source patterns, as they were written, that took nothing while others did."""
        seen = {pattern for entry in self.entries for pattern in entry.sources}
        pairs = zip(source_patterns(self.transform), self.transform.source_patterns, strict=True)
        return [text for text, pattern in pairs if seen and pattern not in seen]

    def is_uneven(self) -> bool:
        """Whether it has joined parts of different sizes."""
        return any(
            len({size for _, size in operation.sizes}) > 1
            for entry in self.entries
            for operation in entry.operations
            if isinstance(operation, ReversibleConcatenate)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ConversionTrace:
        # transformers copies a converter for each layer; `copy.deepcopy(model)` gets what only loading writes.
        return self


class _Traced:
    """The part of a traced transform that renaming and converting have in common."""

    __slots__ = ()
    trace: ConversionTrace

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        renamed, pattern = super().rename_source_key(source_key)  # type: ignore[misc]
        if pattern is not None:
            self.trace.current = (source_key, renamed)
            if renamed != source_key:
                self.trace.renamed[source_key] = renamed
        return renamed, pattern


class _TracedConverter(_Traced):
    __slots__ = ()
    collected: list[tuple[str, str]]
    if TYPE_CHECKING:
        operations: list[ConversionOps]

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        before, after = self.trace.current
        if target_key.endswith(f".{after}"):  # the load put the prefix of the base model in front
            before = target_key.removesuffix(after) + before
        elif after.endswith(f".{target_key}") and before.startswith(after.removesuffix(target_key)):
            before = before.removeprefix(after.removesuffix(target_key))
        self.collected.append((pattern_as_written(self, source_pattern), before))  # type: ignore[arg-type]
        super().add_tensor(target_key, source_key, source_pattern, future)  # type: ignore[misc]

    def copy(self, source_patterns: list[str], target_patterns: list[str], **kwargs: Any) -> WeightTransform:
        # A quantizer makes others of what it is given; those are its own, and nobody can follow them.
        other: WeightTransform = self.trace.transform.copy(source_patterns, target_patterns, **kwargs)
        return other

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        first, middle, last = _Witness(), list(self.operations), _Witness()
        self.operations = [first, *middle, last]  # type: ignore[misc]
        quantize = None
        if self.quantization_operation is not None:  # type: ignore[has-type]
            quantize = self.quantization_operation = _QuantizeEach(kwargs["hf_quantizer"])  # type: ignore[misc]
        try:
            result = super().convert(layer_name, *args, **kwargs)  # type: ignore[misc]
        except Exception:  # the load goes on and reports at its end
            self.trace.failed.append(layer_name)
            self.trace.failed_quantizing = bool(last.seen)
            raise
        sources: dict[str, list[tuple[str, torch.Size]]] = {}
        shapes = {pattern: list(seen) for pattern, seen in first.seen.items()}
        for pattern, key in self.collected:
            sources.setdefault(pattern, []).append((key, shapes[pattern].pop(0)))
        names = result if quantize is None else quantize.names  # in the order of the patterns
        produced = {
            name: (pattern, seen[0], last.dtypes[pattern])
            for name, (pattern, seen) in zip(names, last.seen.items(), strict=True)
        }
        self.trace.entries.append(LayerTrace(layer_name, sources, produced, middle))
        return result


class _Witness(ConversionOps):
    """An operation that changes nothing and remembers the shapes that pass."""

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.Size]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        for pattern, tensors in input_dict.items():
            listed = tensors if isinstance(tensors, list) else [tensors]
            self.seen[pattern] = [tensor.shape for tensor in listed]
            self.dtypes[pattern] = listed[0].dtype
        return input_dict


class _QuantizeEach(ConversionOps):
    """Quantize whatever a conversion makes; transformers' own operations take one parameter, the first."""

    def __init__(self, quantizer: Any) -> None:
        self._quantizer = quantizer
        self.names: list[str] = []

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self.names = list(input_dict)
        for name in self.names:
            value = input_dict.pop(name)
            if self._quantizer.param_needs_quantization(model, name):
                operation = self._quantizer.get_quantize_ops()
                # In a list, as a tensor that no conversion has made: quanto takes the first row of any other.
                value = value if isinstance(value, list) else [value]
                result.update(operation.convert({name: value}, full_layer_name=name, model=model, **kwargs))
            else:
                result[name] = value
        return result


@cache
def _traced_class(cls: type[WeightTransform]) -> type[WeightTransform]:
    if issubclass(cls, WeightConverter):
        bases: tuple[type, ...] = (_TracedConverter, cls)
        slots: tuple[str, ...] = ("trace", "collected")
    else:
        bases, slots = (_Traced, cls), ("trace",)
    return type(f"Traced{cls.__name__}", bases, {"__slots__": slots, "__module__": __name__})


def with_trace(transform: WeightTransform) -> Any:
    """A copy for one load, with a trace of its own."""
    known = trace_of(transform)
    written = as_written(transform) if known is None else known.transform
    cls = _traced_class(type(transform)) if known is None else type(transform)  # type: ignore[arg-type]
    copy = copy_transform(transform, cls)
    copy.trace = ConversionTrace(written)
    if isinstance(copy, WeightConverter) and isinstance(written, WeightConverter):
        copy.collected = []
        copy.operations = [
            ReversibleConcatenate(operation.dim) if type(operation) is Concatenate else deepcopy(operation)
            for operation in written.operations
        ]
    return copy


def trace_of(transform: WeightTransform) -> ConversionTrace | None:
    """The trace of a traced transform."""
    return getattr(transform, "trace", None)
