"""Conversions that run only where the model has what they make, or below some modules of it.

A pattern means every name in which it is found. A replacement of four layers in thirty brings a conversion that is
meant for these four: the others have no parameter that it would make, and there the next conversion is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import copy_transform, key_renamer
from patcher.compat.models import state_tensors
from patcher.layouts.fused_weights import fused_modules
from patcher.patterns import inside


@dataclass(frozen=True, eq=False)
class Place:
    """Where in a model a conversion may act.

    Attributes:
        transform: the conversion as it was written.
        names: the tensors that the model has; those of parts that it has joined as well.
        prefix: what names of the base model begin with, where that is a part of the model.
        modules: the paths of the modules below which names are matched; None for whole names.
        misleads: of a renaming, whether the name before it, and not the one after it, leads to a tensor of the model.
    """

    transform: WeightTransform
    names: frozenset[str]
    prefix: str = ""
    modules: frozenset[str] | None = None
    misleads: Callable[[str, str], bool] = lambda before, after: False

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self  # transformers copies a converter for each layer

    def takes(self, before: str, after: str) -> bool:
        """Whether the conversion is to make `after` of `before`."""
        if isinstance(self.transform, WeightConverter):
            return "*" in after or self.has(after)
        return not self.misleads(before, after)

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return not self.names.isdisjoint(self._variants(name))

    def module_of(self, name: str) -> str | None:
        """The innermost module that a name is below, as the name has its path; None if it is below none of them."""
        modules = self.modules or frozenset()
        return next((head for head in _heads(name) if not modules.isdisjoint(self._variants(head))), None)

    def _variants(self, name: str) -> tuple[str, ...]:
        """A name as it stands, and with and without the prefix, which a load adds or takes away."""
        return name, self.prefix + name, name.removeprefix(self.prefix)


def _heads(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


class _Located:
    """The part of a conversion with a place that renaming and converting have in common."""

    __slots__ = ()
    place: Place
    source_patterns: list[str]
    if TYPE_CHECKING:
        scope_prefix: str | None
        base_model_prefix: str | None

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        place: Place | None = getattr(self, "place", None)
        if place is None:  # others make conversions of this class, with patterns of their own
            return super().rename_source_key(source_key)  # type: ignore[misc, no-any-return]
        if place.modules is not None:
            module, scope = place.module_of(source_key), place.transform.scope_prefix
            if module is None:
                return source_key, None
            self.scope_prefix = module if scope is None else f"{module}.{scope}"  # type: ignore[misc]
            self.base_model_prefix = ""  # type: ignore[misc]
        renamed, pattern = super().rename_source_key(source_key)  # type: ignore[misc]
        is_meant = pattern is None or place.takes(source_key, renamed)
        return (renamed, pattern) if is_meant else (source_key, None)

    def copy(self, source_patterns: list[str], target_patterns: list[str], **kwargs: Any) -> WeightTransform:
        # A quantizer makes others of what it is given; those are its own.
        return self.place.transform.copy(source_patterns, target_patterns, **kwargs)


class _LocatedConverter(_Located):
    __slots__ = ()
    collected_tensors: dict[str, list[Any]]

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "place", None) is None:
            return super().convert(*args, **kwargs)  # type: ignore[misc]
        # What operations get has the patterns as they were written.
        for marked, pattern in zip(self.source_patterns, self.place.transform.source_patterns, strict=True):
            if marked != pattern and marked in self.collected_tensors:
                self.collected_tensors[pattern] = self.collected_tensors.pop(marked)
        object.__setattr__(self, "source_patterns", list(self.place.transform.source_patterns))
        return super().convert(*args, **kwargs)  # type: ignore[misc]


@cache
def _located_class(cls: type[WeightTransform]) -> type[WeightTransform]:
    own = _LocatedConverter if issubclass(cls, WeightConverter) else _Located
    return type(f"Located{cls.__name__}", (own, cls), {"__slots__": ("place",), "__module__": __name__})


def as_written(transform: WeightTransform) -> WeightTransform:
    """The conversion that was located, or the very one."""
    place: Place | None = getattr(transform, "place", None)
    return transform if place is None else place.transform


def is_about_a_module(transform: WeightTransform) -> bool:
    """Whether the conversion is matched against names below modules, as these names are in the model."""
    place: Place | None = getattr(transform, "place", None)
    return place is not None and place.modules is not None


def pattern_as_written(transform: WeightTransform, pattern: str) -> str:
    """A source pattern of a conversion without the mark that tells it from those of others."""
    if pattern not in transform.source_patterns:
        return pattern
    return as_written(transform).source_patterns[transform.source_patterns.index(pattern)]


def located(
    added: Iterable[tuple[WeightTransform, frozenset[str] | None]],
    kept: Iterable[WeightTransform],
    model: Any,
) -> list[WeightTransform]:
    """Copies of conversions that run where the model has what they make.

    Args:
        added: each with the modules below which it is matched, if it is bound to some.
        kept: the conversions that are asked after these.
    """
    added, kept = list(added), list(kept)
    if not added:
        return []
    tensors = state_tensors(model)
    joined = (
        f"{inside(path)}{name}"
        for path, _, carried in fused_modules(model)
        for layout in carried.layouts
        for name in layout.stock
    )
    names = frozenset((*tensors, *joined))
    prefix = inside(model.base_model_prefix)
    places = [Place(transform, names, prefix, modules) for transform, modules in added]
    times = Counter(text for each in (*(place.transform for place in places), *kept) for text in _converted(each))
    chains = _Chains(places, kept, model, tensors)
    result = []
    for number, place in enumerate(places):
        # A load finds the converter by the text of the pattern that matched, so no two may have the same.
        is_ambiguous = any(times[text] > 1 for text in _converted(place.transform))
        place = (
            place
            if isinstance(place.transform, WeightConverter)
            else replace(place, misleads=partial(chains.mislead, number))
        )
        result.append(_located(place, f"(?#{number})" if is_ambiguous else ""))
    return result


def _converted(transform: WeightTransform) -> list[str]:
    return transform.source_patterns if isinstance(transform, WeightConverter) else []


def _located(place: Place, mark: str = "") -> WeightTransform:
    cls = type(place.transform)
    copy: Any = copy_transform(place.transform, _located_class(cls))  # type: ignore[arg-type]
    copy.place = place
    object.__setattr__(copy, "source_patterns", [mark + text for text in copy.source_patterns])
    return copy  # type: ignore[no-any-return]


class _Chains:
    """What conversions make of a name after a renaming, and without it: its result may be renamed, or converted."""

    def __init__(self, places: list[Place], kept: list[WeightTransform], model: Any, tensors: dict[str, Any]) -> None:
        self._places, self._kept, self._model, self._tensors = places, kept, model, tensors

    def mislead(self, number: int, before: str, after: str) -> bool:
        """Whether a name leads to a tensor of the model, and the one that a renaming makes of it doesn't."""
        place = self._places[number]
        if place.has(after):
            return False
        stock = self._converters if place.modules is not None else self._stock  # whose renamings have run by then
        with_it, without_it = (
            key_renamer(chain, self._model, self._tensors) for chain in ([*self._ours[number + 1 :], *stock], stock)
        )
        return not place.has(with_it(after)[0]) and place.has(without_it(before)[0])

    # Copies, for whoever renames a key marks the conversions that it used.
    @cached_property
    def _ours(self) -> list[WeightTransform]:
        return [_located(place) for place in self._places]

    @cached_property
    def _stock(self) -> list[WeightTransform]:
        return [copy_transform(each) for each in self._kept]

    @cached_property
    def _converters(self) -> list[WeightTransform]:
        return [each for each in self._stock if isinstance(each, WeightConverter)]
