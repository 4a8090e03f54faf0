"""Which patchers are in force: a tuple of values, the innermost first, in a context variable.

Nothing here is written to but by entering and leaving a block, and by the registry, which is replaced as a whole. What
was matched while a block lasts is collected beside it, in a `Block`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher

T = TypeVar("T")

REGISTRY = "monkey_patching"
#: How fusions come into force that a config names, and that made the layout in which weights lie on the disk.
FUSION_CONFIG = "fusion_config"
LAYOUT = "the layout on disk"


@dataclass(frozen=True)
class InForce:
    """A patcher and what put it in force: `patcher=`, `applied()`, a config's fusions, the process-wide registry."""

    patcher: Patcher
    origin: str

    @property
    def is_registry(self) -> bool:
        return self.origin == REGISTRY


@dataclass(frozen=True)
class Matched:
    """What patchers in force have matched in a model and its checkpoint, and what there was to match.

    Attributes:
        keys: (patcher in force, field, what of that field) of all that had an effect.
        classes: the names of the classes in the models, as they were before anything was replaced.
        refused: (fusion, path, reason) of what fusions left alone.
        paths: those of the modules in the models, where a patcher says any.
        shared: (patcher in force, key, path, another path) of what a key of a module mapping names under one of its
            paths only.
        places: (path, class) of the modules, where the key of a class may be meant as a path.
        functions: the names of the functions that the modeling code calls, where a patcher replaces any.
        registries: (function, table) of what it looks for in tables that all models share.
        hidden: (function, another one) of what is called by another one that is replaced.
        parameters: the names of what the models hold, where a patcher says any.
        patterns: the patterns of stock conversions.
        checkpoint_keys: the keys of the checkpoints.
        renamed: (conversion, name that it gives) of added ones that had no effect.
        has_read: whether a checkpoint was read: filters and conversions are judged only then.
    """

    keys: frozenset[tuple[InForce, str, Hashable]] = frozenset()
    classes: frozenset[str] = frozenset()
    refused: frozenset[tuple[Hashable, str, str]] = frozenset()
    paths: frozenset[str] = frozenset()
    shared: frozenset[tuple[InForce, str, str, str]] = frozenset()
    places: frozenset[tuple[str, str]] = frozenset()
    functions: frozenset[str] = frozenset()
    registries: frozenset[tuple[str, str]] = frozenset()
    hidden: frozenset[tuple[str, str]] = frozenset()
    parameters: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    checkpoint_keys: frozenset[str] = frozenset()
    renamed: frozenset[tuple[Hashable, str]] = frozenset()
    has_read: bool = False

    def __or__(self, other: Matched) -> Matched:
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return Matched(*(mine | theirs for mine, theirs in both))  # sets, and a flag

    def of(self, entry: InForce, field: str) -> set[Hashable]:
        """What of a field of one patcher has had an effect."""
        return {key for owner, kind, key in self.keys if kind == field and owner == entry}


class Block:
    """What was matched while an `applied()` block lasted, in all threads that carry its context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.matched = Matched()

    def tell(self, matched: Matched) -> None:
        with self._lock:
            self.matched |= matched


_ENTERED: ContextVar[tuple[InForce, ...]] = ContextVar("patcher_in_force", default=())
_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("patcher_blocks", default=())
#: Whether the process-wide registry is left out.
_UNPATCHED: ContextVar[bool] = ContextVar("patcher_unpatched", default=False)

#: The patcher of `patcher.monkey_patching`: one value, replaced as a whole.
_registered = Patcher(strict=False)


def registered_patcher() -> Patcher:
    """The patcher that every load of this process meets."""
    return _registered


def set_registered_patcher(patcher: Patcher) -> None:
    global _registered
    _registered = patcher


def entered() -> tuple[InForce, ...]:
    """What the blocks around this code have put in force: what a model that is built by hand here meets."""
    return _ENTERED.get()


def in_force_for(patcher: Any) -> tuple[tuple[InForce, ...], tuple[InForce, ...]]:
    """What a load meets, the innermost first, and what of it this very load brings.

    Raises:
        InvalidPatcherError: `patcher` is no Patcher.
    """
    own: tuple[InForce, ...] = ()
    if patcher is not None:
        if not isinstance(patcher, Patcher):
            raise not_a_patcher("patcher={}", patcher)
        own = (InForce(patcher, "patcher="),)
    entries = (*own, *entered())
    if _registered.class_mapping and not _UNPATCHED.get() and not any(entry.is_registry for entry in entries):
        entries = (*entries, InForce(_registered, REGISTRY))
    return entries, own


@contextmanager
def entering(entries: Iterable[InForce], block: Block | None = None) -> Iterator[None]:
    """Put exactly these in force, the innermost first; a block is told of what is matched meanwhile."""
    token = _ENTERED.set(tuple(entries))
    blocks = _BLOCKS.set((*_BLOCKS.get(), block)) if block is not None else None
    try:
        yield
    finally:
        _ENTERED.reset(token)
        if blocks is not None:
            _BLOCKS.reset(blocks)


def tell_blocks(matched: Matched) -> None:
    """Tell the blocks around this code what was matched in them."""
    for block in _BLOCKS.get():
        block.tell(matched)


def unpatched(call: Callable[[], T]) -> T:
    """What a call gives where no patcher is in force but those that it brings: stock, to compare with."""

    def alone() -> T:
        _UNPATCHED.set(True)
        with entering(()):
            _BLOCKS.set(())
            return call()

    return copy_context().run(alone)
