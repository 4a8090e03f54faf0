"""The names that tools of torch give the parameters of a patched model, and those of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from patcher.compat.models import named_parameters
from patcher.errors import InvalidPatcherError
from patcher.layouts.layouts import Layout, Rows
from patcher.loading.record import PatchRecord
from patcher.loading.state_dicts import patched_models
from patcher.loading.stock_view import carriers_in
from patcher.patterns import inside
from patcher.resolution.resolution import skeleton

#: What `torch.compile` and activation checkpointing call the module that they are around.
_AROUND = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Unit:
    """Parameters of a model that are made of original ones together.

    Attributes:
        layout: how.
        fused: the parameters of the model.
        stock: those of transformers.
    """

    layout: Layout
    fused: tuple[str, ...]
    stock: tuple[str, ...]

    @property
    def is_renaming(self) -> bool:
        """Whether it is one parameter in the same shape, whatever its optimizer does."""
        return type(self.layout) is Rows and len(self.stock) == 1


@dataclass(frozen=True)
class Names:
    """The parameters of a model by their names in it, without those of wrappers around its modules.

    Attributes:
        own: id of a parameter -> its name, the first of several.
        first: each name -> the first of the same parameter.
        units: those that are made of others.
        unexplained: those that transformers hasn't, and stand for others of which no conversion tells.
        order: the names of transformers -> their places among its parameters.
    """

    own: Mapping[int, str]
    first: Mapping[str, str]
    units: tuple[Unit, ...]
    unexplained: Mapping[str, list[str]]
    order: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        """The names in a model.

        Raises:
            InvalidPatcherError: its parameters are flattened.
        """
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise InvalidPatcherError(
                "FullyShardedDataParallel makes flat pieces of parameters, of which the state of an original can't "
                "be told. Use torch.distributed.fsdp.fully_shard in its place."
            )
        own: dict[int, str] = {}
        first: dict[str, str] = {}
        for path, parameter in named_parameters(model):
            name = _bare(model, path)
            first[name] = own.setdefault(id(parameter), name)
        patched = list(patched_models(model))
        units: dict[int, tuple[str, list[Unit]]] = {}
        for path, module, carried in carriers_in(model):
            prefix = inside(_bare(model, path))
            found = [
                Unit(layout, *(tuple(f"{prefix}{name}" for name in side) for side in (layout.fused, layout.stock)))
                for layout in carried.all
            ]
            units.setdefault(id(module), (prefix, found))  # of a module at several paths the first
        every = tuple(unit for _, found in units.values() for unit in found)
        originals = first.keys() - {name for unit in every for name in unit.fused}
        originals |= {name for unit in every for name in unit.stock}
        unexplained: dict[str, list[str]] = {}
        order: dict[str, int] = {}
        for path, part, record in patched:
            prefix = inside(_bare(model, path))
            skeletons = named_parameters(skeleton(record.model_class, part.config))
            stock = {f"{prefix}{name}": None for name, _ in skeletons}
            order |= {name: len(order) + place for place, name in enumerate(stock)}
            absent = stock.keys() - originals
            strange = originals - stock.keys() - {f"{prefix}{name}" for name in record.new_weights}
            for owner in _made_elsewhere(record, prefix, (prefix for prefix, _ in units.values())) if absent else ():
                if left := [name for name in absent if name.startswith(owner)]:
                    unexplained |= {name: sorted(left) for name in strange if name.startswith(owner)}
        return cls(own, first, every, unexplained, order)

    def units_with(self, names: Iterable[str]) -> list[Unit]:
        """The units that have some of these parameters."""
        asked = set(names)
        return [unit for unit in self.units if not asked.isdisjoint(unit.fused)]


def _made_elsewhere(record: PatchRecord, prefix: str, converted: Iterable[str]) -> Iterator[str]:
    """Prefixes of the modules whose parameters may be tensors of a checkpoint, not parameters of transformers.

    So it is where a conversion of the patcher comes before one of transformers, or where that is left out.
    """
    yield from converted
    if any(patcher.filtered_weight_conversion_patterns for patcher in record.patchers):
        yield from (f"{prefix}{inside(item.path)}" for item in record.modules)


def _bare(model: nn.Module, name: str) -> str:
    """The name of a parameter or module without those of wrappers, as `torch.distributed.checkpoint` has it."""
    at: nn.Module | None = model
    kept = []
    for segment in name.split(".") if name else ():
        if segment not in _AROUND and not isinstance(at, DistributedDataParallel):
            kept.append(segment)
        at = at._modules.get(segment) if at is not None else None
    return ".".join(kept)
