"""A patched model as transformers has it: the names, shapes and values of its stock parameters, and its state dicts.

Device maps, optimizers, quantizers and parallel plans take names of transformers, and look up here which parameters of
the patched model hold their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import (
    copy_transform,
    key_renamer,
    stock_conversions,
    stock_conversions_from_scratch,
    stock_revert,
)
from patcher.compat.models import ModelView, named_modules, named_parameters, state_tensors, ties
from patcher.errors import InvalidPatcherError
from patcher.layouts.carried import (
    Carrier,
    ModuleLayouts,
    carried_by,
    carriers,
    carry,
    fused_modules,
    in_original_layout,
    is_in_original_layout,
    separated,
)
from patcher.layouts.conversion import target_names
from patcher.layouts.layouts import Layout, Rows, lies_in_blocks
from patcher.layouts.sharded import (
    check_module,
    check_not_flat,
    distribute_like,
    full_tensor,
    local_tensor,
    reshard_modules,
)
from patcher.layouts.transforms import converts, select_conversions
from patcher.loading.experts import quantized_experts
from patcher.loading.record import PatchRecord, patched_models, record_of
from patcher.loading.router import Router, stock_parameters, stock_state
from patcher.loading.routes import Route
from patcher.patterns import compress, in_state_dict, inside, is_number, unwrapped, without_numbers
from patcher.resolution.resolution import patched_skeleton, resolve_constructed, skeleton
from patcher.spec.patcher import Patcher

if TYPE_CHECKING:
    from patcher.loading.load import Constructed


#: Parameter of the stock model -> those of the patched one that hold its values.
Parts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class StockView:
    """The stock parameters of a patched model."""

    #: the tensors of the patched model by their names in its state dict
    state: dict[str, torch.Tensor]
    #: the state dict of the stock model, on the meta device
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


def stock_view(model: nn.Module, carrying: list[Carrier] | None = None) -> StockView:
    """Return a model as transformers has it, by the layouts that its modules carry.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from patcher import Patcher
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> view = stock_view(LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="qkv")))
    >>> name = "model.layers.0.self_attn.k_proj.weight"
    >>> name in view.state, view.tensors[name].shape, view.values({name: None})[name].shape
    (False, torch.Size([8, 8]), torch.Size([8, 8]))
    """
    carrying = carriers_in(model) if carrying is None else carrying
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
        built = patched_skeleton(record.model_class, model.config, record.in_force)
        fusions = resolve_constructed(record.in_force, *built).transforms
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
        return stock_view(load.model, carrying).parts
    converted = tuple(_carried_layouts(routes_from_scratch(load.model, load.record)[0]))
    carrying.append(Carrier("", load.model, ModuleLayouts(converted=converted)))
    rename = key_renamer(stock_conversions(load.model))
    view, parts = stock_view(load.model, carrying), dict[str, tuple[str, ...]]()
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
        wholes = compress([name for joined in layers.values() for name in joined])
        listed += f"  {', '.join(compress(list(layers)))}: part of {', '.join(wholes)}\n"
    raise InvalidPatcherError(
        f"{what} names layers that are parts of others in the patched model:\n{listed}"
        "Name those instead, or leave these modules out of the patcher."
    )


# --- state dicts -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def original_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict that a patched model would have in transformers: its names, in its order.

    ```python
    import torch
    from transformers import AutoModelForCausalLM
    from patcher import Patcher, load_original_state_dict, original_state_dict

    repo = "HuggingFaceTB/SmolLM2-135M-Instruct"
    stock = AutoModelForCausalLM.from_pretrained(repo)
    model = AutoModelForCausalLM.from_pretrained(repo, patcher=Patcher(fusions="qkv"))
    stock.load_state_dict(original_state_dict(model))   # all keys match
    load_original_state_dict(model, stock.state_dict())  # and back
    ```

    Tensors share the memory of the model where they can, as in `model.state_dict()`. Weights that are offloaded, or
    sharded over processes, are gathered; for the latter, each process has to call this.
    Parameters that the patcher has added come last. For files use `save_pretrained`.

    Args:
        model: any module, also one around a patched model, as `DistributedDataParallel` is, or a layer of one.

    Raises:
        PatchedWeightsError: some of it can't be restored.
    """
    check_module(model)
    state_dict: dict[str, torch.Tensor] = model.state_dict()
    if any(value.is_meta for value in state_dict.values()):
        state_dict = {**state_dict, **get_state_dict_offloaded_model(model)}
    gathered = {key: full_tensor(value) for key, value in state_dict.items()}
    result, _ = separated(carriers_in(model), gathered)
    for path, part, record in patched_models(model):
        prefix = inside(in_state_dict(path))
        inner = {key.removeprefix(prefix): value for key, value in result.items() if key.startswith(prefix)}
        result = {key: value for key, value in result.items() if not key.startswith(prefix)}
        result |= {f"{prefix}{key}": value for key, value in _as_in_transformers(part, record, inner).items()}
    return result


