"""Which layers of transformers have become parts of which layer of a model: adapters go by the names of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from patcher.compat.adapters import inner_modules
from patcher.conversions.either_layout import layouts_of
from patcher.conversions.fused_weights import fused_weights
from patcher.conversions.layouts import Flatten, Layout, Rows
from patcher.patterns import inside


@dataclass(frozen=True)
class Part:
    """A layer of transformers: its path, and the rows that it has in the layer that it has become a part of."""

    path: str
    start: int
    size: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class JoinedLayer:
    """A layer of a fused model, and the layers of transformers that are its rows.

    Attributes:
        kernel: of a convolution that has become a linear layer, (channels, *size); () otherwise.
        biases: the parameters that hold the biases of the parts, as (parameter, the numbers of its parts).
    """

    path: str
    parts: tuple[Part, ...]
    kernel: tuple[int, ...] = ()
    biases: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def rows(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def columns(self) -> int:
        return math.prod(self.kernel)


@dataclass(frozen=True)
class Layers:
    """The layers of a fused model as adapters meet them.

    Attributes:
        joined: path -> layer, of those that are made of layers of transformers.
        others: layer of transformers -> what it has become, of those that adapters can't follow.
        here: the paths of all modules, without what adapters have put there.
    """

    joined: Mapping[str, JoinedLayer]
    others: Mapping[str, str]
    here: tuple[str, ...]

    @cached_property
    def parts(self) -> dict[str, tuple[JoinedLayer, int]]:
        """Layer of transformers -> the layer that it is a part of, and which."""
        return {part.path: (layer, number) for layer in self.joined.values() for number, part in enumerate(layer.parts)}

    @cached_property
    def gone(self) -> frozenset[str]:
        """The layers that only the model of transformers has."""
        return frozenset((*self.parts, *self.others)) - frozenset(self.here)

    @cached_property
    def stock(self) -> tuple[str, ...]:
        """The paths of the modules of the model of transformers, as far as adapters may name them."""
        return (*(path for path in self.here if path not in self.joined), *(p for p in self.parts if p in self.gone))

    def __bool__(self) -> bool:
        return bool(self.joined or self.others)


def layers_of(model: nn.Module) -> Layers:
    """The layers of a model of transformers, with or without adapters in them."""
    joined: dict[str, JoinedLayer] = {}
    others: dict[str, str] = {}
    here = []
    for path, module in inner_modules(model):
        here.append(path)
        prefix = inside(path)
        fused = fused_weights(module)
        mine = fused.layouts if fused is not None else ()
        for layout in layouts_of(module):
            layer = _joined(prefix, layout, mine) if layout in mine else None
            if layer is not None:
                joined[layer.path] = layer
            elif not _is_bias(layout):
                others |= {owner: str(layout) for name in layout.stock if (owner := _owner(prefix, name)) != path}
    return Layers(joined, {path: text for path, text in others.items() if path not in joined}, tuple(here))


def _owner(prefix: str, name: str) -> str:
    return f"{prefix}{name}".rpartition(".")[0]


def _is_bias(layout: Layout) -> bool:
    return all(name.rpartition(".")[2] in ("bias",) for name in layout.stock)


def _joined(prefix: str, layout: Layout, layouts: Iterable[Layout]) -> JoinedLayer | None:
    """The layer that a layout of weights makes, None if it makes no linear layer of layers."""
    names = (*layout.stock, *layout.fused)
    if len(layout.fused) != 1 or any(name.rpartition(".")[2] != "weight" for name in names):
        return None
    owners = [_owner(prefix, name) for name in layout.stock]
    sizes = [shape[0] for shape in layout.stock_shapes]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = tuple(Part(*each) for each in zip(owners, starts, sizes, strict=True))
    if type(layout) is Flatten:
        kernel = tuple(layout.stock_shapes[0][1:])
    elif type(layout) is Rows and all(len(shape) == 2 for shape in layout.stock_shapes):
        kernel = ()
    else:
        return None
    numbers = {owner: number for number, owner in enumerate(owners)}
    biases = []
    for other in layouts:
        if type(other) is Rows and _is_bias(other) and all(_owner(prefix, name) in numbers for name in other.stock):
            at = tuple(numbers[_owner(prefix, name)] for name in other.stock)
            biases.append((f"{prefix}{other.fused[0]}", at))
    return JoinedLayer(_owner(prefix, layout.fused[0]), parts, kernel, tuple(biases))
