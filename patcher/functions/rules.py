"""Which function is called in place of another one: the function mappings in force."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from patcher.source.alike import without_kernel
from patcher.spec.like import Like, find_like, reference

#: What reports call a function.
full_name = reference
#: One function mapping after the other, the innermost first, as they are hashed and pickled.
Layers = tuple[tuple[tuple[str, Callable[..., Any]], ...], ...]


@dataclass(frozen=True)
class Hit:
    """What is called in place of a function.

    Attributes:
        keys: (number of the mapping, key) of all that name it: that which decides, then those that it overrides.
        callers: the names of the classes of a model that call it, directly or through other functions.
    """

    keys: tuple[tuple[int, str], ...]
    original: Any
    replacement: Any
    callers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return full_name(self.original)


class FunctionRules:
    """Function mappings. The innermost wins; within one `module:name`, before a bare name, before what it is like.

    >>> FunctionRules(((("apply_rotary_pos_emb", print),),)).hit("apply_rotary_pos_emb", max).replacement
    <built-in function print>
    """

    def __init__(self, layers: Layers) -> None:
        self.mappings = [dict(layer) for layer in layers]
        keys = [key for mapping in self.mappings for key in mapping]
        self.has_likes = any(isinstance(key, Like) for key in keys)
        #: `module:name` -> the function, None where no such module is imported: no code has it from there
        self.named = {key: _named(key) for key in keys if ":" in key and not isinstance(key, Like)}
        self.replacements = {id(function): function for each in self.mappings for function in each.values()}

    def hit(self, name: str, value: Any) -> Hit | None:
        """What is called in place of a function that code knows by a name, None if it stays."""
        if isinstance(value, type) or not callable(value):
            return None
        exact = [key for key, function in self.named.items() if function is value]
        found = [
            (number, key)
            for number, mapping in enumerate(self.mappings)
            for key in (
                *exact,
                *dict.fromkeys((name, getattr(value, "__name__", None))),
                find_like(value, mapping) if self.has_likes else None,
            )
            if key in mapping
        ]
        replacement = self.mappings[found[0][0]][found[0][1]] if found else value
        return Hit(tuple(found), value, replacement) if replacement is not value else None


def _named(key: str) -> Any:
    """What `module:name` names, None if there is no such thing, or its module isn't imported."""
    module, _, name = key.partition(":")
    return without_kernel(vars(sys.modules[module]).get(name)) if module in sys.modules else None