def load_original_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Load a state dict in the layout of transformers into a patched model: the inverse of `original_state_dict`.

    ```python
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from patcher import Patcher, load_original_state_dict

    repo = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_pretrained(repo, patcher=Patcher(fusions="qkv"))
    model.save_pretrained("out")
    load_original_state_dict(model, load_file("out/model.safetensors"))
    ```

    `model.load_state_dict` takes that layout too. This is for tools that compare the names of the model first, as
    `torch.distributed.checkpoint` does, and for conversions that don't change the name and shape of a tensor. It also
    takes the names of a checkpoint, and none for tied weights. For a model that is sharded over processes each has to
    call this, with whole tensors or with DTensors; whole tensors are taken from the first process.

    Args:
        model: any module, also one around a patched model, or a layer of one.
        strict: as in `torch.nn.Module.load_state_dict`.
        assign: as in `torch.nn.Module.load_state_dict`.

    Returns:
        What `torch.nn.Module.load_state_dict` does: the `missing_keys`, in the layout of transformers, and the
        `unexpected_keys`.

    Raises:
        InvalidPatcherError: weights are on the disk, so they can't be written to in place.
        RuntimeError: as `torch.nn.Module.load_state_dict`: keys are missing or unexpected, shapes differ.
    """
    check_module(model)
    tensors = dict(state_dict)
    tied = []
    for path, part in named_modules(model):
        if isinstance(part, PreTrainedModel):
            prefix = inside(in_state_dict(path))
            for name, source in ties(part).items():
                if f"{prefix}{name}" not in tensors and f"{prefix}{source}" in tensors:
                    tensors[f"{prefix}{name}"] = tensors[f"{prefix}{source}"]
                    tied.append(part)
    reshard_modules(model)
    state = {in_state_dict(name): value for name, value in state_tensors(model).items()}
    for name, value in () if assign else state.items():
        check_in_memory(name, value, model)
    for carrier in carriers(model):  # rows in blocks are joined from their parts only
        for layout in filter(lies_in_blocks, carrier.fused):
            state.pop(layout.fused[0])
    tensors = {name: distribute_like(value, state.get(name)) for name, value in tensors.items()}
    with in_original_layout():
        result = model.load_state_dict(tensors, strict=strict, assign=assign)
    for part in tied if assign else ():
        part.tie_weights()
    return result


def model_of_transformers(model: nn.Module) -> PreTrainedModel:
    """Return the one model of transformers that a module is, or contains."""
    check_not_flat(model)
    models: dict[str, PreTrainedModel] = {}
    for path, part in named_modules(model):
        if isinstance(part, PreTrainedModel) and not any(path.startswith(inside(outer)) for outer in models):
            models[path] = part
    if len(models) != 1:
        raise InvalidPatcherError(
            f"Weights are those of one model of transformers, and {type(model).__qualname__} contains "
            f"{', '.join(models) or 'none'}. Pass the model itself."
        )
    return next(iter(models.values()))


def check_in_memory(name: str, tensor: torch.Tensor, model: nn.Module) -> None:
    """Raise for a tensor whose values are elsewhere: a write would be lost."""
    if local_tensor(tensor).is_meta:
        raise not_written(name, model, "is on the disk, or nowhere yet")


def not_written(name: str, model: nn.Module, reason: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f"{name} of {type(model).__name__} {reason}, so nothing can be written into it in place. Load the weights "
        "anew with from_pretrained, in full precision and in memory."
    )


def stock_parameter_names(model: nn.Module) -> list[str]:
    """Return the parameter names that patched models have in stock, in order."""
    return [
        f"{inside(path)}{name}"
        for path, part, record in patched_models(model)
        for name, _ in named_parameters(skeleton(record.model_class, part.config))
    ]


def _as_in_transformers(
    model: PreTrainedModel, record: PatchRecord, state_dict: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the state dict of a patched model with the names and the order of the stock model."""
    stock = {key: value.to("meta") for key, value in skeleton(record.model_class, model.config).state_dict().items()}
    if others := {name: value for name, value in state_dict.items() if name not in stock}:
        # Tensors of a checkpoint that a patcher's conversion takes may have a stock conversion as well.
        converted, taken, _ = converted_to_parameters(model, others, stock)
        state_dict = {name: value for name, value in state_dict.items() if name not in taken} | converted
    places = {name: place for place, name in enumerate(stock)}
    names = sorted(state_dict, key=lambda name: places.get(unwrapped(name), len(places)))
    return {name: state_dict[name] for name in names}


