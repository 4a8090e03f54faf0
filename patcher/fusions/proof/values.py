"""What the symbolic run of a method knows of a value: which it is, whether it is true, whose memory it has."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

#: Where a value's memory may come from: a place of the source that allocates, or one of the words below.
Root = Hashable
Roots = frozenset[Any]

#: Whatever was there before the call: arguments, attributes, globals.
OUTSIDE = "outside"
#: Code of the method itself, a lambda or a nested function: whoever gets it may run it.
CODE = "code"
#: The memory of a cache of keys, values and states, which is its own.
CACHE = "cache"
#: What the arguments of a followed module or function share; see `children`.
GIVEN = "given"
NOTHING: Roots = frozenset()
FROM_OUTSIDE: Roots = frozenset({OUTSIDE})


def part_root(name: str) -> Root:
    """The memory of a projection's result."""
    return ("part", name)


def parts_in(roots: Iterable[Any]) -> set[str]:
    """The projections whose results are among the roots."""
    return {root[1] for root in roots if isinstance(root, tuple) and root[0] == "part"}


class Value:
    """What an expression gives, told apart by identity.

    Attributes:
        roots: what its memory may be, or that of anything it holds; empty for numbers, shapes and the like.
        truth: whether it is true, where that is known.
        parts: what a tuple holds, where that is known one by one.
        tensor: it is known to be a tensor.
        several: it is known to hold tensors only: what it is taken apart into are tensors.
        objects: the Python objects that it may be, where they are known.
        module: the module that it is, where that is the one whose method runs.
        child: what calling it does, where it is a child of that module.
        code: the function in which a function is defined, and its definition.
    """

    def __init__(
        self,
        roots: Roots = FROM_OUTSIDE,
        *,
        truth: bool | None = None,
        parts: tuple[Value, ...] | None = None,
        tensor: bool = False,
        several: bool = False,
        objects: tuple[Any, ...] = (),
        module: Module | None = None,
        child: Summary | None = None,
        code: tuple[Any, Any] | None = None,
    ) -> None:
        self.roots = roots
        self.truth = truth
        self.parts = parts
        self.tensor = tensor
        self.several = several
        self.objects = objects
        self.module = module
        self.child = child
        self.code = code

    def element(self) -> Value:
        """What is taken out of it, by an index or one after the other."""
        return Value(self.roots, tensor=self.tensor or self.several, child=self.child)


class Known(Value):
    """A constant."""

    def __init__(self, value: Any) -> None:
        super().__init__(NOTHING, truth=bool(value))
        self.value = value


def roots_of(values: Iterable[Value]) -> Roots:
    return frozenset().union(*(value.roots for value in values))


def either(one: Value | None, other: Value | None) -> Value:
    """The value of what is one or the other, it isn't known which."""
    if one is not None and one is other:
        return one
    there = [value for value in (one, other) if value is not None]
    objects = tuple({id(found): found for value in there for found in value.objects}.values())
    known = all(value.objects for value in there)
    return Value(roots_of(there), tensor=all(value.tensor for value in there), objects=objects if known else ())


@dataclass(frozen=True)
class Effect:
    """Something that may change what was there before.

    Attributes:
        reason: what it is, to be read after "behind".
        line: where, in the source of the method.
        roots: the memory that it may write to; None if it may do anything.
    """

    reason: str
    line: int
    roots: Roots | None


class Module(Protocol):
    """A module, as far as it is known: its class, and what calls of its children do."""

    @property
    def cls(self) -> type[Any]: ...

    def child(self, name: str) -> Summary | None:
        """What a call of the child does, or of the function that is kept under this name; None if there is none."""


@dataclass(frozen=True)
class Summary:
    """What a call of a child module does, or of a function that a module holds.

    Attributes:
        reason: why nothing is known of it; "" where the rest tells.
        writes: why it may write into what it is given; "" if it doesn't.
        changes: why it may write into something else, a buffer of its own; "" if it doesn't.
        gives_back: its result may share memory with what it is given.
        keeps: its result may share memory with something else, a buffer of its own.
        tensor: its result is a tensor.
        plain: this is said of calls with positional arguments only, at most that many: others may ask it to write.
    """

    reason: str = ""
    writes: str = ""
    changes: str = ""
    gives_back: bool = True
    keeps: bool = False
    tensor: bool = False
    plain: int | None = None
