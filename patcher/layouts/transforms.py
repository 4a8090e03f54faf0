"""Weight transforms as values, which transformers gives no equality of their own, and which of them a load has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, ConversionOps, WeightTransform

from patcher.compat.conversions import source_patterns, target_patterns, transform_settings
from patcher.expressions import search
from patcher.layouts.layouts import Layout

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher


def identity(transform: WeightTransform) -> tuple[Any, ...]:
    """What two transforms that do the same have in common."""
    return (type(transform), _frozen(transform_settings(transform)))


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


def describe(transform: WeightTransform | Layout) -> str:
    """One line: `q_proj, k_proj, v_proj -> qkv_proj [Concatenate(dim=0)]`."""
    if isinstance(transform, Layout):
        return str(transform)
    arrow = f"{', '.join(source_patterns(transform))} -> {', '.join(target_patterns(transform))}"
    operations = getattr(transform, "operations", None)
    return f"{arrow} [{', '.join(map(repr, operations))}]" if operations else f"{arrow} [rename]"


def is_concatenation(transform: Any) -> bool:
    """Whether the transform does nothing but concatenate, so that each tensor keeps its shape."""
    operations = getattr(transform, "operations", ())
    return bool(operations) and all(isinstance(operation, Concatenate) for operation in operations)


def has_known_operations(transform: WeightTransform) -> bool:
    """Whether all its operations are of transformers or this package: these depend on no values."""
    return all(
        type(operation).__module__.startswith(("transformers.", "patcher."))
        for operation in getattr(transform, "operations", ())
    )


# --- the conversions of a load ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Added:
    """A conversion that comes before those of transformers.

    Attributes:
        modules: the paths of the modules below which its names are matched, of one that a class brings; None for whole
            names.
        names_modules: whether it names the modules that it is for itself: that of a fusion.
    """

    transform: WeightTransform
    modules: frozenset[str] | None = None
    names_modules: bool = False


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
    paths: dict[type[nn.Module], list[str]] = {}
    for path, cls in replaced:
        paths.setdefault(cls, []).append(path)
    added = [Added(transform) for patcher in patchers for transform in patcher.extra_weight_conversions]
    added += [Added(transform, frozenset(found)) for cls, found in paths.items() for transform in conversions_of(cls)]
    added += [Added(transform, names_modules=True) for transform in fusion_transforms]
    filters = [text for patcher in patchers for text in patcher.filtered_weight_conversion_patterns]
    kept: list[WeightTransform] = []
    dropped: list[tuple[WeightTransform, str]] = []
    for conversion in stock:
        written = (*source_patterns(conversion), *target_patterns(conversion)) if filters else ()
        patterns = {*written, *conversion.source_patterns, *conversion.target_patterns} if filters else ()
        hits = dict.fromkeys(each for text in sorted(patterns) for each in filters if search(each, text))
        dropped += [(conversion, each) for each in hits]
        if not hits:
            kept.append(conversion)
    return SelectedConversions(tuple(added), tuple(kept), tuple(dropped))


def converts(patcher: Patcher) -> bool:
    """Whether a patcher adds or drops conversions, those of fusions apart."""
    return bool(
        patcher.extra_weight_conversions
        or patcher.filtered_weight_conversion_patterns
        or any(conversions_of(cls) for cls in (*patcher.class_mapping.values(), *patcher.module_mapping.values()))
    )


def conversions_of(cls: type) -> tuple[WeightTransform, ...]:
    """What a replacement class brings: its attribute `conversion_mapping`, as layout classes of transformers do."""
    given = getattr(cls, "conversion_mapping", ())
    return (given,) if isinstance(given, WeightTransform) else tuple(given)
