"""Which conversions a load has: those of transformers without the filtered ones, and those of patchers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import source_patterns, target_patterns
from patcher.expressions import search
from patcher.layouts.transforms import conversions_of

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher


@dataclass(frozen=True, eq=False)
class Added:
    """A conversion that comes before those of transformers.

    Attributes:
        modules: the paths of the modules below which its names are matched, of one that a class brings; None for whole
            names.
        is_anchored: whether it names the modules that it is for itself: that of a fusion.
    """

    transform: WeightTransform
    modules: frozenset[str] | None = None
    is_anchored: bool = False


@dataclass(frozen=True, eq=False)
class SelectedConversions:
    """The conversions of a load: the dropped ones are gone."""

    added: tuple[Added, ...] = ()
    kept: tuple[WeightTransform, ...] = ()
    #: (stock conversion, the filter that dropped it)
    dropped: tuple[tuple[WeightTransform, str], ...] = ()


def select_conversions(
    stock: Iterable[WeightTransform],
    patchers: Iterable[Patcher],
    fusion_transforms: Iterable[WeightTransform] = (),
    replaced: Iterable[tuple[str, type[nn.Module]]] = (),
) -> SelectedConversions:
    """Filter the stock conversions, and list the others.

    First come those of the patchers, of the innermost first, then what replacement classes bring for their modules.

    Args:
        replaced: path -> class of the modules that are replaced.
    """
    patchers = list(patchers)
    filters = [text for patcher in patchers for text in patcher.filtered_weight_conversion_patterns]
    added = [Added(transform) for patcher in patchers for transform in patcher.extra_weight_conversions]
    added += brought(replaced)
    added += [Added(transform, is_anchored=True) for transform in fusion_transforms]
    kept: list[WeightTransform] = []
    dropped: list[tuple[WeightTransform, str]] = []
    for conversion in stock:
        written = (*source_patterns(conversion), *target_patterns(conversion)) if filters else ()
        patterns = {*written, *conversion.source_patterns, *conversion.target_patterns} if filters else ()
        if hits := dict.fromkeys(each for text in sorted(patterns) for each in filters if search(each, text)):
            dropped += [(conversion, each) for each in hits]
        else:
            kept.append(conversion)
    return SelectedConversions(tuple(added), tuple(kept), tuple(dropped))


def converts(patcher: Patcher) -> bool:
    """Whether a patcher adds or drops conversions, those of fusions apart."""
    return bool(
        patcher.extra_weight_conversions
        or patcher.filtered_weight_conversion_patterns
        or any(conversions_of(cls) for cls in (*patcher.class_mapping.values(), *patcher.module_mapping.values()))
    )


def brought(replaced: Iterable[tuple[str, type[nn.Module]]]) -> list[Added]:
    """What replacement classes bring in their `conversion_mapping`, with the modules below which it is matched."""
    paths: dict[type[nn.Module], list[str]] = {}
    for path, cls in replaced:
        paths.setdefault(cls, []).append(path)
    return [Added(transform, frozenset(found)) for cls, found in paths.items() for transform in conversions_of(cls)]
