"""Operations of weight conversions, as copies that one load makes: exactly reversible, and for any number of tensors.

transformers reverses a concatenation by cutting into equal pieces, and gives a transposition one tensor only. A copy
of a concatenation remembers the sizes that it has joined; a copy of an operation on one tensor is run for each, so
`[Transpose(), Concatenate()]` means what it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ConversionOps,
    Interleave,
    LinearToConv3d,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
)

from patcher.layouts.transforms import single

_GROUP = re.compile(r"\\\d")
#: Operations that move values, by the numbers of their tensors alone.
_MOVEMENTS = (Chunk, Concatenate, MergeModulelist, SplitModulelist, Transpose)
#: Operations that change one tensor, whatever others there are.
_OF_ONE = (Conv3dToLinear, Interleave, LinearToConv3d, Transpose)


def reversible(operations: Iterable[ConversionOps]) -> list[ConversionOps]:
    """Copies of the operations of a conversion for one of its layers.

    >>> reversible([Transpose(), Concatenate(dim=0)])
    [ForEach(Transpose), ReversibleConcatenate(dim=0)]
    """
    return [
        ReversibleConcatenate(operation.dim)
        if type(operation) is Concatenate
        else ForEach(operation)
        if type(operation) in _OF_ONE
        else deepcopy(operation)
        for operation in operations
    ]


def only_moves(transform: WeightConverter) -> bool:
    """Whether a conversion moves values in the same way, whatever the sizes of its tensors are."""
    return all(type(operation) in _MOVEMENTS for operation in transform.operations)


class ReversibleConcatenate(Concatenate):
    """A `Concatenate` whose reverse cuts at the sizes that it joined, not into equal pieces."""

    sizes: tuple[tuple[str, int], ...] = ()

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        sizes = []
        for pattern in source_patterns:
            tensors = input_dict.get(pattern, [])
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                sizes.append((pattern, tensor.shape[self.dim]))
        self.sizes = tuple(sizes)
        join: Any = super().convert
        joined: dict[str, torch.Tensor] = join(
            input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
        )
        if len(joined) == 1 and _GROUP.search(next(iter(joined))):
            # Anchored, `^(layers\.\d+\.)q$ -> \1qkv`: transformers expands a group in the name of the layer alone.
            (tensor,) = joined.values()
            return {kwargs["full_layer_name"]: tensor}
        return joined

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitBySizes(self.dim, self.sizes)


class SplitBySizes(ConversionOps):
    """Cut a tensor at given sizes. The reverse of `ReversibleConcatenate`."""

    def __init__(self, dim: int, sizes: tuple[tuple[str, int], ...]) -> None:
        self.dim = dim
        self.sizes = sizes

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[torch.Tensor]]:
        (tensors,) = input_dict.values()
        pieces = torch.split(single(tensors), [size for _, size in self.sizes], dim=self.dim)
        # The tensors were joined under their source patterns; those are this direction's target patterns.
        result: dict[str, list[torch.Tensor]] = {}
        for (pattern, _), piece in zip(self.sizes, pieces, strict=True):
            result.setdefault(pattern, []).append(piece.contiguous())
        return result


class ForEach(ConversionOps):
    """An operation on one tensor, for each of those that there are; as transformers has it where there is one."""

    def __init__(self, operation: ConversionOps) -> None:
        self.operation = deepcopy(operation)

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        listed = {name: value if isinstance(value, list) else [value] for name, value in input_dict.items()}
        run: Any = self.operation.convert
        if [len(tensors) for tensors in listed.values()] == [1]:
            found: dict[str, Any] = run(
                input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
            )
            return found
        return {
            name: [
                single(*run({name: tensor}, source_patterns=[name], target_patterns=[name], **kwargs).values())
                for tensor in tensors
            ]
            for name, tensors in listed.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return ForEach(self.operation.reverse_op)

    def __repr__(self) -> str:
        return f"ForEach({type(self.operation).__name__})"
