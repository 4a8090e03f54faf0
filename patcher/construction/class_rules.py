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
    """The value that a mapping of a patcher in force has for a class, by which key of which field."""

    key: Any
    value: type[nn.Module] | ForwardOf
    entry: InForce
    original: type[nn.Module]
    field: str = "class_mapping"

    @property
    def replacement(self) -> type[nn.Module]:
        """The class that is built."""
        return self.value.on(self.original) if isinstance(self.value, ForwardOf) else self.value

    @property
    def fusion(self) -> Any:
        """The fusion, if it isn't a key of a mapping."""
        return self.key if self.field == "fusions" else None


class ClassRules:
    """The class mappings in force. The innermost wins; within a patcher an exact name wins over an expression."""

    def __init__(self, entries: Iterable[InForce]) -> None:
        self.entries = tuple(entries)
        self.has_registry = any(entry.is_registry for entry in self.entries)
        # Key -> whether the registry has it, where names are expressions as well.
        self._keys = {key: entry.is_registry for entry in self.entries for key in entry.patcher.class_mapping}
        self.replacements = {cls for entry in self.entries for cls in entry.patcher.class_mapping.values()}
        # Caches. The second depends on the code of the classes as it is now.
        self._matches: dict[tuple[type[nn.Module], str], Match | None] = {}
        self._likes: dict[type[nn.Module], list[Like]] = {}

    def match(self, cls: type[nn.Module], name: str = "") -> Match | None:
        """Return what is built in place of `cls`.

        Args:
            name: a name to which modeling code has bound the class: the registry matches it too.

        Raises:
            PatchConflictError: if two expressions of a patcher match and have different replacements.
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
        # Expressions and likes mean modeling code, not the replacements.
        if cls in self.replacements:
            return cls.__name__ if cls.__name__ in mapping else None
        key = find_key(cls.__name__, mapping, names_too=entry.is_registry)
        return find_like(cls, mapping, self._likes_of(cls)) if key is None else key

    def _likes_of(self, cls: type[nn.Module]) -> list[Like]:
        if cls not in self._likes:
            self._likes[cls] = [key for key in self._keys if isinstance(key, Like) and key.matches(cls)]
        return self._likes[cls]

    def classes(self) -> list[type[nn.Module]]:
        """Return the live classes that some key matches, or that may be like a key's target."""
        keys, likes = self._keys, [key for key in self._keys if isinstance(key, Like)]
        expressions = [key for key in keys if not isinstance(key, Like) and (keys[key] or is_expression(key))]

        def has_key(cls: type[nn.Module]) -> bool:
            name = cls.__name__
            return name in keys or (bool(expressions) and any(search(key, name) for key in expressions))

        classes = subclasses(nn.Module, has_key)
        if likes:
            candidates = may_match(likes, set(subclasses(nn.Module)) - classes_of_torch())
            classes += [cls for cls in candidates if is_modeling_module(cls.__module__) or self._likes_of(cls)]
        return classes

    def concerns(self, cls: type[nn.Module], name: str = "") -> bool:
        """Whether a mapping replaces `cls`; a conflict is raised when it is built."""
        try:
            return self.match(cls, name) is not None
        except PatchConflictError:
            return True

    def keys_at(self, path: str, used: Container[tuple[InForce, str]] = ()) -> list[tuple[InForce, str]]:
        """Return the keys of module mappings that match a path, in the order of precedence.

        Args:
            used: the keys that have replaced a module around this one: these don't apply inside of it.
        """
        return [
            (entry, key)
            for entry in self.entries
            for key in sorted(entry.patcher.module_mapping, key=path.__ne__)  # the path itself first
            if (entry, key) not in used and matches_path(key, path)
        ]

    def match_path(self, path: str, cls: type[nn.Module], used: Container[tuple[InForce, str]] = ()) -> Match | None:
        """Return what is built in place of the module at a path, whose class is `cls`.

        Raises:
            PatchConflictError: if two patterns of a patcher match and have different replacements.
        """
        matches = self.keys_at(path, used)
        if not matches:
            return None
        entry, first = matches[0]
        mapping = entry.patcher.module_mapping
        if first != path:
            agreed([key for other, key in matches if other is entry], mapping, f"the module {path}", path, "path")
        return Match(first, mapping[first], entry, cls, "module_mapping")

    def matched(self, match: Match) -> set[Key]:
        """Return the keys that are used if `match` decides about a class, including those that it overrides."""
        # The key of the match itself may be found by a name to which the class was bound.
        cls, used = match.original, {(match.entry, "class_mapping", match.key)}
        for entry in self.entries[self.entries.index(match.entry) :]:
            if self._key(entry, cls) is not None:
                mapping = entry.patcher.class_mapping
                keys = [*hits(cls.__name__, mapping, names_too=entry.is_registry), *self._likes_of(cls)]
                used.update((entry, "class_mapping", key) for key in keys if key in mapping)
        return used