# --- keys of a checkpoint in a state dict ----------------------------------------------------------------------------


def convert_checkpoint_keys(
    model: PreTrainedModel, state_dict: dict[str, Any], prefix: str, missing_keys: list[str], error_msgs: list[str]
) -> None:
    """Replace tensors of a checkpoint in a state dict by the stock parameters that they are converted to.

    Tools save a model with `save_pretrained` and read that with `load_state_dict`, which runs no conversions of
    transformers. Parameters of which the state dict has only some tensors keep the other values.
    """
    keys = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    reshard_modules(model)
    view = stock_view(model)
    state, stock = view.state, view.tensors
    if state.keys() >= keys.keys():
        return
    for name, (target, _) in quantized_experts(model, keys, fused_modules(model), state).items():
        if name != target and target not in keys:
            state_dict[f"{prefix}{target}"] = state_dict.pop(keys.pop(name))
    known = stock.keys() | state.keys()
    unknown = {name: state_dict[key] for name, key in keys.items() if name not in known}
    tensors = {name: full_tensor(value) for name, value in unknown.items()}
    if not tensors or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        return
    record = record_of(model)
    patchers = record.patchers if record is not None else ()
    converted, taken, absent = converted_to_parameters(model, tensors, stock, patchers, view.values)
    if twice := sorted(f"{prefix}{name}" for name in converted if f"{prefix}{name}" in state_dict):
        error_msgs.append(
            f"The state dict has {twice[0]}, and tensors of a checkpoint that make it, under names as "
            f"{prefix}{taken[0]}: which is meant can't be known. Take one of them out."
        )
        return
    missing_keys += [f"{prefix}{key}" for key in absent]
    rest = {name: value for name, value in tensors.items() if name not in taken}
    checkpoint = _reverted(model, rest, patchers) if rest else {}
    if checkpoint and checkpoint.keys() <= known:
        converted |= checkpoint
        taken += rest
    for name in taken:
        del state_dict[keys[name]]
    if is_in_original_layout() or any(isinstance(value, DTensor) for value in unknown.values()):
        converted = {name: distribute_like(tensor, state.get(name)) for name, tensor in converted.items()}
    state_dict.update({f"{prefix}{name}": tensor for name, tensor in converted.items()})


def _reverted(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], patchers: Iterable[Patcher]
) -> dict[str, torch.Tensor]:
    """Reverse the stock conversions that the patcher's replace: their modules take tensors of the checkpoint."""
    selected = select_conversions(stock_conversions_from_scratch(model), patchers)
    # A filter has dropped them, or a replacement takes tensors of the checkpoint before them.
    replaced = [*(item for item, _ in selected.dropped), *(c for c in selected.kept if isinstance(c, WeightConverter))]
    view: Any = ModelView(model, get_parameter=tensors.__getitem__)
    try:
        return stock_revert(view, dict(tensors), list(map(copy_transform, replaced)))
    except (RuntimeError, IndexError, ValueError):  # of other shapes: torch reports that the parameters are missing
        return {}


