"""The checkpoint of a model that is partly on the disk: it is computed layer by layer, while it is written.

transformers takes one tensor after the other out of the state dict that it saves, right before it writes the file
which that belongs to. So the values of a layer are read and converted when the first of its tensors is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from patcher.compat.models import load_offloaded_parameter
from patcher.loading.saving import SavePlan
from patcher.patterns import layer_of


class OffloadedCheckpoint(dict[str, Any]):
    """What `plan` saves of a state dict; tensors that will be computed are on the meta device."""

    def __init__(self, plan: SavePlan, state_dict: Mapping[str, torch.Tensor]) -> None:
        self._plan = plan
        whole = plan.saved_state_dict(_on_meta(state_dict))
        self._groups = self._grouped(state_dict, whole)
        self._group_of = {key: group for group in self._groups for key in group.keys}
        self._ready: dict[str, torch.Tensor] = {}
        # Each by itself: shards are cut by the size of what a tensor is a view of.
        super().__init__({name: torch.empty_like(value) if value.is_meta else value for name, value in whole.items()})

    def pop(self, key: str, *default: Any) -> Any:
        """The values of one tensor, which are dropped here."""
        value = super().pop(key, *default)
        group = self._group_of.get(key)
        if group is None:
            return value
        if key not in self._ready:
            self._ready.clear()  # before others are read
            self._ready = group.values(self._plan)
        return self._ready.pop(key)

    def _grouped(self, state_dict: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> list[_Group]:
        """The layers, each of which is converted by itself; as one group, where conversions reach across layers."""
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in state_dict.items():
            layers.setdefault(layer_of(name), {})[name] = tensor
        try:
            groups = [_Group(own, list(self._plan.saved_state_dict(_on_meta(own)))) for own in layers.values()]
        except Exception:  # it can be reversed only together with others
            groups = []
        if sorted(key for group in groups for key in group.keys) != sorted(whole):
            groups = [_Group(dict(state_dict), list(whole))]
        return groups


class _Group:
    """Tensors of the model that are converted together, and the keys of the checkpoint that they become."""

    def __init__(self, tensors: dict[str, torch.Tensor], keys: list[str]) -> None:
        self.tensors, self.keys = tensors, keys

    def values(self, plan: SavePlan) -> dict[str, torch.Tensor]:
        read = {
            name: load_offloaded_parameter(plan.model, name) if tensor.is_meta else tensor
            for name, tensor in self.tensors.items()
        }
        return plan.saved_state_dict(read)


def _on_meta(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to("meta") if type(tensor) in (torch.Tensor, nn.Parameter) else tensor
        for name, tensor in tensors.items()
    }
