"""State dicts in the layout of transformers: of a patched model, and into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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
from patcher.layouts.carried import carriers, fused_modules, separated
from patcher.layouts.conversion import target_names
from patcher.layouts.either_layout import in_original_layout, is_in_original_layout
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.sharded import distribute_like, reshard_modules, whole
from patcher.layouts.transforms import select_conversions
from patcher.loading.experts import quantized_experts
from patcher.loading.record import PatchRecord, record_of
from patcher.loading.router import stock_parameters
from patcher.loading.stock_view import carriers_in, stock_view
from patcher.patterns import in_state_dict, inside, is_number, without_numbers
from patcher.resolution.resolution import skeleton
from patcher.spec.patcher import Patcher


@torch.no_grad()
def original_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that a patched model would have in transformers: its names, in its order.

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
    sharded over processes, are gathered: of the latter each process has to call this.
    What the patcher has added comes last. For files there is `save_pretrained`.

    Args:
        model: any module, also one around a patched model, as `DistributedDataParallel` is, or a layer of one.

    Raises:
        PatchedWeightsError: something in it can't be restored.
    """
    result, _ = separated(carriers_in(model), _gathered(model))
    for path, part, record in patched_models(model):
        prefix = inside(in_state_dict(path))
        own = {key.removeprefix(prefix): value for key, value in result.items() if key.startswith(prefix)}
        result = {key: value for key, value in result.items() if not key.startswith(prefix)}
        result |= {f"{prefix}{key}": value for key, value in _as_in_transformers(part, record, own).items()}
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

    `model.load_state_dict` takes that layout too. This is for tools that look at the names of the model first, as
    `torch.distributed.checkpoint` does, and for conversions after which a tensor has the name and shape that it had
    before. It takes the names of a checkpoint as well, and none for weights that are tied. Of a model that is sharded
    over processes each has to call this, with whole tensors or with DTensors; what is whole is taken from the first.

    Args:
        model: any module, also one around a patched model, or a layer of one.
        strict: as in `torch.nn.Module.load_state_dict`.
        assign: as in `torch.nn.Module.load_state_dict`.

    Returns:
        What `torch.nn.Module.load_state_dict` does: the `missing_keys`, in the layout of transformers, and the
        `unexpected_keys`.

    Raises:
        RuntimeError: as `torch.nn.Module.load_state_dict`: keys are missing or unexpected, shapes differ.
    """
    given = dict(state_dict)
    filled = []
    for path, part in named_modules(model):
        if isinstance(part, PreTrainedModel):
            prefix = inside(in_state_dict(path))
            for name, source in ties(part).items():
                if f"{prefix}{name}" not in given and f"{prefix}{source}" in given:
                    given[f"{prefix}{name}"] = given[f"{prefix}{source}"]
                    filled.append(part)
    reshard_modules(model)
    own = {in_state_dict(name): value for name, value in state_tensors(model).items()}
    for each in carriers(model):  # what lies in blocks is made of its parts alone
        for layout in filter(lies_in_blocks, each.fused):
            own.pop(layout.fused[0])
    given = {name: distribute_like(value, own.get(name)) for name, value in given.items()}
    with in_original_layout():
        result = model.load_state_dict(given, strict=strict, assign=assign)
    for part in filled if assign else ():
        part.tie_weights()
    return result


def patched_models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel, PatchRecord]]:
    """(path, model, record) of each patched model, but for those inside of others."""
    around: list[str] = []
    for path, part in named_modules(model):
        record = record_of(part)
        if record is not None and isinstance(part, PreTrainedModel) and not path.startswith(tuple(around)):
            around.append(inside(path))
            yield path, part, record


def _gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model, with what is offloaded or sharded."""
    state_dict: dict[str, torch.Tensor] = model.state_dict()
    if any(value.is_meta for value in state_dict.values()):
        state_dict = {**state_dict, **get_state_dict_offloaded_model(model)}
    return {key: whole(value) for key, value in state_dict.items()}


