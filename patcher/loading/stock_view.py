"""A patched model as transformers has it: by the names, shapes and values of its parameters there.

Whoever needs a name of transformers (device maps, optimizers, quantizers, state dicts, plans of processes) finds here
which parameter of the patched model holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import key_renamer, stock_conversions, stock_conversions_from_scratch, stock_revert
from patcher.compat.models import named_modules, state_tensors
from patcher.errors import InvalidPatcherError
from patcher.layouts.carried import Carrier, ModuleLayouts, carried_by, carriers
from patcher.layouts.conversion import target_names
from patcher.layouts.either_layout import carry
from patcher.layouts.layouts import Layout, Rows
from patcher.layouts.sharded import whole
from patcher.layouts.transforms import converts, select_conversions
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.router import route, stock_state
from patcher.loading.routes import Conversions, Route
from patcher.patterns import compress, in_state_dict, inside, without_numbers
from patcher.resolution.resolution import resolve_in_force, skeleton

if TYPE_CHECKING:
    from patcher.loading.load import Constructed


#: Parameter of the stock model -> those of the patched one that hold its values.
Parts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class StockView:
    """The parameters of transformers in a patched model.

    Attributes:
        own: the state dict of the patched model, with its own tensors.
        tensors: the state dict that transformers has, on the meta device.
        carrying: the modules whose parameters are others, and how.
    """

    own: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    carrying: tuple[Carrier, ...]

    @property
    def parts(self) -> Parts:
        """The parameters that only transformers has, and those of the patched model that hold their values."""
        return {
            name: tuple(layout.fused)
            for each in self.carrying
            for layout in each.all
            for name in layout.stock
            if name not in self.own
        }

    @torch.no_grad()
    def values(self, names: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """The values of some parameters of transformers, as the model has them now."""
        found = {name: whole(self.own[name].detach()) for name in names if name in self.own}
        for layout in (layout for each in self.carrying for layout in each.all):
            if not names.keys().isdisjoint(layout.stock) and self.own.keys() >= set(layout.fused):
                values = layout.separate([whole(self.own[name].detach()) for name in layout.fused])
                found |= {name: value for name, value in zip(layout.stock, values, strict=True) if name in names}
        return found


def stock_view(model: nn.Module) -> StockView:
    """A model as transformers has it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> view = stock_view(LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="qkv")))
    >>> name = "model.layers.0.self_attn.k_proj.weight"
    >>> name in view.own, view.tensors[name].shape, view.values({name: None})[name].shape
    (False, torch.Size([8, 8]), torch.Size([8, 8]))
    """
    return _view(model, carriers_in(model))


def _view(model: nn.Module, carrying: list[Carrier]) -> StockView:
    own = {in_state_dict(name): tensor for name, tensor in state_tensors(model).items()}
    on_meta = {name: torch.empty(tensor.shape, device="meta") for name, tensor in own.items()}
    tensors = stock_state(on_meta, (layout for each in carrying for layout in each.all))
    return StockView(own, tensors, tuple(carrying))


# --- what modules carry ----------------------------------------------------------------------------------------------


def carry_routes(model: PreTrainedModel, routes: Iterable[Route], replaced: Iterable[str]) -> None:
    """Have each replaced module carry how its weights were made; the model itself, where they are of several modules.

    Args:
        routes: those of conversions of patchers.
        replaced: the paths of the modules.
    """
    paths = sorted(replaced, key=len, reverse=True)
    by_module: dict[str, list[Layout]] = {}
    for layout in _carried_layouts(routes):
        own = (*layout.stock, *layout.fused)
        path = next((path for path in paths if all(name.startswith(inside(path)) for name in own)), "")
        by_module.setdefault(path, []).append(layout.named(methodcaller("removeprefix", inside(path))))
    for path, layouts in by_module.items():
        module = model.get_submodule(path)
        carry(module, replace(carried_by(module) or ModuleLayouts(), converted=tuple(layouts)))


def _carried_layouts(routes: Iterable[Route]) -> list[Layout]:
    """What conversions of patchers have made, by the names of transformers, to be carried by modules."""
    return [
        replace(each.layout, stock=each.stock)
        for each in routes
        if each.is_carried
        and each.layout is not None
        and (each.stock != each.parameters or type(each.layout) is not Rows)
    ]


def carriers_in(model: nn.Module) -> list[Carrier]:
    """The modules of a model whose parameters are others than in transformers, also of one that no load has made.

    Of such a model the conversions have run nowhere: they are found once somebody needs them.
    """
    for _, part in named_modules(model):
        record = record_of(part)
        if record is None or record.read or not isinstance(part, PreTrainedModel):
            continue
        if not any((found := carried_by(each)) and found.converted for _, each in named_modules(part)) and (
            record.fusion_transforms or record.added
        ):
            carry_routes(part, routes_from_scratch(part, record)[0], record.paths_of_replacements)
    return carriers(model)


def routes_from_scratch(
    model: PreTrainedModel, record: PatchRecord, stock: Callable[[], PreTrainedModel] | None = None
) -> tuple[tuple[Route, ...], tuple[WeightTransform, ...]]:
    """The conversions of a model that was made without a checkpoint: those that loading one would have run.

    The stock model says what its checkpoint looks like.

    Args:
        stock: gives the model as transformers has it, on the meta device.

    Returns:
        The routes of conversions of patchers, and the conversions of transformers that have had a part.
    """
    conversions = stock_conversions_from_scratch(model)
    fusions = record.fusion_transforms
    if record.fused and record.is_part:  # its names are others than those of the whole
        fusions = resolve_in_force(record.in_force, record.model_class, model.config).fusion_plan.transforms
    selected = select_conversions(conversions, record.patchers, fusions, record.replacements())
    if record.is_part and not record.modules:  # what the patcher's conversions are for lies elsewhere
        selected = replace(selected, added=())
    if not selected.added and len(selected.kept) == len(conversions):
        return (), selected.kept
    stock_model = stock() if stock is not None else skeleton(record.model_class, model.config)
    checkpoint = stock_revert(stock_model, dict(stock_model.state_dict()))
    routing = route(
        model, checkpoint, Conversions(selected.kept, selected.added, replaced=record.paths_of_replacements)
    )
    return tuple(each for each in routing.routes if each.is_carried), tuple(routing.used)


# --- names that are parts of others ----------------------------------------------------------------------------------


def parts_of(load: Constructed) -> Parts:
    """The parameters of the stock model that are parts of others in the model of a load."""
    carrying = carriers(load.model)
    if not any(converts(entry.patcher) for entry in load.in_force):
        return _view(load.model, carrying).parts
    converted = tuple(_carried_layouts(routes_from_scratch(load.model, load.record)[0]))
    carrying.append(Carrier("", load.model, ModuleLayouts(converted=converted)))
    rename = key_renamer(stock_conversions(load.model))
    view, found = _view(load.model, carrying), dict[str, tuple[str, ...]]()
    for name, made in [*((name, (name,)) for name in view.own), *view.parts.items()]:
        renamed, taker, _ = rename(name)
        if isinstance(taker, WeightConverter):  # a tensor of a checkpoint, which transformers stacks with others
            found |= {part: (*found.get(part, ()), *made) for part in target_names(taker, renamed)}
        elif name not in view.own:
            found[name] = made
    return {name: made for name, made in found.items() if name not in view.own}


def layer_name(name: str) -> str:
    """The module that holds a parameter."""
    return name.rpartition(".")[0]


def check_no_part_named(what: str, named: Iterable[str], parts: Parts) -> None:
    """Raise for parts that something names.

    Args:
        what: the argument that names them.
        named: these parts.
    """
    named = sorted(named)
    if not named:
        return
    alike: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    for name in named:
        part, joined = layer_name(name), tuple(dict.fromkeys(map(layer_name, parts[name])))
        alike.setdefault(tuple(map(without_numbers, (part, *joined))), {})[part] = joined
    listed = ""
    for found in alike.values():
        names = ", ".join(compress(list(found)))
        listed += f"  {names}: part of {', '.join(compress([each for joined in found.values() for each in joined]))}\n"
    raise InvalidPatcherError(
        f"{what} names layers that are parts of others in the patched model:\n{listed}"
        "Name those instead, or leave these modules out of the patcher."
    )
