"""Experts that a checkpoint lacks: they start as those of transformers do from the same seed.

transformers draws what is missing parameter by parameter, in the order of the model. A stack of experts is one of
them, and would be many layers drawn one after the other. So where experts are missing, all that is missing is drawn
once more, from the random state of before, on a model of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import mark_initialized, named_modules
from patcher.construction.lock import construction_lock
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.carried import fused_modules
from patcher.layouts.layouts import Layout
from patcher.patterns import inside
from patcher.resolution.resolution import skeleton


@dataclass(frozen=True, eq=False)
class MissingExperts:
    """The parameters that are drawn again, and the random state from which they are.

    Attributes:
        fused: the layouts of what is missing whole.
        others: what else is missing, under the names that it has in transformers too.
    """

    random_state: torch.Tensor
    fused: tuple[Layout, ...]
    others: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module, missing: set[str]) -> MissingExperts | None:
        """What is drawn again of a model, None where no experts are missing.

        Args:
            missing: what transformers draws, without what replacements have.
        """
        layouts = (layout for each in fused_modules(model) for layout in each.fused)
        fused = tuple(layout for layout in layouts if missing.issuperset(layout.fused))
        if not any(isinstance(layout, Matrices) for layout in fused):
            return None
        others = missing - {name for layout in fused for name in layout.fused}
        return MissingExperts(torch.get_rng_state(), fused, tuple(others))

    def values(self, model_class: Any, config: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """The values, by the names that they have in the patched model; the random state is that of transformers."""
        torch.set_rng_state(self.random_state)
        with construction_lock.held_for(model_class.__name__):
            stock = skeleton(model_class, config)
            names = {name for layout in self.fused for name in layout.stock}
            drawn = _initial_values(stock, {*names, *self.others}, dtype)
        result = {name: drawn[name] for name in self.others if name in drawn}
        for layout in self.fused:
            made = layout.fuse([drawn[name] for name in layout.stock])
            result |= zip(layout.fused, made, strict=True)
        return result


@torch.no_grad()
def _initial_values(model: PreTrainedModel, wanted: set[str], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """What transformers initialises parameters of a model with, which is on meta, as it does for missing ones."""
    found: dict[str, nn.Parameter] = {}
    for path, module in named_modules(model):
        # A module may initialise what its parts have.
        if not any(name.startswith(inside(path)) for name in wanted):
            mark_initialized(module)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            key = inside(path) + name
            if key in wanted and isinstance(tensor, nn.Parameter):
                kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                found[key] = module._parameters[name] = nn.Parameter(
                    torch.empty(tensor.shape, dtype=kind, device="cpu")
                )
            elif tensor is not None:
                mark_initialized(tensor)
    model.initialize_weights()  # type: ignore[no-untyped-call]
    return {name: parameter.data for name, parameter in found.items()}
