"""Weight transforms: their equality, the selection of those of a load, and the keys that they rename and take.

A pattern matches every name in which it is found, while a replacement of four layers in thirty brings a conversion
meant for those four. So a conversion of a patcher runs only where that leads to a name that the model has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from patcher.compat.conversions import (
    copy_transform,
    key_renamer,
    source_patterns,
    target_patterns,
    transform_settings,
    was_used,
    with_model_prefix,
)
from patcher.expressions import search
from patcher.layouts.layouts import Layout
from patcher.patterns import inside, parents

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher


def identity(transform: WeightTransform, *, written: bool = True) -> tuple[Any, ...]:
    """Return a key that is equal for transforms that do the same."""
    return (type(transform), _frozen(transform_settings(transform, written=written)))


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
    """Whether a transform and its operations are of transformers or this package, which don't depend on values."""
    code = (transform, *getattr(transform, "operations", ()))
    return all(type(each).__module__.startswith(("transformers.", "patcher.")) for each in code)


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
    added += [Added(item, frozenset(modules)) for cls, modules in paths.items() for item in conversions_of(cls)]
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


# --- where the keys of a checkpoint go -------------------------------------------------------------------------------


#: Conversions of transformers that treat each key alone.
_STATELESS = (WeightRenaming, WeightConverter)


@dataclass(frozen=True, eq=False)
class ResolvedKey:
    """Where one key of a checkpoint goes, and the converter and its source pattern that take it."""

    #: the parameter; of several that the converter makes, the first
    name: str
    converter: WeightConverter | None = None
    pattern: str | None = None
    #: the conversions of patchers that take part
    added: tuple[Added, ...] = ()
    #: what the renamings of transformers alone make of the key
    stock: str = ""


