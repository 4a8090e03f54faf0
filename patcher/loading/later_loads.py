"""What is loaded into a model after it was patched, by others: adapters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import copy_transform
from patcher.conversions.either_layout import modules_with_layouts
from patcher.patterns import inside


def without_stacked(model: nn.Module, conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """Conversions of transformers but for those that stack layers which the patched model has one by one."""
    own = [
        f"{inside(path)}{name}"
        for path, _, layouts in modules_with_layouts(model)
        for layout in layouts
        for name in layout.fused
    ]
    conversions = list(conversions)
    if not own:
        return conversions

    def stacks_them(transform: WeightTransform) -> bool:
        copied = copy_transform(transform)  # it notes that it was used
        return any(copied.rename_source_key(name)[1] is not None for name in own)

    return [each for each in conversions if not (isinstance(each, WeightConverter) and stacks_them(each))]
