"""Weight conversions as values, and the one that is exactly reversible.

transformers reverses a concatenation by cutting into equal pieces. The copies that a load makes of ours remember the
sizes that they joined, and are cut there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from patcher import seams
from patcher.matching import search
from patcher.seams import Concatenate, ConversionOps, WeightTransform

__all__ = ["RememberingConcatenate", "SplitBySizes", "describe", "filter_conversions", "identity", "joins", "single"]


def identity(transform: WeightTransform) -> tuple[Any, ...]:
    """What two transforms that do the same have in common: weight transforms have no equality of their own."""
    return (type(transform), _frozen(seams.transform_settings(transform)))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted(((str(key), _frozen(item)) for key, item in value.items()), key=lambda pair: pair[0]))
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_frozen(item) for item in value)
    if isinstance(value, ConversionOps):
        return (type(value), _frozen(vars(value)))
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().cpu().flatten().tolist().__repr__())
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def describe(transform: WeightTransform) -> str:
    """One line: `q_proj, k_proj, v_proj -> qkv_proj [Concatenate(dim=0)]`."""
    arrow = f"{', '.join(seams.source_patterns(transform))} -> {', '.join(seams.target_patterns(transform))}"
    operations = getattr(transform, "operations", None)
    return f"{arrow} [{', '.join(map(repr, operations))}]" if operations else f"{arrow} [rename]"


def filter_conversions(
    conversions: Iterable[WeightTransform], filters: Iterable[str]
) -> tuple[list[WeightTransform], list[tuple[WeightTransform, str]]]:
    """The conversions that no filter is found in, and the dropped ones with the filters that dropped them."""
    kept: list[WeightTransform] = []
    dropped: list[tuple[WeightTransform, str]] = []
    expressions = list(filters)
    if not expressions:
        return list(conversions), []
    for conversion in conversions:
        patterns = seams.all_patterns(conversion)
        hits = [expression for expression in expressions if any(search(expression, text) for text in patterns)]
        if hits:
            dropped += [(conversion, hit) for hit in hits]
        else:
            kept.append(conversion)
    return kept, dropped


def joins(transform: WeightTransform) -> bool:
    """Whether the transform is a converter that concatenates."""
    return any(type(operation) is Concatenate for operation in getattr(transform, "operations", ()))


_GROUP = re.compile(r"\\\d")


class RememberingConcatenate(Concatenate):
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


def single(value: Any) -> Any:
    """The tensor, of one that transformers may have handed on in a list."""
    return value[0] if isinstance(value, list) else value


class SplitBySizes(ConversionOps):
    """Cut a tensor at given sizes. The reverse of `RememberingConcatenate`."""

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

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(self.dim)
