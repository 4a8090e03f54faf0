"""A concatenation that is exactly reversible.

transformers reverses a concatenation by cutting into equal pieces. The copies that a load makes of ours remember the
sizes that they joined, and are cut there.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps

from patcher.layouts.transforms import single

_GROUP = re.compile(r"\\\d")


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
