"""What generated files use while they run. They are shipped and kept, so these names stay.

```python
from patcher.codegen.runtime import Unstack, under_construction
```
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps

from patcher.construction.construction import under_construction
from patcher.conversions import single
from patcher.fusions.joining import JoinRows, Step
from patcher.fusions.patch_embeddings import FlattenPatches

__all__ = ["FlattenPatches", "JoinRows", "StackAgain", "Step", "Unstack", "under_construction"]


class Unstack(ConversionOps):
    """Take a stack apart, one matrix for each expert.

    The target pattern names the first, `experts.up_proj.0.weight`; the others get their number in the place of the 0.

    Args:
        transposed: the matrices are (in, out), and those of the experts are to be (out, in).
    """

    def __init__(self, transposed: bool = False) -> None:
        self.transposed = transposed

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        whole = single(*input_dict.values())
        head, _, tail = (full_layer_name or target_patterns[0]).rpartition(".0.")
        return {
            f"{head}.{number}.{tail}": matrix.t().contiguous() if self.transposed else matrix
            for number, matrix in enumerate(whole.unbind())
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return StackAgain(self.transposed)


class StackAgain(ConversionOps):
    """The reverse of `Unstack`."""

    def __init__(self, transposed: bool = False) -> None:
        self.transposed = transposed

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        names = sorted(input_dict, key=lambda name: [int(number) for number in re.findall(r"\.(\d+)\.", name)])
        stack = torch.stack([single(input_dict.pop(name)) for name in names])
        name = target_patterns[0] if len(target_patterns) == 1 else names[0]
        return {name: stack.transpose(1, 2).contiguous() if self.transposed else stack}

    @property
    def reverse_op(self) -> ConversionOps:
        return Unstack(self.transposed)
