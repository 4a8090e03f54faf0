"""The patchers in force: a tuple of blocks, the innermost first, in a context variable.

Leaving removes the block that was entered, wherever it is by then: generators that hold blocks may end in any order.
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

#: Origins of patchers: the process-wide registry, a config's fusions, and fusions whose layout the weight files have.
REGISTRY = "monkey_patching"
FUSION_CONFIG = "fusion_config"
LAYOUT = "the layout on disk"


@dataclass(frozen=True)
class InForce:
    """A patcher and what put it in force: `patcher=`, `applied()`, or one of the origins above."""

    patcher: Patcher
    origin: str

    @property
    def is_registry(self) -> bool:
        return self.origin == REGISTRY


#: A member of a patcher: the patcher in force, the field, and the key or value in the field.
Key = tuple[InForce, str, Hashable]
#: Alternative members of one field.
Unused = tuple[InForce, str, tuple[Hashable, ...]]


@dataclass(frozen=True)
class Outcome:
    """The members of patchers that had an effect, and problems of alternatives that had none in the latest model."""

    used: frozenset[Key] = frozenset()
    unused: Mapping[Unused, Callable[[], str]] = field(default_factory=dict)

    def __or__(self, other: Outcome) -> Outcome:
        return Outcome(self.used | other.used, {**self.unused, **other.unused})

    def problems_of(self, entry: InForce) -> Iterator[Callable[[], str]]:
        """Yield the problems of a patcher's members that had no effect in any model."""
        if not entry.is_registry:  # that applies to every model of the process
            for (owner, kind, keys), problem in self.unused.items():
                if owner == entry and not any((entry, kind, key) in self.used for key in keys):
                    yield problem


@dataclass(eq=False)
class Block:
    """What is in force in the contexts that have the block, and its outcome in all of them.

    Attributes:
        entries: the innermost first.
        only: whether outer blocks are not in force inside.
        construction: the one for models built inside, in this thread alone: others may have copied the context.
        ended: whether it was left; a copied context may outlive it.
    """

    entries: tuple[InForce, ...] = ()
    only: bool = False
    construction: Construction | None = None
    thread: int = field(init=False, default_factory=threading.get_ident)
    ended: bool = field(init=False, default=False)
    outcome: Outcome = field(init=False, default_factory=Outcome)


#: Without any outer patcher, nor the process-wide registry.
_STOCK = Block(only=True)
_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("patcher_in_force", default=())

#: The patcher of `patcher.monkey_patching`: one value, replaced as a whole.
_registered = Patcher(strict=False)


def registered_patcher() -> Patcher:
    """Return the patcher that is in force for every load of this process."""
    return _registered


def set_registered_patcher(patcher: Patcher) -> None:
    global _registered
    _registered = patcher


def blocks() -> tuple[Block, ...]:
    """Return the blocks around this code, the innermost first."""
    thread = threading.get_ident()
    return tuple(
        block for block in _BLOCKS.get() if not block.ended and (block.construction is None or block.thread == thread)
    )


def entered() -> tuple[InForce, ...]:
    """Return the patchers of the blocks around this code, which a model constructed here without a load gets."""
    entries: list[InForce] = []
    for block in blocks():
        entries += block.entries
        if block.only:
            break
    return tuple(entries)


def construction_around() -> Construction | None:
    """Return the construction that this code is a part of, if there is one."""
    return next((block.construction for block in blocks() if block.construction is not None or block.only), None)


def in_force_for(patcher: Any) -> tuple[tuple[InForce, ...], tuple[InForce, ...]]:
    """Return the patchers in force for a load, the innermost first, and those of them that are its own.

    Raises:
        InvalidPatcherError: if `patcher` isn't a Patcher.
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
        block.ended = True  # in every context that has it, of which this may be another than the entered one
        block.construction = None  # which such a context would keep alive
        _BLOCKS.set(blocks())


def tell_blocks(outcome: Outcome) -> None:
    """Add an outcome to that of the blocks around this code."""
    with process_lock:
        for block in blocks():
            if block is not _STOCK:
                block.outcome |= outcome


def unpatched(call: Callable[[], T]) -> T:
    """Return the result of a call in a context without patchers in force."""

    def alone() -> T:
        _BLOCKS.set((_STOCK,))
        return call()

    return copy_context().run(alone)