def _as_in_transformers(
    model: PreTrainedModel, record: PatchRecord, state_dict: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state dict of a patched model with the names of parameters of transformers, in their order."""
    stock = {key: value.to("meta") for key, value in skeleton(record.model_class, model.config).state_dict().items()}
    own = {name for name in state_dict if name not in stock}
    if own:
        # What a conversion of the patcher takes from a checkpoint, one of transformers may take otherwise.
        made, taken, _ = converted_to_parameters(model, {name: state_dict[name] for name in own}, stock)
        state_dict = {name: value for name, value in state_dict.items() if name not in taken} | made
    names = [*(name for name in stock if name in state_dict), *(name for name in state_dict if name not in stock)]
    return {name: state_dict[name] for name in names}


# --- names of a checkpoint in a state dict ---------------------------------------------------------------------------


def convert_checkpoint_keys(
    model: PreTrainedModel,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Put parameters of transformers into a state dict, in the place of the tensors of a checkpoint that make them.

    Between the two lie the conversions of transformers, which a load runs and `load_state_dict` doesn't. Of a patched
    model it takes all names, because tools save it with `save_pretrained` and read that with `load_state_dict`.

    What a state dict has only some tensors of, keeps its values where it has none.
    """
    found = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    reshard_modules(model)
    view = stock_view(model)
    own, shapes = view.own, view.tensors
    if own.keys() >= found.keys():
        return
    for key, (target, _) in quantized_experts(model, found, fused_modules(model), own).items():
        if key != target and target not in found:
            state_dict[f"{prefix}{target}"] = state_dict.pop(found.pop(key))
    known = shapes.keys() | own.keys()
    unknown = {name: state_dict[key] for name, key in found.items() if name not in known}
    given = {name: whole(value) for name, value in unknown.items()}
    if not given or not all(isinstance(value, torch.Tensor) for value in given.values()):
        return
    record = record_of(model)
    patchers = record.patchers if record is not None else ()
    made, taken, absent = converted_to_parameters(model, given, shapes, patchers, view.values)
    if twice := sorted(f"{prefix}{name}" for name in made if f"{prefix}{name}" in state_dict):
        error_msgs.append(
            f"The state dict has {twice[0]}, and tensors of a checkpoint that make it, under names as "
            f"{prefix}{taken[0]}: which is meant can't be known. Take one of them out."
        )
        return
    missing_keys += [f"{prefix}{key}" for key in absent]
    unmade = {name: value for name, value in given.items() if name not in taken}
    checkpoint = _unconverted(model, unmade, patchers) if unmade else {}
    if checkpoint.keys() <= known:
        made |= checkpoint
        taken += unmade
    for name in taken:
        del state_dict[found[name]]
    if is_in_original_layout() or any(isinstance(value, DTensor) for value in unknown.values()):
        made = {name: distribute_like(tensor, own.get(name)) for name, tensor in made.items()}
    state_dict.update({f"{prefix}{name}": tensor for name, tensor in made.items()})


def _unconverted(
    model: PreTrainedModel, given: Mapping[str, torch.Tensor], patchers: Iterable[Patcher]
) -> dict[str, torch.Tensor]:
    """What transformers converts, as a checkpoint has it: for modules whose conversions a filter has dropped."""
    dropped = select_conversions(stock_conversions_from_scratch(model), patchers).dropped
    view: Any = ModelView(model, get_parameter=given.__getitem__)
    return stock_revert(view, dict(given), [copy_transform(each) for each, _ in dropped])


@torch.no_grad()
def converted_to_parameters(
    model: PreTrainedModel,
    given: Mapping[str, torch.Tensor],
    shapes: dict[str, torch.Tensor],
    patchers: Iterable[Patcher] = (),
    values: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]] | None = None,
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """The parameters of transformers that tensors of a checkpoint make, those that were taken, and those that lack.

    Args:
        shapes: the state dict of the model as transformers has it, on the meta device.
        patchers: whose filters drop conversions.
        values: gives those of parameters by their names, to take from them what lacks; without it nothing is made
            of what isn't complete.
    """
    view: Any = ModelView(model, get_parameter=shapes.__getitem__, state_dict=lambda: shapes)
    conversions = select_conversions(stock_conversions(model), patchers).kept
    rename = key_renamer(conversions)
    names: dict[str, torch.Tensor] = {}
    made_of: dict[str, list[str]] = {}
    for key in given:
        renamed, taker, _ = rename(key)
        makes = target_names(taker, renamed) if isinstance(taker, WeightConverter) else [renamed]
        if all(name in shapes for name in makes):
            names |= {name: shapes[name] for name in makes}
            made_of[key] = makes
    taken = list(made_of)
    reverse = select_conversions(stock_conversions_from_scratch(model), patchers).kept
    expected = stock_revert(view, dict(names), [copy_transform(each) for each in reverse])
    checkpoint, absent = {key: given[key] for key in taken}, [key for key in expected if key not in given]
    if not expected.keys() >= set(taken):  # names of an older release: what else there would be isn't known
        absent = []
    elif absent and values is None:
        return {}, [], []
    elif absent and values is not None:
        current = values(names)
        if lacking := names.keys() - current.keys():  # of layers that have been replaced by others
            rest = {key: each for key, each in given.items() if lacking.isdisjoint(made_of.get(key, ()))}
            return converted_to_parameters(model, rest, shapes, patchers, values)
        whole = stock_revert(view, current, [copy_transform(each) for each in reverse])
        checkpoint |= {key: whole[key] for key in absent}
    made = stock_parameters(model, shapes, names.keys(), conversions, checkpoint)
    return ({}, [], []) if made is None else (made, taken, absent)


# --- what others load afterwards: adapters, by names of today or of old checkpoints ----------------------------------


def without_stacking(model: nn.Module, conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """Conversions of transformers but for those that stack layers which the patched model has one by one."""
    conversions = list(conversions)
    if record_of(model) is None or not any(isinstance(each, WeightConverter) for each in conversions):
        return conversions
    alike = {without_numbers(name): name for name in _parameters(model)}
    return [each for each in conversions if not any(_stacks(each, name) for name in alike.values())]


def unstacked_layers(model: nn.Module) -> set[str]:
    """The layers of a patched model that stock has as stacks in one parameter: those of experts."""
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
        alike: dict[str, list[str]] = {}
        for name in _parameters(part):
            alike.setdefault(without_numbers(name), []).append(name)
        for found in alike.values():
            if any(_stacks(each, found[0]) for each in conversions):
                names.update(f"{inside(path)}{name}" for name in found)
    layers = (name.rpartition(".")[0] for name in names)
    return {layer for layer in layers if is_number(layer.rpartition(".")[0].rpartition(".")[2])}


def _parameters(model: nn.Module) -> set[str]:
    """The parameters of a model by their names before anything was put around their layers."""
    return {name.replace(".base_layer.", ".") for name, _ in named_parameters(model)}


def _stacks(transform: WeightTransform, name: str) -> bool:
    """Whether a conversion takes a parameter of that name; it notes that it was used, so a copy is used."""
    return isinstance(transform, WeightConverter) and copy_transform(transform).rename_source_key(name)[1] is not None
