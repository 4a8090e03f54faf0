"""Which patchers are in force: a tuple of blocks, the innermost first, in a context variable.

Entering puts a block in front, and leaving takes that very one out, whatever has been put there since: generators that
hold blocks may end in any order. The registry is replaced as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
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
        unchosen: (function, default, argument of a load, its value) of what isn't called under that value, for it is
            that default, or is called by it.
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
    unchosen: frozenset[tuple[str, str, str, str]] = frozenset()
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
    """What is in force for a while in the contexts that carry it, and what was matched meanwhile in all of them.

    Attributes:
        entries: the innermost first.
        only: nothing of what is around it is in force inside.
        thread: the one that it is private to, in contexts that others have copied as well.
        cover: the gates that were put in place for it.
        ended: it was left; a context that was copied from within may outlive it.
    """

    def __init__(self, entries: tuple[InForce, ...], *, only: bool = False, thread: int | None = None) -> None:
        self.entries = entries
        self.only = only
        self.thread = thread
        self.cover: Any = None
        self.ended = False
        self.matched = Matched()
        self._lock = threading.Lock()

    def tell(self, matched: Matched) -> None:
        with self._lock:
            self.matched |= matched


#: Inside of it nothing is in force that is outside, nor is the process-wide registry.
_STOCK = Block((), only=True)
_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("patcher_in_force", default=())

#: The patcher of `patcher.monkey_patching`: one value, replaced as a whole.
_registered = Patcher(strict=False)


def registered_patcher() -> Patcher:
    """The patcher that every load of this process meets."""
    return _registered


def set_registered_patcher(patcher: Patcher) -> None:
    global _registered
    _registered = patcher


def blocks() -> tuple[Block, ...]:
    """The blocks around this code, the innermost first."""
    here = threading.get_ident()
    return tuple(block for block in _BLOCKS.get() if not block.ended and block.thread in (None, here))


def entered() -> tuple[InForce, ...]:
    """What the blocks around this code have put in force: what a model that is built by hand here meets."""
    entries: list[InForce] = []
    for block in blocks():
        entries += block.entries
        if block.only:
            break
    return tuple(entries)


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
    if _registered.class_mapping and _STOCK not in blocks() and not any(entry.is_registry for entry in entries):
        entries = (*entries, InForce(_registered, REGISTRY))
    return entries, own


@contextmanager
def entering(block: Block) -> Iterator[None]:
    """Put a block in force."""
    _BLOCKS.set((block, *blocks()))
    try:
        yield
    finally:
        block.ended = True  # in every context that carries it: this may be another one than it was entered in
        _BLOCKS.set(blocks())


def tell_blocks(matched: Matched) -> None:
    """Tell the blocks around this code what was matched in them."""
    for block in blocks():
        if block is not _STOCK:
            block.tell(matched)


def unpatched(call: Callable[[], T]) -> T:
    """What a call gives where no patcher is in force but those that it brings: stock, to compare with."""

    def alone() -> T:
        _BLOCKS.set((_STOCK,))
        return call()

    return copy_context().run(alone)