class KeyResolver:
    """Resolves the keys of a model's checkpoints.

    Args:
        tensors: what the model has, by name; for a fused parameter, its parts.
        mapping: the conversions of transformers.
        num_key_mapping: how many of these, the first ones, are those of a `key_mapping`, which run before all others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tensors: Mapping[str, Any],
        mapping: Sequence[WeightTransform],
        added: Sequence[Added] = (),
        num_key_mapping: int = 0,
    ) -> None:
        self._model, self._tensors = model, dict(tensors)
        self._prefix = inside(model.base_model_prefix)
        has_prefix = any(name.startswith(self._prefix) for name in self._tensors)
        self._added = [_AddedCopy(conversion, self._prefix, has_prefix) for conversion in added]
        # A match is noted on a conversion, and some conversions depend on what they have matched before.
        self._originals = mapping
        self._mapping = [item if type(item) in _STATELESS else copy_transform(item) for item in mapping]
        self._rename_as_stock = key_renamer(self._mapping, model, self._tensors)
        # Conversions are tried on copies, because not all that match are used in the end.
        self._tried = [copy_transform(item) for item in mapping] if added else []
        self._num_key_mapping = num_key_mapping

    def rename(self, key: str) -> str:
        """Return a key as the converters of transformers meet it."""
        for item in self._mapping:
            if isinstance(item, WeightRenaming):
                key, _ = item.rename_source_key(key)
        return key

    def resolve(self, key: str, without: AbstractSet[Added] = frozenset()) -> ResolvedKey:
        """Return where a key goes, without some conversions of patchers."""
        added = [conversion for conversion in self._added if conversion.added not in without]
        if added:
            resolved = next(self._resolutions(key, added), None)
            if resolved is not None and resolved.added:
                return resolved
        name, converter, pattern = self._rename_as_stock(key)
        return ResolvedKey(name, converter, pattern, stock=name)  # type: ignore[arg-type]

    def stock_name(self, key: str, resolved: ResolvedKey) -> str:
        """Return what the renamings of transformers alone make of a key that a converter takes."""
        if resolved.added or resolved.converter is None:
            return resolved.stock
        name, _ = copy_transform(resolved.converter).rename_source_key(self.rename(key))
        return self._stock(key, name, resolved.name)

    @property
    def used(self) -> list[WeightTransform]:
        """The conversions of transformers that took part in the keys that were resolved."""
        return [item for item, copy in zip(self._originals, self._mapping, strict=True) if was_used(copy)]

    def _resolutions(self, key: str, added: list[_AddedCopy]) -> Iterator[ResolvedKey]:
        """Yield the resolutions that lead to a name of the model, those with the most added conversions first."""
        renamings = [conversion for conversion in added if isinstance(conversion.transform, WeightRenaming)]
        steps: list[Any] = [
            *self._tried[: self._num_key_mapping],
            *(conversion for conversion in renamings if conversion.added.modules is None),
            *(item for item in self._tried[self._num_key_mapping :] if isinstance(item, WeightRenaming)),
            # Conversions of a class name its parameters, so they come after the renamings of transformers.
            *(conversion for conversion in renamings if conversion.added.modules is not None),
        ]
        for name, used in _renamings(key, steps):
            if (resolved := self._convert(key, name, used, added)) is not None:
                yield resolved

    def _convert(self, key: str, name: str, used: tuple[Added, ...], added: list[_AddedCopy]) -> ResolvedKey | None:
        """Return where a renamed key goes, None if the model has no such name."""
        for conversion in added:
            if isinstance(conversion.transform, WeightConverter):
                renamed, pattern = conversion.rename(name)
                target = self._known(renamed) if pattern is not None else None
                if target is not None:
                    stock = self._stock(key, renamed, target)
                    return ResolvedKey(target, conversion.transform, pattern, (*used, conversion.added), stock)
        renamed, converter, pattern = self._rename_by_converters(name)
        if renamed not in self._tensors:
            return None
        return ResolvedKey(renamed, converter, pattern, used, self._stock(key, name, renamed) if used else renamed)

    @cached_property
    def _rename_by_converters(self) -> Any:
        converters = [item for item in self._tried if isinstance(item, WeightConverter)]
        return key_renamer(converters, self._model, self._tensors)

    def _known(self, name: str) -> str | None:
        """Return the name that the model has, with or without the prefix of the base model; None if it has none.

        A name with `*` stands for several: the first of them is looked for.
        """
        first = name.replace("*", "0")
        known = with_model_prefix(first, self._model, self._tensors)
        if "*" not in name:
            return known if known in self._tensors else None
        if known == self._prefix + first:
            return self._prefix + name
        return name.removeprefix(self._prefix) if first == self._prefix + known else name

    def _stock(self, key: str, name: str, target: str) -> str:
        """Return what the renamings of transformers make of a key, with the prefix that a load gave its name."""
        stock = self.rename(key)
        if target == self._prefix + name:
            return self._prefix + stock
        return stock.removeprefix(self._prefix) if name == self._prefix + target else stock


class _AddedCopy:
    """A conversion of a patcher with a copy of its transform, since a match is noted on the transform."""

    def __init__(self, added: Added, prefix: str, has_prefix: bool) -> None:
        self.added = added
        self.transform: Any = copy_transform(added.transform)
        self._scope, self._modules = added.transform.scope_prefix, set(map(inside, added.modules or ()))
        # A checkpoint may lack the prefix of the base model, or have it where the names of the model have none.
        self._otherwise = prefix.__add__ if has_prefix else methodcaller("removeprefix", prefix)

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return the new name, and the source pattern that matches, None if none does."""
        if self.added.modules is not None:
            module = next(filter(self._applies_to, reversed(parents(name))), None)
            if module is None:
                return name, None
            self.transform.scope_prefix = ".".join(filter(None, (module, self._scope))) or None
            self.transform.base_model_prefix = ""
        renamed: tuple[str, str | None] = self.transform.rename_source_key(name)
        return renamed

    def _applies_to(self, path: str) -> bool:
        return not self._modules.isdisjoint((inside(path), self._otherwise(inside(path))))


def _renamings(name: str, steps: Sequence[Any]) -> Iterator[tuple[str, tuple[Added, ...]]]:
    """Yield a name after renamings, and which of them are patchers': first after all of these, last after none."""
    if not steps:
        yield name, ()
        return
    first, rest = steps[0], steps[1:]
    if not isinstance(first, _AddedCopy):
        yield from _renamings(first.rename_source_key(name)[0], rest)
        return
    renamed, pattern = first.rename(name)
    if pattern is not None and renamed != name:
        for result, used in _renamings(renamed, rest):
            yield result, (first.added, *used)
    yield from _renamings(name, rest)
