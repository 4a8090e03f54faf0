"""The layer of `patch_embeddings`: that of generated files, with the attributes of the convolution."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from patcher.compat import standing_alone
from patcher.compat.models import mark_initialized
from patcher.errors import PatchConflictError
from patcher.fusions import more_than_a_weight_and_bias, view_of

#: The attributes of a convolution that can't be set on its linear form.
_CONVOLUTION = frozenset(
    "weight bias in_channels out_channels kernel_size stride padding dilation groups padding_mode".split()
)


class LinearPatchEmbedding(standing_alone.LinearPatchEmbedding):
    """A convolution with stride = kernel size as a linear layer over flattened patches.

    >>> convolution = nn.Conv2d(3, 8, kernel_size=4, stride=4)
    >>> linear = LinearPatchEmbedding.from_module(convolution)
    >>> linear.linear.load_state_dict({"weight": convolution.weight.flatten(1), "bias": convolution.bias})
    <All keys matched successfully>
    >>> image = torch.randn(2, 3, 17, 12)
    >>> torch.allclose(linear(image), convolution(image), atol=1e-6)
    True

    It has the inputs and outputs of the convolution: images of any size, without incomplete patches at the far edges.
    It has the attributes of the convolution too; its `weight` is a view of the weight of `linear` in the shape of the
    kernel.

    For inputs of one patch each, as in the Qwen-VL family, the matrix product is several times as fast as the
    convolution (see `tests/benchmarks`). For whole images cutting the patches costs as much as that gains, so they are
    convolved with the same weight, unless `linear` is quantized or has an adapter or hooks.
    """

    padding_mode = "zeros"

    @classmethod
    def from_module(cls, convolution: nn.Conv2d | nn.Conv3d) -> Self:
        """Return a linear layer for a convolution, with new values."""
        kernel_size, bias = convolution.kernel_size, convolution._parameters["bias"] is not None
        linear = cls(
            convolution.in_channels, convolution.out_channels, kernel_size, kernel_size, 0, bias, rank=len(kernel_size)
        )
        linear.dtype = convolution.weight.dtype
        return linear.to(linear.dtype)

    def to_module(self) -> nn.Conv2d | nn.Conv3d:
        """Return a convolution of the same shape, with new values."""
        cls: Any = {2: nn.Conv2d, 3: nn.Conv3d}[len(self.kernel_size)]
        convolution: nn.Conv2d | nn.Conv3d = cls(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, bias=self.linear.bias is not None
        )
        return convolution

    @property
    def weight(self) -> torch.Tensor:
        """The kernel of the convolution. Modeling code reads its dtype to cast the input, and its shape."""
        weight: torch.Tensor = self.linear.weight
        shape = self.kernel_shape
        if weight.dtype.itemsize == 1 or not f"{type(weight).__module__}.".startswith("torch."):
            # A quantized weight may not have a view of another shape: return a placeholder.
            is_real = weight.is_floating_point() and weight.dtype.itemsize > 1
            dtype = weight.dtype if is_real else self.dtype
            kernel = torch.empty((), dtype=dtype, device=weight.device).expand(shape)
            mark_initialized(kernel)  # or a model around it would write into it
            return kernel
        return view_of(weight, lambda tensor: tensor.view(shape), f"{type(self).__name__}.weight is its linear.weight")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CONVOLUTION and "linear" in self._modules:
            raise PatchConflictError(
                f"{type(self).__name__} computes a convolution by its linear layer, and the {name} of the convolution "
                "can't be set on it. Take the fusions off with Patcher().apply(model) first."
            )
        super().__setattr__(name, value)

    def is_plain(self) -> bool:
        """Whether `linear` computes a product with its weight, and nothing else."""
        linear = self.linear
        return (
            type(linear) is nn.Linear
            and type(linear.weight) is nn.Parameter
            and "forward" not in vars(linear)
            and not more_than_a_weight_and_bias(linear)
        )

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
