"""Which patchers are in force: a tuple of blocks, the innermost first, in a context variable.

Entering puts a block in front, and leaving takes that very one out, whatever has been put there since: generators that
hold blocks may end in any order. The registry is replaced as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from patcher.construction.lock import process_lock
from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher

if TYPE_CHECKING:
    from patcher.construction.construction import Construction

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


#: What had an effect: (patcher in force, field, what of that field).
Key = tuple[InForce, str, Hashable]
#: What had none: the same, with all of that field of which one is enough.
Unused = tuple[InForce, str, tuple[Hashable, ...]]


@dataclass(frozen=True)
class Outcome:
    """What had an effect of the patchers in force, and why the rest hadn't, as whoever decides about it has found.

    Attributes:
        used: what had an effect.
        unused: the problems of the rest, in the model that was looked at last.
    """

    used: frozenset[Key] = frozenset()
    unused: Mapping[Unused, Callable[[], str]] = field(default_factory=dict)

    def __or__(self, other: Outcome) -> Outcome:
        return Outcome(self.used | other.used, {**self.unused, **other.unused})

    def problems_of(self, entry: InForce) -> Iterator[Callable[[], str]]:
        """The problems of all of one patcher that had no effect anywhere."""
        if not entry.is_registry:  # it meets every model of the process
            for (owner, kind, keys), problem in self.unused.items():
                if owner == entry and not any((entry, kind, key) in self.used for key in keys):
                    yield problem


@dataclass(eq=False)
class Block:
    """What is in force for a while in the contexts that carry it, and what was found meanwhile in all of them.

    Attributes:
        entries: the innermost first.
        only: nothing of what is around it is in force inside.
        construction: what is built inside is a part of it, in this thread alone: others may have copied the context.
        ended: it was left; a context that was copied from within may outlive it.
    """

    entries: tuple[InForce, ...] = ()
    only: bool = False
    construction: Construction | None = None
    thread: int = field(init=False, default_factory=threading.get_ident)
    ended: bool = field(init=False, default=False)
    outcome: Outcome = field(init=False, default_factory=Outcome)


#: Inside of it nothing is in force that is outside, nor is the process-wide registry.
_STOCK = Block(only=True)
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
    return tuple(
        block for block in _BLOCKS.get() if not block.ended and (block.construction is None or block.thread == here)
    )


def entered() -> tuple[InForce, ...]:
    """What the blocks around this code have put in force: what a model that is built by hand here meets."""
    entries: list[InForce] = []
    for block in blocks():
        entries += block.entries
        if block.only:
            break
    return tuple(entries)


def construction_around() -> Construction | None:
    """The construction that this code is a part of, None if nothing is built here under a patcher."""
    return next((block.construction for block in blocks() if block.construction is not None or block.only), None)


def in_force_for(patcher: Any) -> tuple[tuple[InForce, ...], tuple[InForce, ...]]:
    """What a load meets, the innermost first, and what of it this very load brings.

    Raises:
        InvalidPatcherError: `patcher` isn't a Patcher.
    """
    if not isinstance(patcher, Patcher | None):
        raise not_a_patcher("patcher={}", patcher)
    own = () if patcher is None else (InForce(patcher, "patcher="),)
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
        block.construction = None  # which such a context would keep
        _BLOCKS.set(blocks())


def tell_blocks(outcome: Outcome) -> None:
    """Tell the blocks around this code what was found in them."""
    with process_lock:
        for block in blocks():
            if block is not _STOCK:
                block.outcome |= outcome


def unpatched(call: Callable[[], T]) -> T:
    """What a call gives where no patcher is in force but those that it brings: stock, to compare with."""

    def alone() -> T:
        _BLOCKS.set((_STOCK,))
        return call()

    return copy_context().run(alone)
