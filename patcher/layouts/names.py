"""Where a load takes the names of a checkpoint: renamed by transformers and by patchers, taken by a converter of one.

A pattern means every name in which it is found. A replacement of four layers in thirty brings a conversion that is
meant for these four: so one of a patcher acts only where that leads to something that the model has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

from patcher.compat.conversions import copy_transform, key_renamer, was_used, with_model_prefix
from patcher.layouts.transforms import Added
from patcher.patterns import inside

#: Conversions of transformers that treat each key alone.
_WITHOUT_STATE = (WeightRenaming, WeightConverter)


@dataclass(frozen=True, eq=False)
class Named:
    """Where one key of a checkpoint goes.

    Attributes:
        name: the parameter; of several that a converter makes, the first.
        taker: the converter that takes it.
        pattern: its source pattern.
        by: the conversions of patchers that have had a part in it.
        stock: what the renamings of transformers alone make of the key.
    """

    name: str
    taker: WeightConverter | None = None
    pattern: str | None = None
    by: tuple[Added, ...] = ()
    stock: str = ""


class Names:
    """The names of the checkpoints of a model.

    Args:
        model: its base model may have a prefix, which a load adds or takes away.
        tensors: what the model has, by names; of what is fused the parts.
        mapping: the conversions of transformers: first `requested` of a `key_mapping`, which come before all others.
        added: those of patchers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tensors: Mapping[str, Any],
        mapping: Sequence[WeightTransform],
        added: Sequence[Added] = (),
        requested: int = 0,
    ) -> None:
        self._model, self._tensors = model, dict(tensors)
        self._prefix = inside(model.base_model_prefix)
        self._ours = [_Ours(each, self._prefix) for each in added]
        # A match is noted on a conversion, and some depend on what they have matched before.
        self._given = mapping
        self._mapping = [each if type(each) in _WITHOUT_STATE else copy_transform(each) for each in mapping]
        self._as_stock = key_renamer(self._mapping, model, self._tensors)
        # Which of those that are tried are used in the end isn't known, so copies are tried.
        self._tried = [copy_transform(each) for each in mapping] if added else []
        self._requested = requested

    def renamed(self, key: str) -> str:
        """A key as the converters of transformers meet it."""
        for each in self._mapping:
            if isinstance(each, WeightRenaming):
                key, _ = each.rename_source_key(key)
        return key

    def follow(self, key: str, without: AbstractSet[Added] = frozenset()) -> Named:
        """Where a key goes.

        Args:
            without: conversions of patchers to leave out.
        """
        ours = [each for each in self._ours if each.added not in without]
        if ours:
            found = next(self._ways(key, ours), None)
            if found is not None and found.by:
                return found
        name, taker, pattern = self._as_stock(key)
        return Named(name, taker, pattern, stock=name)  # type: ignore[arg-type]

    def stock_name(self, key: str, named: Named) -> str:
        """What the renamings of transformers alone make of a key that a converter takes."""
        if named.by or named.taker is None:
            return named.stock
        made, _ = copy_transform(named.taker).rename_source_key(self.renamed(key))
        return self._stock(key, made, named.name)

    @property
    def used(self) -> list[WeightTransform]:
        """The conversions of transformers that have had a part in the keys that were followed."""
        return [given for given, copy in zip(self._given, self._mapping, strict=True) if was_used(copy)]

    def _ways(self, key: str, ours: list[_Ours]) -> Iterator[Named]:
        """The ways that lead to something, what applies the most conversions of patchers first."""
        renamings = [each for each in ours if isinstance(each.transform, WeightRenaming)]
        steps: list[Any] = [
            *self._tried[: self._requested],
            *(each for each in renamings if each.added.modules is None),
            *(each for each in self._tried[self._requested :] if isinstance(each, WeightRenaming)),
            # What a class brings is about the names of its parameters: it comes after the renamings of transformers.
            *(each for each in renamings if each.added.modules is not None),
        ]
        for name, used in _renamed(key, steps):
            if (found := self._taken(key, name, used, ours)) is not None:
                yield found

    def _taken(self, key: str, name: str, used: tuple[Added, ...], ours: list[_Ours]) -> Named | None:
        """Where a renamed key leads, None if to nothing."""
        for each in ours:
            if isinstance(each.transform, WeightConverter):
                renamed, pattern = each.rename(name)
                target = self._known(renamed) if pattern is not None else None
                if target is not None:
                    by = (*used, each.added)
                    return Named(target, each.transform, pattern, by, self._stock(key, renamed, target))
        renamed, taker, pattern = self._by_converters(name)
        if renamed not in self._tensors:
            return None
        stock = self._stock(key, name, renamed) if used else renamed
        return Named(renamed, taker, pattern, used, stock)

    @cached_property
    def _by_converters(self) -> Any:
        converters = [each for each in self._tried if isinstance(each, WeightConverter)]
        return key_renamer(converters, self._model, self._tensors)

    def _known(self, name: str) -> str | None:
        """The name of a parameter with or without the prefix of the base model; None if there is none."""
        if "*" in name:
            return name
        found = with_model_prefix(name, self._model, self._tensors)
        return found if found in self._tensors else None

    def _stock(self, key: str, name: str, target: str) -> str:
        """What the renamings of transformers make of a key, with the prefix that a load gave its name."""
        stock = self.renamed(key)
        if target == self._prefix + name:
            return self._prefix + stock
        return stock.removeprefix(self._prefix) if name == self._prefix + target else stock


class _Ours:
    """A conversion of a patcher: a copy, for whoever matches a name notes it on the conversion."""

    def __init__(self, added: Added, prefix: str) -> None:
        self.added = added
        self.transform: Any = copy_transform(added.transform)
        self._scope, self._prefix = added.transform.scope_prefix, prefix

    def rename(self, name: str) -> tuple[str, str | None]:
        """The name after it, and the source pattern that has matched; None if none has."""
        if self.added.modules is not None:
            module = next((head for head in _heads(name) if self._is_meant(head)), None)
            if module is None:
                return name, None
            self.transform.scope_prefix = module if self._scope is None else f"{module}.{self._scope}"
            self.transform.base_model_prefix = ""
        found: tuple[str, str | None] = self.transform.rename_source_key(name)
        return found

    def _is_meant(self, path: str) -> bool:
        modules = self.added.modules or frozenset()
        return not modules.isdisjoint((path, self._prefix + path, path.removeprefix(self._prefix)))


def _renamed(name: str, steps: Sequence[Any]) -> Iterator[tuple[str, tuple[Added, ...]]]:
    """A name after renamings, in their order, and which of patchers: first after all of these, last after none."""
    if not steps:
        yield name, ()
        return
    first, rest = steps[0], steps[1:]
    if not isinstance(first, _Ours):
        yield from _renamed(first.rename_source_key(name)[0], rest)
        return
    renamed, pattern = first.rename(name)
    if pattern is not None and renamed != name:
        for found, used in _renamed(renamed, rest):
            yield found, (first.added, *used)
    yield from _renamed(name, rest)


def _heads(name: str) -> Iterator[str]:
    """The paths of the modules around a name, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
