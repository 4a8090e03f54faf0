"""The weights of a model that is partly on the disk, saved as transformers saves such models.

It cuts the parameters of the model into shards, reads one shard, reverses the conversions of that, and writes it. So
that the shards are those of the stock model, ours is undone before the cut, by names and shapes; values are read when
their shard is written, those that are one tensor here together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patcher.compat.conversions import key_renamer, stock_conversions
from patcher.compat.models import state_tensors
from patcher.conversions.fused_weights import FusedWeights, fused_modules
from patcher.conversions.tracing import ConversionTrace
from patcher.loading.record import PatchRecord
from patcher.loading.saving import SavePlan, TakenApart
from patcher.patterns import inside
from patcher.resolution.resolution import skeleton

#: What the names of parts begin with that aren't called as in the stock model: of these some may be in use there.
_RESTORED, _AS_IT_IS = "restored:", "as it is:"


class OffloadedWeights:
    """The state dict of one save.

    Attributes:
        in_stock_layout: what shards are made of; on the meta device is what will be read.
    """

    def __init__(self, plan: SavePlan, state_dict: dict[str, torch.Tensor]) -> None:
        self.plan = plan
        self._fused = fused_modules(plan.model)
        self._units: dict[str, _Unit] = {}  # name of a part -> what it is a part of
        self._read: tuple[_Unit, dict[str, torch.Tensor]] | None = None
        self.in_stock_layout: dict[str, torch.Tensor] = {}
        for unit in self._units_of(state_dict):
            parts = unit.parts(plan, _on_meta(unit.tensors))
            if parts.keys() == unit.tensors.keys():
                self.in_stock_layout |= unit.tensors
                continue
            self._units |= dict.fromkeys(parts, unit)
            # Each by itself: shards are cut by the size of what a tensor is a view of.
            self.in_stock_layout |= {name: torch.empty_like(tensor) for name, tensor in parts.items()}
        record = plan.record
        if record is not None and any(item.path not in record.fused for item in record.replaced):
            self._sort(record)

    def read(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The values of a part.

        Args:
            read: reads a parameter of the model from the disk.
        """
        unit = self._units.get(name)
        if unit is None:
            return read(name)
        if self._read is None or self._read[0] is not unit:
            self._read = None  # before the next one is read
            tensors = {key: read(key) if each.is_meta else each for key, each in unit.tensors.items()}
            self._read = unit, unit.parts(self.plan, tensors)
        return self._read[1][name]

    def original(self, shard: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One shard as the checkpoint has it."""
        kinds: dict[str, dict[str, torch.Tensor]] = {"": {}, _RESTORED: {}, _AS_IT_IS: {}}
        for name, tensor in shard.items():
            kind = next(kind for kind in (_RESTORED, _AS_IT_IS, "") if name.startswith(kind))
            kinds[kind][name.removeprefix(kind)] = tensor
        return self.plan.named(TakenApart(*kinds.values()))

    def _units_of(self, state_dict: Mapping[str, torch.Tensor]) -> Iterator[_Unit]:
        """The tensors that are taken apart together, in the order of the state dict."""
        owners: dict[str, Hashable] = {}
        for trace in self.plan.conversions:
            if isinstance(trace, ConversionTrace):
                owners |= {name: id(entry) for entry in trace.entries for name in entry.produced}
        fused_paths = {path for path, *_ in self._fused}
        units: dict[Hashable, dict[str, torch.Tensor]] = {}
        for name, tensor in state_dict.items():
            outermost = [place for place in _above(name) if place in fused_paths][:1]
            key: Hashable = ("fused", *outermost) if outermost else owners.get(name, name)
            units.setdefault(key, {})[name] = tensor
        for tensors in units.values():
            first = next(iter(tensors))
            fused = [item for item in self._fused if first.startswith(inside(item[0]))]
            yield _Unit(tensors, fused)

    def _sort(self, record: PatchRecord) -> None:
        """Put the tensors into the order of the stock model: a replacement may have another one."""
        stock = skeleton(record.model_class, self.plan.model.config)
        own = state_tensors(stock)
        places = {name: place for place, name in enumerate(own)}
        rename = key_renamer(stock_conversions(stock), stock, own)
        last = 0
        order: dict[str, int] = {}
        for name in self.in_stock_layout:
            known = name if name in places else self._name_in_stock(name, rename)
            last = order[name] = places.get(known, last)
        self.in_stock_layout = {name: self.in_stock_layout[name] for name in sorted(order, key=order.__getitem__)}

    def _name_in_stock(self, name: str, rename: Callable[[str], tuple[str, Any, Any]]) -> str:
        meta = {name: self.in_stock_layout[name].to("meta")}
        try:
            (key, *_) = self.original(meta)
        except Exception:  # it can be reversed only together with others
            return name
        return rename(key)[0]


class _Unit:
    """Tensors of the model that are taken apart together."""

    def __init__(self, tensors: dict[str, torch.Tensor], fused: list[tuple[str, nn.Module, FusedWeights]]) -> None:
        self.tensors = tensors
        self._fused = fused

    def parts(self, plan: SavePlan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = plan.taken_apart(tensors, self._fused)
        kinds = {"": found.rest, _RESTORED: found.restored, _AS_IT_IS: found.as_they_are}
        return {kind + name: tensor for kind, each in kinds.items() for name, tensor in each.items()}


def _above(name: str) -> Iterator[str]:
    """The paths of the modules that a tensor is in, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts)))


def _on_meta(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to("meta") if type(tensor) in (torch.Tensor, nn.Parameter) else tensor
        for name, tensor in tensors.items()
    }
