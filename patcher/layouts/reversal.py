"""Giving the checkpoint back: what traces say was made is taken apart again, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming, WeightTransform

from patcher.compat.conversions import dot_natural_key
from patcher.errors import PatchedWeightsError
from patcher.layouts.tracing import ConversionTrace, LayerTrace
from patcher.layouts.transforms import by_itself, describe


def reverse_conversions(
    traces: Iterable[ConversionTrace], state_dict: Mapping[str, torch.Tensor], model: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Take apart what the traces say was joined.

    Returns:
        The tensors under the names that they had before the conversions, and the rest of the state dict, untouched.

    Raises:
        PatchedWeightsError: an operation has no reverse, a tensor is missing or has changed its shape.
    """
    rest = dict(state_dict)
    restored: dict[str, torch.Tensor] = {}
    for trace in traces:
        if trace.lost:
            raise PatchedWeightsError(
                f"The weights can't be saved in the original format: the quantizer has rewritten "
                f"{describe(trace.transform)}, and that can't be reversed."
            )
        for entry in trace.entries:
            if not any(name in state_dict for name in entry.produced):
                continue  # a state dict of a part of the model
            restored.update(reverse_layer(trace.transform, entry, rest, model))
    return restored, rest


def reverse_layer(
    transform: WeightTransform, entry: LayerTrace, state_dict: dict[str, torch.Tensor], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Take what one conversion has made for one layer out of a state dict, and apart.

    Raises:
        PatchedWeightsError: an operation has no reverse, a tensor is missing or has changed its shape.
    """

    def fail(reason: str, cause: Exception | None = None) -> PatchedWeightsError:
        error = PatchedWeightsError(
            f"{', '.join(entry.produced)} can't be saved in the original format: {reason}.\n"
            f"It was made by {describe(transform)}.\n"
            "Give its operations a `reverse_op` that inverts them, or save the runtime layout yourself with "
            "`safetensors.torch.save_model(model, ...)`."
        )
        error.__cause__ = cause
        return error

    collected: dict[str, Any] = {}
    targets = transform.target_patterns
    for name, (pattern, shape, dtype) in entry.produced.items():
        tensor = state_dict.pop(name, None)
        if tensor is None:
            raise fail(f"{name} is missing in the state dict")
        if type(tensor) not in (torch.Tensor, nn.Parameter) or (tensor.dtype != dtype and tensor.dtype.itemsize == 1):
            raise fail(
                f"{name} is quantized ({type(tensor).__name__} of {tensor.dtype}), its companions can't be split (if "
                "only fusions made this layout, save_original_format=False saves it as it is)"
            )
        if tensor.shape != shape:
            raise fail(f"{name} had the shape {tuple(shape)} after the load, it has {tuple(tensor.shape)} now")
        # One target pattern with a star makes many parameters, `experts.0.w`, `experts.1.w`: together again.
        family = next((target for target in targets if _expands(target, pattern)), pattern)
        collected.setdefault(family, []).append(tensor)
    try:
        reverses = [operation.reverse_op for operation in reversed(entry.operations)]
        with torch.no_grad():
            for operation in reverses:
                collected = operation.convert(
                    collected,
                    source_patterns=[target for target in targets if target in collected] or list(collected),
                    # In the order in which they were written, as on the way in: the checkpoint's order is another.
                    target_patterns=[name for name in transform.source_patterns if name in entry.sources],
                    full_layer_name=entry.target,
                    model=model,
                    config=getattr(model, "config", None),
                    missing_keys=None,
                )
    except NotImplementedError as error:
        names = ", ".join(type(operation).__name__ for operation in entry.operations)
        raise fail(f"one of its operations ({names}) has no reverse", error) from error
    except Exception as error:
        raise fail(f"taking it apart failed with {type(error).__name__}: {error}", error) from error

    restored: dict[str, torch.Tensor] = {}
    # Pieces that stock cuts from one tensor, with the operations that stock has, are saved into one shard there too.
    as_stock = all(getattr(operation, "reverses_as_stock", False) for operation in entry.operations)
    for pattern, sources in entry.sources.items():
        tensors = _tensors_of(pattern, collected)
        if len(tensors) != len(sources):
            raise fail(f"the reverse gives {len(tensors)} tensors for {pattern!r}, the checkpoint had {len(sources)}")
        for (key, shape), tensor in zip(sources, tensors, strict=True):
            if tensor.shape != shape:
                raise fail(
                    f"the reverse gives {key} the shape {tuple(tensor.shape)}, the checkpoint had {tuple(shape)}"
                )
            restored[key] = tensor if as_stock else by_itself(tensor.contiguous())
    return restored


def _expands(pattern: str, name: str) -> bool:
    """Whether `name` is `pattern`, or `pattern` with a number in place of its star."""
    return name == pattern or (
        "*" in pattern and re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
    )


def _tensors_of(pattern: str, collected: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that operations left for a pattern: under it, or numbered in place of its star."""
    tensors: list[torch.Tensor] = []
    for name in sorted(collected, key=dot_natural_key):
        if _expands(pattern, name):
            value = collected[name]
            tensors += value if isinstance(value, list) else [value]
    return tensors


class AppliedRenaming(WeightRenaming):
    """A renaming that was applied in a load: it renames what it has renamed, wherever its pattern is found."""

    __slots__ = ("table",)

    def __init__(self, trace: ConversionTrace) -> None:
        super().__init__(source_patterns="unused", target_patterns="unused")
        self.table = dict(trace.renamed)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return (self.table[source_key], source_key) if source_key in self.table else (source_key, None)


class ReversibleRenaming(WeightRenaming):
    """A renaming that was applied in a load, as saving meets it: reversed by what it did, not by its pattern."""

    __slots__ = ("prefix", "table")

    def __init__(self, trace: ConversionTrace, base_model_prefix: str) -> None:
        super().__init__(source_patterns="unused", target_patterns="unused")
        self.table = {after: before for before, after in trace.renamed.items()}
        self.prefix = f"{base_model_prefix}." if base_model_prefix else ""

    def reverse_transform(self) -> WeightRenaming:
        return self  # it runs backwards only

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key in self.table:
            return self.table[source_key], source_key
        bare = source_key.removeprefix(self.prefix)
        if bare in self.table:  # the load put the prefix of the base model in front
            return self.prefix + self.table[bare], source_key
        longer = self.prefix + source_key
        if longer in self.table:  # or took it away
            return self.table[longer].removeprefix(self.prefix), source_key
        return source_key, None
