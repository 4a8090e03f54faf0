"""Layouts: parameters of a module of transformers that become others together, and the way back.

>>> joined = Rows(("q.weight", "k.weight"), "qk.weight", ((4, 2), (3, 2)))
>>> q, k = torch.zeros(4, 2), torch.ones(3, 2)
>>> (weight,) = joined.fuse([q, k])
>>> weight.shape
torch.Size([7, 2])
>>> [tuple(part.shape) for part in joined.separate([weight])]
[(4, 2), (3, 2)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeGuard

import torch
from torch import nn

from patcher.errors import InvalidPatcherError


def named_parameter(module: Any, name: str) -> nn.Parameter | None:
    """The parameter of that name, None if there is none: torch raises, and takes properties for modules.

    Args:
        module: it, or what holds its tables.
    """
    *path, last = name.split(".")
    at = module
    for part in path:
        at = at._modules.get(part) if at is not None else None
    return at._parameters.get(last) if at is not None else None


@dataclass(frozen=True)
class Layout:
    """Parameters that become others together: a value that is the same for all modules alike.

    A subclass says how, in `fuse`, and how back, in `separate`. Both are given tensors, on the meta device too, and
    keep every value.

    Args:
        stock: the parameters of the module as transformers has it, by their names in the module; one may be given by
            itself.
        fused: those that they become, where that doesn't follow from the shapes.
        stock_shapes: the shapes of the first. The engine fills them in, from the module that it meets.
    """

    stock: Sequence[str]
    fused: Sequence[str] = ()
    stock_shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("stock", "fused"):
            value: Any = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The fused parameters from those of transformers, both in the order of the names."""
        raise NotImplementedError

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The reverse of `fuse`."""
        raise NotImplementedError

    def of(self, module: nn.Module) -> Self:
        """The layout with the shapes that a module has.

        Raises:
            InvalidPatcherError: the module lacks one of the parameters.
        """
        found = {name: named_parameter(module, name) for name in self.stock}
        if absent := [name for name, parameter in found.items() if parameter is None]:
            raise InvalidPatcherError(
                f"{self} takes {', '.join(absent)}, and {type(module).__qualname__} has no such parameter; "
                f"it has {', '.join(name for name, _ in module.named_parameters()) or 'none'}."
            )
        return replace(self, stock_shapes=tuple(tuple(each.shape) for each in found.values() if each is not None))

    def named(self, name: Callable[[str], str]) -> Self:
        """The layout with other names."""
        stock, fused = (tuple(map(name, names)) for names in (self.stock, self.fused))
        return replace(self, stock=stock, fused=fused)

    def fused_shapes(self) -> list[torch.Size]:
        """The shapes of the fused parameters."""
        stock = [torch.empty(shape, device="meta") for shape in self.stock_shapes]
        return [tensor.shape for tensor in self.fuse(stock)]

    def __str__(self) -> str:
        return f"{', '.join(self.stock)} -> {', '.join(self.fused)} [{type(self).__name__}]"


def unlike_parts(layouts: Iterable[Layout], module: nn.Module) -> str:
    """Why parameters of a module can't become one, which has one type and trains or doesn't; "" if they can."""
    for layout in layouts:
        parts = {name: part for name in layout.stock if (part := named_parameter(module, name)) is not None}
        if len({part.dtype for part in parts.values()}) > 1:
            return f"{', '.join(parts)} have different types"
        frozen = [name for name, part in parts.items() if not part.requires_grad]
        if 0 < len(frozen) < len(parts):
            return f"{', '.join(frozen)} is frozen, and others of {', '.join(parts)} aren't"
    return ""


@dataclass(frozen=True)
class Rows(Layout):
    """Rows one under the other: (a, ...), (b, ...) -> (a + b, ...).

    >>> cut = Rows(("q.weight", "k.weight"), "qk.weight", ((4, 1), (2, 1)), blocks=2)
    >>> (weight,) = cut.fuse([torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11]])])
    >>> weight.flatten().tolist()
    [0, 1, 10, 2, 3, 11]

    Attributes:
        blocks: how many equal blocks the rows lie in, each with its share of every part. Processes of tensor
            parallelism cut a weight into equal pieces, and each of them needs rows of every part.
    """

    blocks: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each part has."""
        return tuple(shape[0] for shape in self.stock_shapes)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """How many rows of each part lie in one block."""
        return tuple(size // self.blocks for size in self.sizes)

    def fused_shapes(self) -> list[torch.Size]:
        return [torch.Size((sum(self.sizes), *self.stock_shapes[0][1:]))]

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(tensors) == 1:
            return [tensors[0]]
        pieces = zip(*(tensor.chunk(self.blocks) for tensor in tensors), strict=True)
        return [torch.cat([piece for block in pieces for piece in block])]

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.blocks == 1:
            return list(torch.split(tensors[0], list(self.sizes)))
        blocks = [torch.split(block, list(self.block_sizes)) for block in tensors[0].chunk(self.blocks)]
        return [torch.cat(part) for part in zip(*blocks, strict=True)]


def lies_in_blocks(layout: Layout) -> TypeGuard[Rows]:
    """Whether processes share joined rows, so that these don't lie part by part."""
    return isinstance(layout, Rows) and layout.blocks > 1


@dataclass(frozen=True)
class Cut(Layout):
    """The reverse of `Rows`: (a + b, ...) -> (a, ...), (b, ...).

    >>> cut = Cut("kv.weight", ("k.weight", "v.weight"), sizes=(4, 2), blocks=2)
    >>> [part.flatten().tolist() for part in cut.fuse([torch.tensor([[0], [1], [10], [2], [3], [11]])])]
    [[0, 1, 2, 3], [10, 11]]

    Attributes:
        sizes: how many rows each part has.
        blocks: how many equal blocks the rows lie in, each with its share of every part.
        transposed: whether the whole is (..., a + b), as the weight of a `Conv1D`.
    """

    sizes: tuple[int, ...] = ()
    blocks: int = 1
    transposed: bool = False

    @property
    def rows(self) -> Rows:
        """The layout that this one reverses."""
        return Rows(self.fused, self.stock, tuple((size,) for size in self.sizes), self.blocks)

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.rows.separate([tensors[0].T if self.transposed else tensors[0]])

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (whole,) = self.rows.fuse(tensors)
        return [whole.T.contiguous() if self.transposed else whole]


class Flatten(Layout):
    """All dimensions but the first as one: (out, in, height, width) -> (out, in * height * width)."""

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.flatten(1) for tensor in tensors]

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.view(shape) for tensor, shape in zip(tensors, self.stock_shapes, strict=True)]


# --- the memory of what is made --------------------------------------------------------------------------------------


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else lies in the storage of a tensor; on the meta device nothing lies anywhere."""
    return tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a storage of its own, in the same memory.

    Pieces of one tensor share its storage, and what shares a storage is saved into one shard.
    """
    if is_alone(tensor):
        return tensor
    try:
        return torch.utils.dlpack.from_dlpack(tensor.detach())
    except (BufferError, RuntimeError, TypeError):  # a device or a type that can't be exchanged
        return tensor.clone()
