"""Which conversions a load has: those of transformers without the filtered ones, and the extra ones in front."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import all_patterns, copy_transform
from patcher.expressions import Expressions

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher


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
    filters = Expressions(text for patcher in patchers for text in patcher.filtered_weight_conversion_patterns)
    added = [transform for patcher in patchers for transform in patcher.extra_weight_conversions]
    added += [copy_transform(transform) for transform in fusion_transforms]
    # A load finds a converter's operations by the text of its source pattern, and the last one with that text wins;
    # but the first one names the target. So of two with one text only the one in front may stay.
    taken = {
        text for transform in added if isinstance(transform, WeightConverter) for text in transform.source_patterns
    }
    kept: list[WeightTransform] = []
    filtered: list[tuple[WeightTransform, str]] = []
    superseded: list[tuple[WeightTransform, str]] = []
    for conversion in stock:
        patterns = all_patterns(conversion) if filters else ()
        if hits := dict.fromkeys(each for text in sorted(patterns) for each in filters.found_in(text)):
            filtered += [(conversion, each) for each in hits]
        elif isinstance(conversion, WeightConverter) and taken.intersection(conversion.source_patterns):
            superseded.append((conversion, ""))
        else:
            kept.append(conversion)
    return SelectedConversions(tuple(added), tuple(kept), (*filtered, *superseded))
