"""A patched model as transformers has it: the names, shapes and values of its stock parameters.

Device maps, optimizers, quantizers, state dicts and parallel plans take names of transformers, and look up here which
parameters of the patched model hold their values.
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
from patcher.layouts.sharded import full_tensor
from patcher.layouts.transforms import converts, select_conversions
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.router import Router, stock_state
from patcher.loading.routes import Route
from patcher.patterns import compress, in_state_dict, inside, without_numbers
from patcher.resolution.resolution import resolve_in_force, skeleton

if TYPE_CHECKING:
    from patcher.loading.load import Constructed


#: Parameter of the stock model -> those of the patched one that hold its values.
Parts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class StockView:
    """The stock parameters of a patched model.

    Attributes:
        state: the tensors of the patched model by their names in its state dict.
        tensors: the state dict of the stock model, on the meta device.
        carrying: the modules that carry layouts.
    """

    state: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    carrying: tuple[Carrier, ...]

    @property
    def parts(self) -> Parts:
        """The parameters that only the stock model has, and those of the patched one that hold their values."""
        return {
            name: tuple(layout.fused)
            for carrier in self.carrying
            for layout in carrier.all
            for name in layout.stock
            if name not in self.state
        }

    @torch.no_grad()
    def values(self, names: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """Return the current values of some stock parameters."""
        values = {name: full_tensor(self.state[name].detach()) for name in names if name in self.state}
        for layout in (layout for carrier in self.carrying for layout in carrier.all):
            if not names.keys().isdisjoint(layout.stock) and self.state.keys() >= set(layout.fused):
                parts = layout.separate([full_tensor(self.state[name].detach()) for name in layout.fused])
                values |= {name: part for name, part in zip(layout.stock, parts, strict=True) if name in names}
        return values


def stock_view(model: nn.Module) -> StockView:
    """Return a model as transformers has it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> view = stock_view(LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="qkv")))
    >>> name = "model.layers.0.self_attn.k_proj.weight"
    >>> name in view.state, view.tensors[name].shape, view.values({name: None})[name].shape
    (False, torch.Size([8, 8]), torch.Size([8, 8]))
    """
    return _view(model, carriers_in(model))


def _view(model: nn.Module, carrying: list[Carrier]) -> StockView:
    state = {in_state_dict(name): tensor for name, tensor in state_tensors(model).items()}
    on_meta = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
    tensors = stock_state(on_meta, (layout for carrier in carrying for layout in carrier.all))
    return StockView(state, tensors, tuple(carrying))


# --- what modules carry ----------------------------------------------------------------------------------------------


def carry_routes(model: PreTrainedModel, routes: Iterable[Route], replaced: Iterable[str]) -> None:
    """Have each replaced module carry the layouts of its weights; the model itself, those across several modules."""
    paths = sorted(replaced, key=len, reverse=True)
    by_module: dict[str, list[Layout]] = {}
    for layout in _carried_layouts(routes):
        names = (*layout.stock, *layout.fused)
        path = next((path for path in paths if all(name.startswith(inside(path)) for name in names)), "")
        by_module.setdefault(path, []).append(layout.named(methodcaller("removeprefix", inside(path))))
    for path, layouts in by_module.items():
        module = model.get_submodule(path)
        carry(module, replace(carried_by(module) or ModuleLayouts(), converted=tuple(layouts)))


def _carried_layouts(routes: Iterable[Route]) -> list[Layout]:
    """Return the layouts of routes that modules carry, by the names of transformers."""
    return [
        replace(route.layout, stock=route.stock)
        for route in routes
        if route.is_carried
        and route.layout is not None
        and (route.stock != route.parameters or type(route.layout) is not Rows)
    ]


def carriers_in(model: nn.Module) -> list[Carrier]:
    """Return the modules of a model that carry layouts; without a checkpoint, these are found when first needed."""
    for _, part in named_modules(model):
        record = record_of(part)
        if record is None or record.read or not isinstance(part, PreTrainedModel):
            continue
        is_known = any((carried := carried_by(module)) and carried.converted for _, module in named_modules(part))
        if not is_known and (record.fusion_transforms or record.added):
            carry_routes(part, routes_from_scratch(part, record)[0], record.paths_of_replacements)
    return carriers(model)


def routes_from_scratch(
    model: PreTrainedModel, record: PatchRecord, stock: Callable[[], PreTrainedModel] | None = None
) -> tuple[tuple[Route, ...], tuple[WeightTransform, ...]]:
    """Return the carried routes and the used stock conversions for loading a checkpoint of the stock model."""
    conversions = stock_conversions_from_scratch(model)
    fusions = record.fusion_transforms
    if record.fused and record.is_part:  # its names differ from those in the whole model
        fusions = resolve_in_force(record.in_force, record.model_class, model.config).fusion_plan.transforms
    selected = select_conversions(conversions, record.patchers, fusions, record.replacements())
    if record.is_part and not record.modules:  # the patcher's conversions are for modules elsewhere
        selected = replace(selected, added=())
    if not selected.added and len(selected.kept) == len(conversions):
        return (), selected.kept
    stock_model = stock() if stock is not None else skeleton(record.model_class, model.config)
    checkpoint = stock_revert(stock_model, dict(stock_model.state_dict()))
    router = Router(model, checkpoint, selected.kept, selected.added, replaced=record.paths_of_replacements)
    routing = router.run()
    return tuple(item for item in routing.routes if item.is_carried), tuple(routing.used)


# --- names that are parts of others ----------------------------------------------------------------------------------


def parts_of(load: Constructed) -> Parts:
    """Return the stock parameters that are parts of others in the model of a load."""
    carrying = carriers(load.model)
    if not any(converts(entry.patcher) for entry in load.in_force):
        return _view(load.model, carrying).parts
    converted = tuple(_carried_layouts(routes_from_scratch(load.model, load.record)[0]))
    carrying.append(Carrier("", load.model, ModuleLayouts(converted=converted)))
    rename = key_renamer(stock_conversions(load.model))
    view, parts = _view(load.model, carrying), dict[str, tuple[str, ...]]()
    for name, joined in [*((name, (name,)) for name in view.state), *view.parts.items()]:
        renamed, converter, _ = rename(name)
        if isinstance(converter, WeightConverter):  # a tensor of a checkpoint, which transformers stacks with others
            parts |= {part: (*parts.get(part, ()), *joined) for part in target_names(converter, renamed)}
        elif name not in view.state:
            parts[name] = joined
    return {name: joined for name, joined in parts.items() if name not in view.state}


def layer_name(name: str) -> str:
    """Return the path of the module that holds a parameter."""
    return name.rpartition(".")[0]


def check_no_part_named(what: str, named: Iterable[str], parts: Parts) -> None:
    """Raise if an argument names parts of other parameters."""
    named = sorted(named)
    if not named:
        return
    by_pattern: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    for name in named:
        part, joined = layer_name(name), tuple(dict.fromkeys(map(layer_name, parts[name])))
        by_pattern.setdefault(tuple(map(without_numbers, (part, *joined))), {})[part] = joined
    listed = ""
    for layers in by_pattern.values():
        names = ", ".join(compress(list(layers)))
        listed += (
            f"  {names}: part of {', '.join(compress([name for joined in layers.values() for name in joined]))}\n"
        )
    raise InvalidPatcherError(
        f"{what} names layers that are parts of others in the patched model:\n{listed}"
        "Name those instead, or leave these modules out of the patcher."
    )
