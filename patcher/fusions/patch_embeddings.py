"""`patch_embeddings`: a convolution whose patches don't overlap, as a linear layer over flattened patches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from patcher.fusions import Decision, Flatten, Fusion, Layout, Rows, Surroundings, more_than_a_weight_and_bias
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding


class PatchEmbeddings(Fusion):
    """`nn.Conv3d` and `nn.Conv2d` whose stride is their kernel size -> `LinearPatchEmbedding`, in the same place."""

    name = "patch_embeddings"
    subject = "a convolution in two or three dimensions (nn.Conv2d, nn.Conv3d)"

    def is_fusable(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d | nn.Conv3d) and not self.refusal(module)

    def refusal(self, module: nn.Module) -> str:
        if not isinstance(module, nn.Conv2d | nn.Conv3d):
            return "it isn't an nn.Conv2d or nn.Conv3d"
        if type(module) not in (nn.Conv2d, nn.Conv3d):
            return f"it is a {type(module).__qualname__}, whose forward may be another"
        if any(stride < size for stride, size in zip(module.stride, module.kernel_size, strict=True)):
            return f"its patches overlap (kernel {module.kernel_size}, stride {module.stride})"
        if module.stride != module.kernel_size:
            return f"there are gaps between its patches (kernel {module.kernel_size}, stride {module.stride})"
        if math.prod(module.kernel_size) == 1:
            return "its kernel is one pixel, there are no patches"
        padding = module.padding
        if padding != "valid" and (isinstance(padding, str) or any(padding)):
            return f"it pads its input ({padding!r})"
        if any(step != 1 for step in module.dilation):
            return f"its kernel is dilated {module.dilation}"
        if module.groups != 1:
            return f"it has {module.groups} groups"
        if reason := more_than_a_weight_and_bias(module):
            return f"it {reason}"
        return "its forward was replaced on the object" if "forward" in vars(module) else ""

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return LinearPatchEmbedding

    def decide(self, path: str, module: nn.Module, surroundings: Surroundings) -> Decision | None:
        if not isinstance(module, nn.Conv2d | nn.Conv3d):
            return None
        if reason := self.refusal(module) or surroundings.sharing(path, module, "it"):
            # Most convolutions of a convolutional network aren't worth a line.
            is_patch_embedding = module.stride == module.kernel_size and math.prod(module.kernel_size) > 1
            return Decision(refusal=reason, is_told=bool(self.modules) or "patch" in path or is_patch_embedding)
        return Decision(tuple(self.layouts(module)))

    def layouts(self, module: nn.Module) -> Iterator[Layout]:
        yield Flatten("weight", "linear.weight")
        if module._parameters["bias"] is not None:
            yield Rows("bias", "linear.bias")
