"""Weight conversions as values, and the one that is exactly reversible.

transformers reverses a concatenation by cutting into equal pieces. The copies that a load makes of ours remember the
sizes that they joined, and are cut there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from patcher import seams
from patcher.matching import search
from patcher.seams import Concatenate, ConversionOps, WeightConverter, WeightTransform

if TYPE_CHECKING:
    from patcher.patcher import Patcher

__all__ = [
    "RememberingConcatenate",
    "SelectedConversions",
    "SplitBySizes",
    "describe",
    "identity",
    "joins",
    "select_conversions",
    "single",
]


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


@dataclass(frozen=True, eq=False)
class SelectedConversions:
    """The conversions of a load: the added ones come first, the dropped ones are gone."""

    added: tuple[WeightTransform, ...] = ()
    kept: tuple[WeightTransform, ...] = ()
    #: (stock conversion, the filter that dropped it, or "" where an added conversion takes its tensors)
    dropped: tuple[tuple[WeightTransform, str], ...] = ()


def select_conversions(
    stock: Iterable[WeightTransform], patchers: Iterable[Patcher], fusion_transforms: Iterable[WeightTransform] = ()
) -> SelectedConversions:
    """Filter the stock conversions and put the extra ones in front, those of the innermost patcher first."""
    patchers = list(patchers)
    filters = dict.fromkeys(text for patcher in patchers for text in patcher.filtered_weight_conversion_patterns)
    added = [transform for patcher in patchers for transform in patcher.extra_weight_conversions]
    added += [seams.copy_transform(transform) for transform in fusion_transforms]
    kept: list[WeightTransform] = []
    dropped: list[tuple[WeightTransform, str]] = []
    for conversion in stock:
        patterns = seams.all_patterns(conversion) if filters else ()
        hits = [filtered for filtered in filters if any(search(filtered, text) for text in patterns)]
        dropped += [(conversion, hit) for hit in hits]
        if not hits:
            kept.append(conversion)
    # A load finds a converter's operations by the text of its source pattern, and the last one with that text wins;
    # but the first one names the target. So of two with one text only the one in front may stay.
    taken = {
        text for transform in added if isinstance(transform, WeightConverter) for text in transform.source_patterns
    }
    for transform in list(kept):
        if isinstance(transform, WeightConverter) and taken.intersection(transform.source_patterns):
            kept.remove(transform)
            dropped.append((transform, ""))
    return SelectedConversions(tuple(added), tuple(kept), tuple(dropped))
