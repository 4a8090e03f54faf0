"""One module as its fused form, without a model around it."""

from __future__ import annotations

from torch import nn

from patcher.fusions import FusedModule, Fusion
from patcher.fusions.families import fusion_named, name_or_fusion
from patcher.fusions.fused_module import fuse_in_place, put_in_place


def fuse(fusion: str | Fusion, module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Convert a module to the class that a family makes for it, with its values."""
    layouts = fusion_named(fusion).layouts(module)
    if not issubclass(cls, FusedModule):
        return put_in_place(module, cls, layouts, name_or_fusion(fusion))
    fuse_in_place([(module, layouts, type(module), name_or_fusion(fusion))])
    module.__class__ = cls
    return module
