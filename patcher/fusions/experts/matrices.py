"""The layout of expert weights: a stack of matrices, or one linear layer for each matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import nn

from patcher.compat.standing_alone import ExpertLayers
from patcher.errors import InvalidPatcherError
from patcher.layouts.layouts import Layout


@dataclass(frozen=True)
class Matrices(Layout):
    """A stack of weights, `(experts, out, in)`, or of biases, `(experts, out)`, as parameters of linear layers.

    >>> experts = nn.Module()
    >>> experts.up_proj = nn.Parameter(torch.randn(2, 3, 4))
    >>> layout = Matrices("up_proj", layers=("up_proj.weight",)).of(experts)
    >>> layout.fused
    ('0.up_proj.weight', '1.up_proj.weight')
    >>> weights = layout.fuse([experts.up_proj])
    >>> [tuple(weight.shape) for weight in weights]
    [(3, 4), (3, 4)]
    >>> torch.equal(*layout.separate(weights), experts.up_proj)
    True

    Attributes:
        stock: the name of the stack.
        fused: the parameters of the layers, expert by expert, derived from the shape of the stack.
        layers: the parameters of one expert; several (gate and up) in the order of their rows.
        transposed: the stack is `(experts, in, out)`.
        interleaved: the rows of the parts of an expert alternate; otherwise one part comes after the other.
    """

    container: ClassVar[type[nn.Module]] = ExpertLayers

    layers: tuple[str, ...] = ()
    transposed: bool = False
    interleaved: bool = False

    def of(self, module: nn.Module) -> Self:
        layout = super().of(module)
        (shape,) = layout.stock_shapes
        if (shape[-1] if self.transposed else shape[1]) % self.parts:
            raise InvalidPatcherError(
                f"{self.stock[0]} of the shape {shape} can't be cut into {self.parts} equal parts for each expert"
            )
        return replace(layout, fused=tuple(f"{expert}.{name}" for expert in range(shape[0]) for name in self.layers))

    @property
    def parts(self) -> int:
        """The number of layers of an expert in this stack."""
        return len(self.layers)

    def fused_shapes(self) -> list[torch.Size]:
        _, *matrix_shape = self.stock_shapes[0]
        rows, *columns = reversed(matrix_shape) if self.transposed else matrix_shape
        return [torch.Size((rows // self.parts, *columns))] * len(self.fused)

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters of the layers, in the order of `fused`: views of the stack where they can be.

        Raises:
            ValueError: the stack has another shape.
        """
        (stack,) = tensors
        if tuple(stack.shape) != self.stock_shapes[0]:
            raise ValueError(f"{self.stock[0]} has the shape {tuple(stack.shape)}, not {self.stock_shapes[0]}")
        return [piece.contiguous() for piece in self._pieces(stack)]

    @torch.no_grad()
    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the stack of the parameters that `fuse` gave, byte for byte.

        Raises:
            ValueError: there are more or fewer parameters than the stack has, or they differ in dtype or shape.
        """
        if len(tensors) != len(self.fused):
            raise ValueError(f"{self.stock[0]} is made of {len(self.fused)} parameters, found {len(tensors)}")
        stack = tensors[0].new_empty(self.stock_shapes[0])
        for name, piece, tensor in zip(self.fused, self._pieces(stack), tensors, strict=True):
            if tensor.shape != piece.shape or tensor.dtype != stack.dtype:
                actual, expected = (f"{tuple(value.shape)}, {value.dtype}" for value in (tensor, piece))
                raise ValueError(f"{name} is {actual}, and {self.stock[0]} needs {expected}")
            piece.copy_(tensor)
        return [stack]

    def _pieces(self, stack: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of the stack for the parameters, in the order of `fused`."""
        matrices = stack.transpose(1, 2) if self.transposed else stack
        parts = self.parts
        if self.interleaved:
            part_stacks = [matrices[:, part::parts] for part in range(parts)]
        else:
            part_stacks = list(matrices.chunk(parts, dim=1))
        return [piece for expert in zip(*(part.unbind() for part in part_stacks), strict=True) for piece in expert]
