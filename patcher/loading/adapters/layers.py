"""Which layers of transformers have become parts of which layer of a model: adapters go by the names of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from patcher.compat.adapters import inner_modules
from patcher.conversions.either_layout import layouts_of
from patcher.conversions.fused_weights import fused_weights, is_shared
from patcher.conversions.layouts import Flatten, Layout, Rows
from patcher.errors import InvalidPatcherError
from patcher.fusions.experts.matrices import Matrices
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
class Stack:
    """A parameter with the weights of all experts, in the model of transformers.

    Attributes:
        path: of the module of the experts.
        name: of the parameter.
        place: which of the parameters of the module it is, in their order.
        count: how many experts there are.
        layers: what the layers of one expert are called, "" if an expert is a layer.
        rows: how many rows each of these has.
        interleaved: whether the rows of the layers take turns.
        turned: whether peft takes the inputs of the matrices for their outputs.
    """

    path: str
    name: str
    place: int
    count: int
    layers: tuple[str, ...]
    rows: int
    interleaved: bool
    turned: bool

    @property
    def parameter(self) -> str:
        return f"{self.path}.{self.name}"

    def layer(self, expert: int, number: int) -> str:
        """The path of a layer."""
        return f"{self.path}.{expert}.{self.layers[number]}".removesuffix(".")

    def paths(self) -> Iterator[str]:
        return (self.layer(expert, number) for expert in range(self.count) for number in range(len(self.layers)))

    @property
    def joined(self) -> JoinedLayer:
        """One expert, as a layer whose parts are its layers."""
        parts = (Part(name, number * self.rows, self.rows) for number, name in enumerate(self.layers))
        return JoinedLayer(self.name, tuple(parts))

    def in_rows_of_parts(self, tensor: torch.Tensor) -> torch.Tensor:
        """(experts, rows, rank) as the stack has them -> one layer after the other."""
        count, rows, rank = tensor.shape
        if not self.interleaved:
            return tensor
        return tensor.view(count, -1, len(self.layers), rank).transpose(1, 2).reshape(count, rows, rank)

    def in_rows_of_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The reverse of `in_rows_of_parts`."""
        count, rows, rank = tensor.shape
        if not self.interleaved:
            return tensor
        return tensor.view(count, len(self.layers), -1, rank).transpose(1, 2).reshape(count, rows, rank)


@dataclass(frozen=True)
class Layers:
    """The layers of a fused model as adapters meet them.

    Attributes:
        joined: path -> layer, of those that are made of layers of transformers.
        others: layer of transformers -> what it has become, of those that adapters can't follow.
        stacks: the stacks of experts that have become layers.
        here: the paths of all modules, without what adapters have put there.
    """

    joined: Mapping[str, JoinedLayer]
    others: Mapping[str, str]
    stacks: tuple[Stack, ...]
    here: tuple[str, ...]

    @cached_property
    def parts(self) -> dict[str, tuple[JoinedLayer, int]]:
        """Layer of transformers -> the layer that it is a part of, and which."""
        layers = self.joined.values()
        return {part.path: (layer, number) for layer in layers for number, part in enumerate(layer.parts)}

    @cached_property
    def gone(self) -> frozenset[str]:
        """The layers that only the model of transformers has."""
        return frozenset((*self.parts, *self.others)) - frozenset(self.here)

    @cached_property
    def stock(self) -> tuple[str, ...]:
        """The paths of the modules of the model of transformers, as far as adapters may name them."""
        own = (path for path in self.here if path not in self.joined and not self._is_of_an_expert(path))
        return (*own, *(path for path in self.parts if path in self.gone))

    @cached_property
    def of_experts(self) -> frozenset[str]:
        """The layers of single experts."""
        return frozenset(path for stack in self.stacks for path in stack.paths())

    def is_made_of_others(self, path: str) -> bool:
        """Whether a module is a layer that transformers has otherwise, or has become one."""
        return path in self.joined or path in self.of_experts or path in self.parts

    def is_joined(self, layer: JoinedLayer) -> bool:
        """Whether a layer has taken the place of its parts."""
        return bool(layer.kernel) or all(part.path in self.gone for part in layer.parts)

    def _is_of_an_expert(self, path: str) -> bool:
        return any(
            path.startswith(start) and path.removeprefix(start).partition(".")[0].isdigit() for start in self._experts
        )

    @cached_property
    def _experts(self) -> tuple[str, ...]:
        return tuple({inside(stack.path) for stack in self.stacks})

    def __bool__(self) -> bool:
        return bool(self.joined or self.others or self.stacks)


def layers_of(model: nn.Module) -> Layers:
    """The layers of a model of transformers, with or without adapters in them.

    Raises:
        InvalidPatcherError: processes share the joined layers: each has other rows, or other experts.
    """
    joined: dict[str, JoinedLayer] = {}
    others: dict[str, str] = {}
    stacks, here = [], []
    for path, module in inner_modules(model):
        here.append(path)
        prefix = inside(path)
        fused = fused_weights(module)
        if fused is not None and is_shared(module, fused):
            raise InvalidPatcherError(
                f"An adapter is asked for a model whose processes share {path}, by tensor or expert parallelism: each "
                "has other rows of what is joined there, or other experts. Load the model without the fusions, or "
                "without that parallelism."
            )
        mine = fused.layouts if fused is not None else ()
        for layout in layouts_of(module):
            layer = _joined(prefix, layout, mine) if layout in mine else None
            if layer is not None:
                joined[layer.path] = layer
            elif isinstance(layout, Matrices) and fused is not None:
                stacks += _stack(path, module, layout, fused.names)
            elif not _is_bias(layout):
                others |= {owner: str(layout) for name in layout.stock if (owner := _owner(prefix, name)) != path}
    others = {path: text for path, text in others.items() if path not in joined}
    stacks.sort(key=lambda stack: (stack.path, stack.place))
    return Layers(joined, others, tuple(stacks), tuple(here))


def _stack(path: str, module: nn.Module, layout: Matrices, order: tuple[str, ...]) -> list[Stack]:
    """The stack that a layout makes layers of; none where it is one of biases."""
    if any(name.rpartition(".")[2] != "weight" for name in layout.layers):
        return []
    names = tuple(name.removesuffix("weight").removesuffix(".") for name in layout.layers)
    rows, count = layout.fused_shapes()[0][0], layout.stock_shapes[0][0]
    turned = layout.transposed != bool(getattr(module, "is_transposed", False))
    place = order.index(layout.stock[0])
    return [Stack(path, layout.stock[0], place, count, names, rows, layout.interleaved, turned)]


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