@torch.no_grad()
def converted_to_parameters(
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    stock: dict[str, torch.Tensor],
    patchers: Iterable[Patcher] = (),
    values: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]] | None = None,
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """Convert tensors of a checkpoint to stock parameters; return these, the keys that were taken, and absent keys.

    Current values of stock parameters fill in for absent tensors; without them, incomplete tensors aren't converted.
    """
    view: Any = ModelView(model, get_parameter=stock.__getitem__, state_dict=lambda: stock)
    conversions = select_conversions(stock_conversions(model), patchers).kept
    rename = key_renamer(conversions)
    parameters: dict[str, torch.Tensor] = {}
    targets: dict[str, list[str]] = {}
    for key in tensors:
        renamed, converter, _ = rename(key)
        names = target_names(converter, renamed) if isinstance(converter, WeightConverter) else [renamed]
        if all(name in stock for name in names):
            parameters |= {name: stock[name] for name in names}
            targets[key] = names
    taken = list(targets)
    reverse = select_conversions(stock_conversions_from_scratch(model), patchers).kept
    expected = stock_revert(view, dict(parameters), [copy_transform(item) for item in reverse])
    checkpoint, absent = {key: tensors[key] for key in taken}, [key for key in expected if key not in tensors]
    if not expected.keys() >= set(taken):  # names of an older release: absent keys can't be known
        absent = []
    elif absent and values is None:
        return {}, [], []
    elif absent and values is not None:
        current = values(parameters)
        if lacking := parameters.keys() - current.keys():  # of layers that were replaced
            rest = {key: value for key, value in tensors.items() if lacking.isdisjoint(targets.get(key, ()))}
            return converted_to_parameters(model, rest, stock, patchers, values)
        complete = stock_revert(view, current, [copy_transform(item) for item in reverse])
        checkpoint |= {key: complete[key] for key in absent}
    converted = stock_parameters(model, stock, parameters.keys(), conversions, checkpoint)
    return ({}, [], []) if converted is None else (converted, taken, absent)


# --- adapters that are loaded into a patched model, by names of today or of old checkpoints --------------------------


def without_stacking(model: nn.Module, conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """Drop the conversions of transformers that stack layers which the patched model has one by one."""
    conversions = list(conversions)
    if record_of(model) is None or not any(isinstance(item, WeightConverter) for item in conversions):
        return conversions
    examples = {without_numbers(name): name for name in _parameter_names(model)}
    return [item for item in conversions if not any(_stacks(item, name) for name in examples.values())]


def unstacked_layers(model: nn.Module) -> set[str]:
    """Return the layers of a patched model that stock has as stacks in one parameter: those of experts."""
    names = {
        f"{inside(path)}{name}"
        for path, _, carried in carriers(model)
        for layout in carried.all
        if not any("." in name for name in layout.stock)
        for name in layout.fused
        if "." in name
    }
    for path, part, _ in patched_models(model):
        conversions = stock_conversions(part)
        groups: dict[str, list[str]] = {}
        for name in _parameter_names(part):
            groups.setdefault(without_numbers(name), []).append(name)
        for group in groups.values():
            if any(_stacks(item, group[0]) for item in conversions):
                names.update(f"{inside(path)}{name}" for name in group)
    layers = (name.rpartition(".")[0] for name in names)
    return {layer for layer in layers if is_number(layer.rpartition(".")[0].rpartition(".")[2])}


def _parameter_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of a model without its adapters."""
    return {name.replace(".base_layer.", ".") for name, _ in named_parameters(model)}


def _stacks(transform: WeightTransform, name: str) -> bool:
    """Whether a conversion takes a parameter; tried on a copy, since a match is noted on the conversion."""
    return isinstance(transform, WeightConverter) and copy_transform(transform).rename_source_key(name)[1] is not None
