"""Which conversions a load has: those of transformers without the filtered ones, and those of patchers in front."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from transformers.core_model_loading import WeightRenaming, WeightTransform

from patcher.compat.conversions import all_patterns, copy_transform
from patcher.expressions import Expressions
from patcher.layouts.located import is_about_a_module, located
from patcher.layouts.transforms import conversions_of

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher


T = TypeVar("T", bound=WeightTransform)


@dataclass(frozen=True, eq=False)
class SelectedConversions:
    """The conversions of a load: the dropped ones are gone."""

    added: tuple[WeightTransform, ...] = ()
    kept: tuple[WeightTransform, ...] = ()
    #: (stock conversion, the filter that dropped it)
    dropped: tuple[tuple[WeightTransform, str], ...] = ()


def in_order(added: Iterable[T], kept: Iterable[T]) -> list[T]:
    """All conversions of a load: those that patchers have added, and then transformers' own.

    But what a class brings is about the names of its parameters: its renamings come after those of transformers.
    """
    added = list(added)
    last = {id(each): each for each in added if is_about_a_module(each) and isinstance(each, WeightRenaming)}
    return [*(each for each in added if id(each) not in last), *kept, *last.values()]


def select_conversions(
    stock: Iterable[WeightTransform],
    patchers: Iterable[Patcher],
    fusion_transforms: Iterable[WeightTransform] = (),
    replaced: Iterable[tuple[str, type[nn.Module]]] = (),
    model: nn.Module | None = None,
) -> SelectedConversions:
    """Filter the stock conversions and put the others in front.

    First come those of the patchers, of the innermost first, then what replacement classes bring for their modules.

    Args:
        replaced: path -> class of the modules that are replaced.
        model: the one that stands. With it those that are added run only where it has what they make.
    """
    patchers = list(patchers)
    filters = Expressions(text for patcher in patchers for text in patcher.filtered_weight_conversion_patterns)
    added: list[tuple[WeightTransform, frozenset[str] | None]] = [
        (transform, None) for patcher in patchers for transform in patcher.extra_weight_conversions
    ]
    added += brought(replaced)
    kept: list[WeightTransform] = []
    dropped: list[tuple[WeightTransform, str]] = []
    for conversion in stock:
        patterns = all_patterns(conversion) if filters else ()
        if hits := dict.fromkeys(each for text in sorted(patterns) for each in filters.found_in(text)):
            dropped += [(conversion, each) for each in hits]
        else:
            kept.append(conversion)
    ours = [transform for transform, _ in added] if model is None else located(added, kept, model)
    fused = [copy_transform(transform) for transform in fusion_transforms]
    return SelectedConversions((*ours, *fused), tuple(kept), tuple(dropped))


def converts(patcher: Patcher) -> bool:
    """Whether a patcher adds or drops conversions, those of fusions apart."""
    return bool(
        patcher.extra_weight_conversions
        or patcher.filtered_weight_conversion_patterns
        or any(conversions_of(cls) for cls in (*patcher.class_mapping.values(), *patcher.module_mapping.values()))
    )


def brought(replaced: Iterable[tuple[str, type[nn.Module]]]) -> list[tuple[WeightTransform, frozenset[str]]]:
    """What replacement classes bring in their `conversion_mapping`, with the modules below which it is matched."""
    paths: dict[type[nn.Module], list[str]] = {}
    for path, cls in replaced:
        paths.setdefault(cls, []).append(path)
    return [(transform, frozenset(found)) for cls, found in paths.items() for transform in conversions_of(cls)]
