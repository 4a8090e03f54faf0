"""What no generated file can do."""

from __future__ import annotations

from torch import nn
from transformers.core_model_loading import Concatenate

from patcher.fusions import Fusion


class Halves(Fusion):
    """A family of its own."""

    target_modules_patterns = (r"layers\.0\.mlp$",)

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return type("Halved", (original_cls,), {})


class Unspeakable(Concatenate):
    """Forgets what it was made of."""

    def __init__(self, dim: int = 0, secret: int = 1) -> None:
        super().__init__(dim)
