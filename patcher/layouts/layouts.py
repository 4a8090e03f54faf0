"""Layouts: how stock parameters of a module are converted to fused ones, and back.

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
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn

from patcher.errors import InvalidPatcherError
from patcher.patterns import compress


def named_parameter(module: Any, name: str) -> nn.Parameter | None:
    """Return a parameter by its name, None if there is none: torch raises, and reads properties as modules."""
    *path, last = name.split(".")
    for part in path:
        module = module._modules.get(part) if module is not None else None
    return module._parameters.get(last) if module is not None else None


@dataclass(frozen=True)
class Layout:
    """Parameters that are converted together: a value that is the same for all identical modules.

    A subclass implements `fuse`, and its exact inverse `separate`. Both take tensors, also on the meta device, and
    don't write into them.

    Args:
        stock: the stock parameters, by their names in the module; a single one may be given as a string.
        fused: the parameters that they become, unless that follows from the shapes.
        stock_shapes: the shapes of the stock parameters, which `of` fills in.
    """

    #: The class of new modules that contain the layers of fused parameters.
    container: ClassVar[type[nn.Module]] = nn.Module

    stock: Sequence[str]
    fused: Sequence[str] = ()
    stock_shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("stock", "fused"):
            value: Any = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the fused parameters of the stock ones, both in the order of their names."""
        raise NotImplementedError

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the stock parameters of the fused ones: the inverse of `fuse`."""
        raise NotImplementedError

    def is_known(self) -> bool:
        """Whether all of its code is of transformers or this package."""
        return type(self).__module__.startswith("patcher.")

    def of(self, module: nn.Module) -> Self:
        """Return the layout with the shapes of a module.

        Raises:
            InvalidPatcherError: the module lacks one of the parameters.
        """
        parameters = {name: named_parameter(module, name) for name in self.stock}
        if absent := [name for name, parameter in parameters.items() if parameter is None]:
            raise InvalidPatcherError(
                f"{self} takes {', '.join(absent)}, and {type(module).__qualname__} has no such parameter; "
                f"it has {', '.join(name for name, _ in module.named_parameters()) or 'none'}."
            )
        shapes = tuple(tuple(parameter.shape) for parameter in parameters.values() if parameter is not None)
        return replace(self, stock_shapes=shapes)

    def named(self, rename: Callable[[str], str]) -> Self:
        """Return the layout with its names replaced."""
        return replace(self, stock=tuple(map(rename, self.stock)), fused=tuple(map(rename, self.fused)))

    def fused_shapes(self) -> list[torch.Size]:
        """Return the shapes of the fused parameters."""
        stock = [torch.empty(shape, device="meta") for shape in self.stock_shapes]
        return [tensor.shape for tensor in self.fuse(stock)]

    def __str__(self) -> str:
        return f"{', '.join(self.stock)} -> {', '.join(self.fused)} [{type(self).__name__}]"


#: id -> the layouts for which `is_exact` found nothing.
_exact: WeakValueDictionary[int, Layout] = WeakValueDictionary()


def is_exact(layout: Layout, fused: torch.Tensor) -> bool:
    """Whether a layout restores values exactly: one with code of a user is tried on random ones, once.

    Args:
        fused: one of its parameters, for the dtype and the device.
    """
    if layout.is_known() or _exact.get(id(layout)) is layout:
        return True
    device = torch.device("cpu") if fused.is_meta else fused.device
    copy, generator = deepcopy(layout), torch.Generator(device).manual_seed(0)  # operations may remember values
    scale = 1 if fused.dtype.is_floating_point else 100
    values = [torch.randn(size, generator=generator, device=device) for size in layout.stock_shapes]
    stock = [(scale * value).to(fused.dtype) for value in values]
    restored = stock
    with suppress(Exception):  # it may take certain values only
        restored = copy.separate(copy.fuse([tensor.clone() for tensor in stock]))
    pairs = zip(restored, stock, strict=True)
    if not all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs):
        return False
    _exact[id(layout)] = layout
    return True


def partly_frozen(frozen: Sequence[str], parts: Iterable[str]) -> str:
    """Return the end of a sentence that begins with the frozen ones of some parts."""
    return f"{'is' if len(frozen) == 1 else 'are'} frozen, and others of {', '.join(parts)} aren't"


def unlike_parts(groups: Iterable[Iterable[str]], module: nn.Module) -> str:
    """Return why groups of parameters can't become one each: another dtype or `requires_grad`; "" if they can."""
    for group in groups:
        parts = {name: part for name in group if (part := named_parameter(module, name)) is not None}
        if len({part.dtype for part in parts.values()}) > 1:
            return f"{', '.join(compress(parts))} have different types"
        frozen = [name for name, part in parts.items() if not part.requires_grad]
        if 0 < len(frozen) < len(parts):
            return f"{', '.join(compress(frozen))} {partly_frozen(frozen, compress(parts))}"
    return ""


