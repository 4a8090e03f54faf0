"""The names that tools of torch give the parameters of a patched model, and those of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from patcher.compat.models import named_parameters
from patcher.errors import InvalidPatcherError
from patcher.layouts.layouts import Layout
from patcher.loading.state_dicts import patched_models
from patcher.loading.stock_view import carriers_in
from patcher.patterns import inside
from patcher.resolution.resolution import skeleton

#: What `torch.compile` and activation checkpointing call the module that they are around.
_AROUND = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Names:
    """The parameters of a model by their names in it, without those of wrappers around its modules.

    Attributes:
        own: id of a parameter -> its name, the first of several.
        first: each name -> the first of the same parameter.
        made: how those are made that are made of others, by these names.
        unexplained: those that transformers doesn't have, and that no conversion explains.
        order: the names of transformers -> their places among its parameters.
    """

    own: Mapping[int, str]
    first: Mapping[str, str]
    made: tuple[Layout, ...]
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
        by_module: dict[int, tuple[str, list[Layout]]] = {}
        for path, module, carried in carriers_in(model):
            prefix = inside(_bare(model, path))
            layouts = [layout.named(prefix.__add__) for layout in carried.all]
            by_module.setdefault(id(module), (prefix, layouts))  # of a module at several paths the first
        made = tuple(layout for _, layouts in by_module.values() for layout in layouts)
        originals = first.keys() - {name for layout in made for name in layout.fused}
        originals |= {name for layout in made for name in layout.stock}
        unexplained: dict[str, list[str]] = {}
        order: dict[str, int] = {}
        for path, part, record in patched:
            prefix = inside(_bare(model, path))
            skeletons = named_parameters(skeleton(record.model_class, part.config))
            stock = {f"{prefix}{name}": None for name, _ in skeletons}
            order |= {name: len(order) + place for place, name in enumerate(stock)}
            absent = stock.keys() - originals
            strange = originals - stock.keys() - {f"{prefix}{name}" for name in record.new_weights}
            for owner in (f"{prefix}{inside(item.path)}" for item in record.modules):
                if left := [name for name in absent if name.startswith(owner)]:
                    unexplained |= {name: sorted(left) for name in strange if name.startswith(owner)}
        return cls(own, first, made, unexplained, order)

    def made_with(self, names: Iterable[str]) -> list[Layout]:
        """The layouts that have made some of these parameters."""
        requested = set(names)
        return [layout for layout in self.made if not requested.isdisjoint(layout.fused)]


def _bare(model: nn.Module, name: str) -> str:
    """The name of a parameter or module without those of wrappers, as `torch.distributed.checkpoint` has it."""
    at: nn.Module | None = model
    kept = []
    for segment in name.split(".") if name else ():
        if segment not in _AROUND and not isinstance(at, DistributedDataParallel):
            kept.append(segment)
        at = at._modules.get(segment) if at is not None else None
    return ".".join(kept)
