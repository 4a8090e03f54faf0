"""Which class is built in place of another: the mappings in force, by class and by path."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from patcher.compat.modeling_code import classes_of_torch, is_modeling_module, subclasses
from patcher.construction.in_force import InForce, Key
from patcher.errors import PatchConflictError
from patcher.expressions import search
from patcher.patterns import agreed, find_key, hits, is_expression, matches_path
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
        self.has_registry = any(entry.is_registry for entry in self.entries)
        # Both only remember what follows from `entries`, the second with what runs as these rules are made.
        self._matches: dict[tuple[type[nn.Module], str], Match | None] = {}
        self._alike: dict[type[nn.Module], list[Like]] = {}
        self._replacements = {cls for entry in self.entries for cls in entry.patcher.class_mapping.values()}

    def match(self, cls: type[nn.Module], name: str = "") -> Match | None:
        """What is built in place of `cls`.

        Args:
            name: the name to which modeling code has bound it: to the registry that counts as well as its own.

        Raises:
            PatchConflictError: two expressions of a patcher ask for different replacements.
        """
        name = "" if name == cls.__name__ else name
        if (cls, name) not in self._matches:
            matches = (self._match_in(entry, cls, name) for entry in self.entries)
            self._matches[cls, name] = next((match for match in matches if match is not None), None)
        return self._matches[cls, name]

    def _match_in(self, entry: InForce, cls: type[nn.Module], name: str) -> Match | None:
        mapping = entry.patcher.class_mapping
        key = find_key(name, mapping, names_too=True) if name and entry.is_registry else None
        if key is None or mapping[key] is cls:
            key = self._key(entry, cls)
        return None if key is None else Match(key, mapping[key], entry, cls)

    def _key(self, entry: InForce, cls: type[nn.Module]) -> str | None:
        mapping = entry.patcher.class_mapping
        # What isn't a name is about modeling code, not about the replacements beside it.
        if cls in self._replacements:
            return cls.__name__ if cls.__name__ in mapping else None
        key = find_key(cls.__name__, mapping, names_too=entry.is_registry)
        return find_like(cls, mapping, self._likes_of(cls)) if key is None else key

    def _likes_of(self, cls: type[nn.Module]) -> list[Like]:
        if cls not in self._alike:
            self._alike[cls] = [key for key in self._keys() if isinstance(key, Like) and key.matches(cls)]
        return self._alike[cls]

    def _keys(self) -> dict[str, bool]:
        """All class keys, with whether the registry has them: there a name is an expression as well."""
        return {key: entry.is_registry for entry in self.entries for key in entry.patcher.class_mapping}

    def classes(self) -> list[type[nn.Module]]:
        """All classes whose name is a key of some mapping, or has a key found in it, or that a key may be like."""
        keys = self._keys()
        likes = [key for key in keys if isinstance(key, Like)]
        expressions = [key for key in keys if not isinstance(key, Like) and (keys[key] or is_expression(key))]

        def is_named(cls: type[nn.Module]) -> bool:
            name = cls.__name__
            return name in keys or (bool(expressions) and any(search(key, name) for key in expressions))

        found = subclasses(nn.Module, is_named)
        if likes:
            alike = may_match(likes, set(subclasses(nn.Module)) - classes_of_torch())
            found += [cls for cls in alike if is_modeling_module(cls.__module__) or self._likes_of(cls)]
        return found

    def concerns(self, cls: type[nn.Module], name: str = "") -> bool:
        """Whether a mapping names `cls`. Two expressions that disagree about it are an error when it is built."""
        try:
            return self.match(cls, name) is not None
        except PatchConflictError:
            return True

    def keys_at(self, path: str, used: Container[tuple[InForce, str]] = ()) -> list[tuple[InForce, str]]:
        """The keys of module mappings that name a path: those of the innermost patcher first, the exact path first.

        Args:
            used: keys that have replaced what is around this module: they mean nothing inside of that.
        """
        return [
            (entry, key)
            for entry in self.entries
            for key in sorted(entry.patcher.module_mapping, key=path.__ne__)
            if (entry, key) not in used and matches_path(key, path)
        ]

    def match_path(self, path: str, cls: type[nn.Module], used: Container[tuple[InForce, str]] = ()) -> Match | None:
        """What is built in place of the module at a path, of a class of transformers or torch.

        Raises:
            PatchConflictError: two patterns of a patcher ask for different replacements.
        """
        found = self.keys_at(path, used)
        if not found:
            return None
        entry, first = found[0]
        mapping = entry.patcher.module_mapping
        if first != path:
            keys = [key for other, key in found if other is entry]
            agreed(keys, mapping, f"the module {path}", path, "path")
        return Match(first, mapping[first], entry, cls, "module_mapping")

    def matched(self, match: Match) -> set[Key]:
        """The keys that have done their part when `match` decides about a class, those that it overrides included."""
        cls, found = match.original, set[Key]()
        for entry in self.entries[self.entries.index(match.entry) :]:
            if entry is match.entry:  # perhaps by a name that the class was bound to
                found.add((entry, "class_mapping", match.key))
            if self._key(entry, cls) is not None:
                mapping = entry.patcher.class_mapping
                named = [*hits(cls.__name__, mapping, names_too=entry.is_registry), *self._likes_of(cls)]
                found.update((entry, "class_mapping", key) for key in named if key in mapping)
        return found
