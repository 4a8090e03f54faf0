"""Which function is called in place of another: the function mappings in force."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from patcher.source.alike import without_kernel
from patcher.spec.like import Like, find_like, reference

#: `module:name` of a function, as reports show it.
full_name = reference
#: Function mappings in a form that can be hashed and pickled, the innermost first.
Layers = tuple[tuple[tuple[str, Callable[..., Any]], ...], ...]


@dataclass(frozen=True)
class Hit:
    """A function and its replacement.

    Attributes:
        keys: (index of the mapping, key) of all keys that match: the first one decides.
        callers: the names of the classes of a model that call the function, directly or through others.
    """

    keys: tuple[tuple[int, str], ...]
    original: Any
    replacement: Any
    callers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return full_name(self.original)


class FunctionRules:
    """Function mappings. The innermost wins; within a mapping `module:name`, then a bare name, then `like(...)`.

    >>> FunctionRules(((("apply_rotary_pos_emb", print),),)).hit("apply_rotary_pos_emb", max).replacement
    <built-in function print>
    """

    def __init__(self, layers: Layers) -> None:
        self.mappings = [dict(layer) for layer in layers]
        keys = [key for mapping in self.mappings for key in mapping]
        self.has_likes = any(isinstance(key, Like) for key in keys)
        #: `module:name` -> the function, None if the module isn't imported, so that no code can have it
        self.named = {key: _function_at(key) for key in keys if ":" in key and not isinstance(key, Like)}
        self.replacements = {id(function): function for mapping in self.mappings for function in mapping.values()}

    def hit(self, name: str, value: Any) -> Hit | None:
        """Return the replacement of a function that code finds by a name, None if it isn't replaced."""
        if isinstance(value, type) or not callable(value):
            return None
        exact = [key for key, function in self.named.items() if function is value]
        keys = [
            (index, key)
            for index, mapping in enumerate(self.mappings)
            for key in (
                *exact,
                *dict.fromkeys((name, getattr(value, "__name__", None))),
                find_like(value, mapping) if self.has_likes else None,
            )
            if key in mapping
        ]
        replacement = self.mappings[keys[0][0]][keys[0][1]] if keys else value
        return Hit(tuple(keys), value, replacement) if replacement is not value else None


def _function_at(key: str) -> Any:
    """Return what `module:name` is bound to, None if it isn't or the module isn't imported."""
    module, _, name = key.partition(":")
    return without_kernel(vars(sys.modules[module]).get(name)) if module in sys.modules else None