@dataclass(frozen=True)
class Rows(Layout):
    """Concatenated rows: (a, ...), (b, ...) -> (a + b, ...).

    >>> cut = Rows(("q.weight", "k.weight"), "qk.weight", ((4, 1), (2, 1)), blocks=2)
    >>> (weight,) = cut.fuse([torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11]])])
    >>> weight.flatten().tolist()
    [0, 1, 10, 2, 3, 11]

    Attributes:
        blocks: the number of equal blocks, each with its share of the rows of every part. Tensor parallelism splits a
            weight into equal pieces, and each process needs rows of every part.
    """

    blocks: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each part."""
        return tuple(shape[0] for shape in self.stock_shapes)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The number of rows of each part in one block."""
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
    """Whether joined rows are arranged for tensor parallelism, and don't lie part by part."""
    return isinstance(layout, Rows) and layout.blocks > 1


@dataclass(frozen=True)
class Cut(Layout):
    """The inverse of `Rows`: (a + b, ...) -> (a, ...), (b, ...).

    >>> cut = Cut("kv.weight", ("k.weight", "v.weight"), sizes=(4, 2), blocks=2)
    >>> [part.flatten().tolist() for part in cut.fuse([torch.tensor([[0], [1], [10], [2], [3], [11]])])]
    [[0, 1, 2, 3], [10, 11]]

    Attributes:
        sizes: the number of rows of each part.
        blocks: the number of equal blocks, each with its share of the rows of every part.
        transposed: whether the weight is (..., a + b), as that of a `Conv1D`.
    """

    sizes: tuple[int, ...] = ()
    blocks: int = 1
    transposed: bool = False

    @property
    def rows(self) -> Rows:
        """The layout that this one inverts."""
        return Rows(self.fused, self.stock, tuple((size,) for size in self.sizes), self.blocks)

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.rows.separate([tensors[0].T if self.transposed else tensors[0]])

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (joined,) = self.rows.fuse(tensors)
        return [joined.T.contiguous() if self.transposed else joined]


class Flatten(Layout):
    """Flattens all dimensions but the first: (out, in, height, width) -> (out, in * height * width)."""

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.flatten(1) for tensor in tensors]

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.view(shape) for tensor, shape in zip(tensors, self.stock_shapes, strict=True)]


# --- storages --------------------------------------------------------------------------------------------------------


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its storage for itself, or is on the meta device."""
    return tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def memory_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that are the same memory in the same form."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, contiguous, with a separate storage, in the same memory if that is possible.

    Of what shares a storage tools save one tensor, for tied; of what isn't contiguous torch's fused optimizers train
    other rows on CPUs.
    """
    tensor = tensor.contiguous()
    if is_alone(tensor):
        return tensor
    try:
        return torch.utils.dlpack.from_dlpack(tensor.detach())
    except (BufferError, RuntimeError, TypeError):  # a device or dtype that dlpack doesn't support
        return tensor.clone()
