"""Where the values of a checkpoint lie in the tensors of a model: a conversion is run once, without values.

    split(qkv_proj.weight), contiguous             ->  k_proj.weight        rows 8 to 10 of qkv_proj.weight
    copied into a stack of experts, and cut again  ->  experts.1.w3.weight  1.up_proj.weight itself

On the meta device a view says by its sizes, strides and offset where it lies in its storage; copies, `cat` and `stack`
are places in a new storage to which others are written. So what only moves values is a view of the model's own tensor,
to be read without a copy and to be written in place; all else is run again on values, for one tensor at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

#: Operations whose result has no values yet.
_BLANK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class UntracedError(Exception):
    """A conversion that writes to what it was given, or looks at the bits of another type."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Some values of a storage, as `torch.as_strided` has them."""

    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return self.storage.dtype

    @property
    def size(self) -> int:
        """How many they are."""
        return prod(self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor that lies as the storage does."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    @property
    def origin(self) -> Piece:
        """The same values, where they were before they were copied; itself if they are from several places."""
        return self if self._copied_from is None else self._copied_from.origin

    @cached_property
    def _copied_from(self) -> Piece | None:
        return self.storage.before(self)

    @property
    def own(self) -> set[str]:
        """The tensors of the model that its values are of."""
        return {storage.name for storage in self.origin.storage.reached if storage.name}

    @cached_property
    def copied(self) -> list[tuple[Piece, Piece]]:
        """What was copied into it, where its storage was filled so: places in the storage, and what lies there."""
        writes = self.storage.writes if self.storage.is_filled_once else []
        (merged, _), is_all = _merged(self, self), self.size == self.storage.size and _is_dense(self)
        return [write for write in writes if is_all or _before(write[0], merged, merged) is not None]

    @cached_property
    def is_moved(self) -> bool:
        """Whether nothing but places has changed since the values were in the model, so that they can be put back."""
        origin = self.origin
        if origin.storage.name:
            return all(stride or count < 2 for count, stride in zip(origin.shape, origin.stride, strict=True))
        return sum(place.size for place, _ in origin.copied) == self.size and all(
            value.is_moved for _, value in origin.copied
        )

    def write(self, values: torch.Tensor, target: Callable[[str], torch.Tensor]) -> None:
        """Put values into the tensors of the model that they are of, where `is_moved`.

        Args:
            target: gives a tensor of the model by its name.
        """
        origin = self.origin
        if origin.storage.name:
            origin.of(target(origin.storage.name)).copy_(values)
            return
        around = values.new_empty(origin.storage.size)
        origin.of(around).copy_(values)
        for place, value in origin.copied:
            value.write(place.of(around), target)


class Storage:
    """What values lie in: a tensor of the model, what others were copied into, or the result of an operation.

    Attributes:
        name: that of the tensor of the model, otherwise "".
        like: a tensor on the meta device that is all of it.
        writes: where in it lie which others.
        operation: what computes it, and which of its results it is.
        is_read: whether something has been made of it, so that nothing may be written to it any more.
    """

    def __init__(self, like: torch.Tensor, name: str = "", operation: tuple[Any, ...] | None = None) -> None:
        self.name, self.operation, self.dtype = name, operation, like.dtype
        self.shape, self.stride = tuple(like.shape), like.stride()
        self.size = like.untyped_storage().nbytes() // like.element_size()
        self.writes: list[tuple[Piece, Piece]] = []
        self.is_read = False

    @cached_property
    def is_filled_once(self) -> bool:
        """Whether each value was written once; what only some were written of has been made by something else."""
        return bool(self.writes) and sum(place.size for place, _ in self.writes) == self.size

    @cached_property
    def _by_offset(self) -> tuple[list[int], list[tuple[Piece, Piece]]]:
        writes = sorted(self.writes, key=lambda write: write[0].offset)
        return [place.offset for place, _ in writes], writes

    def before(self, piece: Piece) -> Piece | None:
        """Where a piece of this was copied from, if all of it lay in one place."""
        if not self.is_filled_once or 0 in piece.shape:
            return None
        offsets, writes = self._by_offset
        last = bisect_right(offsets, piece.offset)
        found = (_before(piece, *write) for write in reversed(writes[:last]))
        return next((each for each in found if each is not None), None)

    @property
    def reached(self) -> frozenset[Storage]:
        """This, and all that it is made of."""
        return self._made_of | {self}

    @cached_property
    def _made_of(self) -> frozenset[Storage]:
        given = [value for _, value in self.writes]
        if self.operation is not None:
            given += [each for each in tree_leaves(self.operation[1:3]) if isinstance(each, Piece)]
        return frozenset().union(*(each.origin.storage.reached for each in given))


def _before(piece: Piece, place: Piece, value: Piece) -> Piece | None:
    """The part of `value` that is in a piece, all of which has to lie in the place that `value` was copied to."""

    def digits(number: int) -> list[int] | None:
        found = []
        for stride in place.stride:
            found.append(number // stride if stride else 0)
            number -= found[-1] * stride
        return None if number else found

    steps: list[list[int]] = []
    for number, count in zip((*piece.stride, piece.offset - place.offset), (*piece.shape, 2), strict=True):
        step = digits(number if count > 1 else 0)
        if step is None:
            return None
        steps.append(step)
    start = steps.pop()
    for dim, size in enumerate(place.shape):
        if start[dim] + sum((count - 1) * step[dim] for count, step in zip(piece.shape, steps, strict=True)) >= size:
            return None

    def in_value(position: list[int]) -> int:
        return sum(number * stride for number, stride in zip(position, value.stride, strict=True))

    return Piece(value.storage, piece.shape, tuple(map(in_value, steps)), value.offset + in_value(start))


def _is_dense(piece: Piece) -> bool:
    """Whether a piece has every value of as much memory as it has values, in any order."""
    size = 1
    for stride, count in sorted(zip(piece.stride, piece.shape, strict=True)):
        if count != 1 and stride != size:
            return False
        size *= count
    return piece.offset == 0


def _merged(place: Piece, value: Piece) -> tuple[Piece, Piece]:
    """A place and what is copied there, with as few dimensions as both have, the outermost first."""
    merged: list[tuple[int, int, int]] = []
    dims = zip(place.shape, place.stride, value.stride, strict=True)
    for size, mine, others in sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: -dim[1]):
        if merged and merged[-1][1:] == (mine * size, others * size):
            merged[-1] = merged[-1][0] * size, mine, others
        else:
            merged.append((size, mine, others))
    shape, *strides = zip(*merged, strict=True) if merged else ((), (), ())
    return (
        Piece(place.storage, shape, strides[0], place.offset),
        Piece(value.storage, shape, strides[1], value.offset),
    )


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among what an operation is given or makes: by themselves, or in lists."""
    listed = [each if isinstance(each, list | tuple) else (each,) for each in values]
    return [each for group in listed for each in group if isinstance(each, torch.Tensor)]


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what becomes of storages on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_lost = False
        #: with the storage itself, so that no other has its id
        self._known: dict[int, tuple[torch.UntypedStorage, Storage]] = {}

    def add(self, tensor: torch.Tensor, **what: Any) -> Storage:
        """Have the storage of a tensor known."""
        storage = tensor.untyped_storage()
        return self._known.setdefault(id(storage), (storage, Storage(tensor, **what)))[1]

    def known(self, tensor: Any) -> Storage | None:
        """What is known of the storage of a tensor."""
        is_meta = isinstance(tensor, torch.Tensor) and tensor.is_meta
        return self._known.get(id(tensor.untyped_storage()), (None, None))[1] if is_meta else None

    def piece(self, tensor: torch.Tensor) -> Piece:
        """Where a tensor lies whose values are used.

        Raises:
            UntracedError: that isn't known.
        """
        storage = self.known(tensor)
        if storage is None or storage.dtype != tensor.dtype or tensor.is_conj():
            raise self._lost()
        storage.is_read = True
        return Piece(storage, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made, name = func(*args, **kwargs), func.overloadpacket.__name__
        if func.is_view and self.known(made):
            return made
        new = [each for each in _tensors((made,)) if not self.known(each)]
        is_written = name.endswith("_") or "out" in kwargs
        if not (new or is_written) or name in _BLANK or not any(map(self.known, _tensors((*args, *kwargs.values())))):
            return made  # views, and what has nothing to do with the model
        if name == "copy_":
            self._copy(args[0], args[1])
        elif is_written:
            raise self._lost()
        elif name in ("clone", "_to_copy") and made.dtype == args[0].dtype:
            self._copy(made, args[0])
        elif name == "stack":
            for place, each in zip(made.unbind(*args[1:], **kwargs), args[0], strict=True):
                self._copy(place, each)
        elif name == "cat" and all(each.dtype == made.dtype and each.dim() == made.dim() for each in args[0]):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            for place, each in zip(made.split([each.shape[dim] for each in args[0]], dim), args[0], strict=True):
                self._copy(place, each)
        else:
            inputs = tree_map_only(torch.Tensor, self._input, (args, kwargs))
            for number, each in enumerate(_tensors((made,))):
                if any(each is one for one in new):
                    self.add(each, operation=(func, *inputs, number))
        return made

    def _lost(self) -> UntracedError:
        self.is_lost = True  # whoever calls an operation may take the error for one of the operation
        return UntracedError()

    def _input(self, tensor: torch.Tensor) -> Any:
        return self.piece(tensor) if tensor.is_meta else tensor  # values that the operation brings

    def _copy(self, place: torch.Tensor, value: torch.Tensor) -> None:
        storage = self.known(place) or self.add(place)
        if storage.name or storage.operation or storage.is_read or place.dtype != value.dtype:
            raise self._lost()
        source = self.piece(value.expand(place.shape))
        # A place needs no storage: a circle would keep all of it until Python looks for circles.
        where = Piece(source.storage, tuple(place.shape), place.stride(), int(place.storage_offset()))
        storage.writes.append(_merged(where, source))


def traced(
    convert: Callable[[dict[str, Any]], Mapping[str, Any]],
    tensors: Mapping[str, torch.Tensor],
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """What a conversion makes: a `Piece` for each tensor, and what it leaves as it is.

    Args:
        tensors: what it is given, on the meta device, each with a storage of its own.
        others: what it is given besides, which isn't looked into.

    Raises:
        UntracedError: it does more than can be written down.
    """
    trace = _Trace()
    for name, tensor in tensors.items():
        trace.add(tensor, name=name)
    try:
        with torch.no_grad(), trace:
            made = convert({**tensors, **others})
    except Exception as error:
        if trace.is_lost:
            raise UntracedError from error
        raise
    left = set(map(id, others.values()))
    return {name: value if id(value) in left else trace.piece(value) for name, value in made.items()}


class Values:
    """The values of pieces, one after the other; what several are cut of is held until the last of them is taken.

    Args:
        pieces: all that will be taken.
        own: gives a tensor of the model by its name.
    """

    def __init__(self, pieces: Iterable[Piece], own: Callable[[str], torch.Tensor]) -> None:
        self._own, self._held = own, dict[Storage, torch.Tensor]()
        self._left = Counter(storage for piece in pieces for storage in piece.origin.storage.reached)

    @torch.no_grad()
    def take(self, piece: Piece) -> torch.Tensor:
        """One of them."""
        result = self._read(piece)
        for storage in piece.origin.storage.reached:
            self._left[storage] -= 1
            if not self._left[storage]:
                self._held.pop(storage, None)
        return result

    def _read(self, piece: Piece) -> torch.Tensor:
        piece = piece.origin
        if piece.storage not in self._held:
            self._held[piece.storage] = self._made(piece.storage)
        return piece.of(self._held[piece.storage])

    def _made(self, storage: Storage) -> torch.Tensor:
        if storage.name:
            return self._own(storage.name)
        if storage.operation is None:
            values = (self._read(value) for _, value in storage.writes)
            result: torch.Tensor | None = None
            for (place, _), value in zip(storage.writes, values, strict=True):
                result = value.new_empty(storage.size) if result is None else result
                place.of(result).copy_(value)
            assert result is not None
            return result
        func, args, kwargs, number = storage.operation
        args, kwargs = tree_map_only(Piece, self._read, (args, kwargs))
        found = _tensors((func(*args, **kwargs),))[number]
        lying: torch.Tensor = found.new_empty_strided(storage.shape, storage.stride)
        return found if found.stride() == storage.stride else lying.copy_(found)
