"""Which class is built in place of another: the mappings in force, by class and by path."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from patcher.compat.modeling_code import classes_of_torch, is_modeling_module, module_subclasses
from patcher.construction.in_force import InForce, Key
from patcher.errors import PatchConflictError
from patcher.expressions import search
from patcher.patterns import find_key, hits, is_expression, matches_path
from patcher.spec.forward_of import ForwardOf
from patcher.spec.like import Like, find_like, may_match


@dataclass(frozen=True)
class Match:
    """What is built in place of a class, and which key of which field of which patcher says so.

    Attributes:
        value: of the mapping: a class, or what makes one of the class that is replaced.
        original: that class.
    """

    key: Any
    value: type[nn.Module] | ForwardOf
    entry: InForce
    original: type[nn.Module]
    field: str = "class_mapping"

    @property
    def replacement(self) -> type[nn.Module]:
        """The class that is built."""
        return self.value.on(self.original) if isinstance(self.value, ForwardOf) else self.value


class ClassRules:
    """The class mappings in force. The innermost wins; within one patcher an exact name, before an expression."""

    def __init__(self, entries: Iterable[InForce]) -> None:
        self.entries = tuple(entries)
        self._matches: dict[type[nn.Module], Match | None] = {}  # only remembers what follows from `entries`
        self._alike: dict[type[nn.Module], list[Like]] = {}  # the same, with what runs as these rules are made
        keys = [(key, entry.is_registry) for entry in self.entries for key in entry.patcher.class_mapping]
        self._exact = frozenset(key for key, _ in keys)
        self._likes = list(dict.fromkeys(key for key, _ in keys if isinstance(key, Like)))
        texts = [(key, loose) for key, loose in dict.fromkeys(keys) if not isinstance(key, Like)]
        self._expressions = [key for key, loose in texts if loose or is_expression(key)]
        self._replacements = {cls for entry in self.entries for cls in entry.patcher.class_mapping.values()}

    def match(self, cls: type[nn.Module]) -> Match | None:
        """What is built in place of `cls`.

        Raises:
            PatchConflictError: two expressions of a patcher ask for different replacements.
        """
        if cls not in self._matches:
            matches = (self._match_in(entry, cls) for entry in self.entries)
            self._matches[cls] = next((match for match in matches if match is not None), None)
        return self._matches[cls]

    def _match_in(self, entry: InForce, cls: type[nn.Module]) -> Match | None:
        key = self._key(entry, cls)
        return None if key is None else Match(key, entry.patcher.class_mapping[key], entry, cls)

    def _key(self, entry: InForce, cls: type[nn.Module]) -> str | None:
        mapping = entry.patcher.class_mapping
        key = find_key(cls.__name__, mapping, names_too=entry.is_registry)
        # What isn't a name is about modeling code, not about the replacements beside it.
        if key == cls.__name__ or cls in self._replacements:
            return key if key == cls.__name__ else None
        return find_like(cls, mapping, self._likes_of(cls)) if key is None and self._likes else key

    def _likes_of(self, cls: type[nn.Module]) -> list[Like]:
        if cls not in self._alike:
            self._alike[cls] = [key for key in self._likes if key.matches(cls)]
        return self._alike[cls]

    def match_bound(self, cls: type[nn.Module], name: str) -> Match | None:
        """What is built where modeling code has bound `cls` to `name`: to the registry the name counts as well."""
        for entry in self.entries:
            if entry.is_registry:
                mapping = entry.patcher.class_mapping
                key = find_key(name, mapping, names_too=True)
                if key is not None and mapping[key] is not cls:
                    return Match(key, mapping[key], entry, cls)
            match = self._match_in(entry, cls)
            if match is not None:
                return match
        return None

    def classes(self) -> list[type[nn.Module]]:
        """All classes whose name is a key of some mapping, or has a key found in it, or that a key may be like."""
        return module_subclasses(self._named)

    def _named(self, known: Collection[type[nn.Module]]) -> list[type[nn.Module]]:
        named = [cls for cls in known if cls.__name__ in self._exact]
        if self._expressions:
            named += [cls for cls in known if any(search(key, cls.__name__) for key in self._expressions)]
        if self._likes:
            alike = may_match(self._likes, set(known) - classes_of_torch())
            named += [cls for cls in alike if is_modeling_module(cls.__module__) or self._likes_of(cls)]
        return named

    def may_concern(self, cls: type[nn.Module]) -> bool:
        """Whether a mapping may name `cls`. What a key of `like` matches is settled where it is built."""
        return bool(self._likes and may_match(self._likes, [cls])) or self.concerns(cls)

    def concerns(self, cls: type[nn.Module], name: str = "") -> bool:
        """Whether a mapping names `cls`. Two expressions that disagree about it are an error when it is built."""
        try:
            return self.match_bound(cls, name or cls.__name__) is not None
        except PatchConflictError:
            return True

    def match_path(self, path: str, cls: type[nn.Module], used: Container[tuple[InForce, str]] = ()) -> Match | None:
        """What is built in place of the module at a path: the innermost wins, and within a patcher the exact path.

        Args:
            cls: the class of the module there, as transformers has it.
            used: keys that have replaced what is around this module: they mean nothing inside of that.

        Raises:
            PatchConflictError: two patterns of a patcher ask for different replacements.
        """
        for entry in self.entries:
            mapping = entry.patcher.module_mapping
            keys = [key for key in mapping if (entry, key) not in used and matches_path(key, path)]
            keys = [path] if path in keys else keys
            for key in keys[1:]:
                if mapping[key] is not mapping[keys[0]]:
                    raise PatchConflictError(
                        f"module_mapping: {keys[0]!r} and {key!r} both name {path}, and they ask for different "
                        f"replacements, {mapping[keys[0]].__qualname__} and {mapping[key].__qualname__}. Narrow one "
                        f"of them, or add the exact path, which wins: {path!r}: ..."
                    )
            if keys:
                return Match(keys[0], mapping[keys[0]], entry, cls, "module_mapping")
        return None

    def matched_paths(self, path: str, used: Container[tuple[InForce, str]] = ()) -> set[Key]:
        """The keys that have done their part when the module at a path is replaced, those included that others win
        over."""
        return {
            (entry, "module_mapping", key)
            for entry in self.entries
            for key in entry.patcher.module_mapping
            if (entry, key) not in used and matches_path(key, path)
        }

    def matched(self, cls: type[nn.Module], match: Match) -> set[Key]:
        """The keys that have done their part when `match` decides about `cls`, those included that it overrides."""
        found: set[Key] = set()
        for entry in self.entries[self.entries.index(match.entry) :]:
            if match.field == "class_mapping" and entry is match.entry:  # by a name that the class was bound to
                found.add((entry, "class_mapping", match.key))
            if self._key(entry, cls) is not None:
                mapping = entry.patcher.class_mapping
                named = [*hits(cls.__name__, mapping, names_too=entry.is_registry), *self._likes_of(cls)]
                found.update((entry, "class_mapping", key) for key in named if key in mapping)
        return found
