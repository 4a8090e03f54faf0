"""Weight transforms: their equality, which transformers doesn't define, and the selection of those of a load."""

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
    """Return a key that is equal for transforms that do the same."""
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
    """Return one line: `q_proj, k_proj, v_proj -> qkv_proj [Concatenate(dim=0)]`."""
    if isinstance(transform, Layout):
        return str(transform)
    arrow = f"{', '.join(source_patterns(transform))} -> {', '.join(target_patterns(transform))}"
    operations = getattr(transform, "operations", None)
    return f"{arrow} [{', '.join(map(repr, operations))}]" if operations else f"{arrow} [rename]"


def is_concatenation(transform: Any) -> bool:
    """Whether a transform only concatenates, so that each tensor keeps its shape."""
    operations = getattr(transform, "operations", ())
    return bool(operations) and all(isinstance(operation, Concatenate) for operation in operations)


def has_known_operations(transform: WeightTransform) -> bool:
    """Whether all operations are those of transformers or this package, which don't depend on values."""
    return all(
        type(operation).__module__.startswith(("transformers.", "patcher."))
        for operation in getattr(transform, "operations", ())
    )


# --- the conversions of a load ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Added:
    """A conversion that precedes those of transformers."""

    transform: WeightTransform
    #: the paths of the modules in which names are matched, for the conversion of a class; None for full names
    modules: frozenset[str] | None = None
    #: whether its patterns name the modules that it is for: that of a fusion
    names_modules: bool = False


@dataclass(frozen=True, eq=False)
class SelectedConversions:
    """The conversions of a load."""

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
    """Filter the stock conversions, and list the added ones: of patchers, of replacement classes, of fusions."""
    patchers = list(patchers)
    paths: dict[type[nn.Module], list[str]] = {}
    for path, cls in replaced:
        paths.setdefault(cls, []).append(path)
    added = [Added(transform) for patcher in patchers for transform in patcher.extra_weight_conversions]
    added += [
        Added(transform, frozenset(modules)) for cls, modules in paths.items() for transform in conversions_of(cls)
    ]
    added += [Added(transform, names_modules=True) for transform in fusion_transforms]
    filters = [text for patcher in patchers for text in patcher.filtered_weight_conversion_patterns]
    kept: list[WeightTransform] = []
    dropped: list[tuple[WeightTransform, str]] = []
    for conversion in stock:
        written = (*source_patterns(conversion), *target_patterns(conversion)) if filters else ()
        patterns = {*written, *conversion.source_patterns, *conversion.target_patterns} if filters else ()
        matches = dict.fromkeys(item for text in sorted(patterns) for item in filters if search(item, text))
        dropped += [(conversion, item) for item in matches]
        if not matches:
            kept.append(conversion)
    return SelectedConversions(tuple(added), tuple(kept), tuple(dropped))


def converts(patcher: Patcher) -> bool:
    """Whether a patcher adds or drops conversions, apart from those of fusions."""
    return bool(
        patcher.extra_weight_conversions
        or patcher.filtered_weight_conversion_patterns
        or any(conversions_of(cls) for cls in (*patcher.class_mapping.values(), *patcher.module_mapping.values()))
    )


def conversions_of(cls: type) -> tuple[WeightTransform, ...]:
    """Return the `conversion_mapping` of a replacement class, as layout classes of transformers have it."""
    value = getattr(cls, "conversion_mapping", ())
    return (value,) if isinstance(value, WeightTransform) else tuple(value)
