"""Which function is called in place of another one: the function mappings in force."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from patcher.source.alike import without_kernel
from patcher.spec.like import Like, find_like

#: One function mapping after the other, the innermost first, as they are hashed and pickled.
Layers = tuple[tuple[tuple[str, Callable[..., Any]], ...], ...]


@dataclass(frozen=True)
class Hit:
    """What is called in place of a function.

    Attributes:
        keys: (number of the mapping, key) of all that name it: that which decides, then those that it overrides.
    """

    keys: tuple[tuple[int, str], ...]
    original: Any
    replacement: Any


class FunctionRules:
    """Function mappings. The innermost wins; within one `module:name`, before a bare name.

    >>> FunctionRules([{"apply_rotary_pos_emb": print}]).hit("apply_rotary_pos_emb", max).replacement
    <built-in function print>
    """

    def __init__(self, mappings: Iterable[Mapping[str, Callable[..., Any]]]) -> None:
        self.layers: Layers = tuple(tuple(mapping.items()) for mapping in mappings)
        #: key -> the function that it names, None where no such module is imported: no code has it from there
        self.named: Mapping[str, Any] = MappingProxyType(
            {key: named_object(key) for layer in self.layers for key, _ in layer if _is_named(key)}
        )
        self.has_likes = any(isinstance(key, Like) for layer in self.layers for key, _ in layer)
        self.replacements = {id(function): function for layer in self.layers for _, function in layer}

    def hit(self, name: str, value: Any) -> Hit | None:
        """What is called in place of a function that code knows by a name, None if it stays."""
        if isinstance(value, type) or not callable(value):
            return None
        found: list[tuple[int, str]] = []
        replacement: Any = None
        for number, layer in enumerate(self.layers):
            exact = [item for item in layer if item[0] in self.named and self.named[item[0]] is value]
            by_name = [item for item in layer if item[0] in (name, getattr(value, "__name__", None))]
            like = find_like(value, dict(layer)) if self.has_likes else None
            alike = [item for item in layer if item[0] == like]
            for key, function in (*exact, *by_name, *alike):
                replacement = function if not found else replacement
                found.append((number, key))
        return Hit(tuple(found), value, replacement) if found and replacement is not value else None


def _is_named(key: str) -> bool:
    return ":" in key and not isinstance(key, Like)


def named_object(key: str) -> Any:
    """What `module:name` names, None if there is no such thing, or its module isn't imported."""
    module, _, name = key.partition(":")
    return without_kernel(vars(sys.modules[module]).get(name)) if module in sys.modules else None
