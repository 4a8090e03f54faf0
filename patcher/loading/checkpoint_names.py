"""A state dict of a model under the names that its parameters have in transformers.

Between a checkpoint and these lie the conversions of transformers: renamings, experts that are stacked. A load runs
them; `load_state_dict` doesn't, so it takes a checkpoint's own names only if they are those of parameters. Of a
patched model it takes all, because tools save it with `save_pretrained` and read that with `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from patcher.compat.conversions import (
    copy_transform,
    key_renamer,
    stock_conversions,
    stock_conversions_from_scratch,
    stock_revert,
)
from patcher.compat.models import ModelView
from patcher.compat.seams import Stock, seam
from patcher.layouts.carried import fused_modules
from patcher.layouts.conversion import made_by_name
from patcher.layouts.either_layout import is_in_original_layout
from patcher.layouts.selection import select_conversions
from patcher.layouts.sharded import keep_pieces, split_like, whole
from patcher.loading.expert_names import quantized_experts
from patcher.loading.record import record_of
from patcher.loading.routes import stock_parameters
from patcher.loading.stock_view import stock_view
from patcher.spec.patcher import Patcher


@seam("transformers.modeling_utils:PreTrainedModel._load_from_state_dict", "state_dict", "prefix")
def load_from_state_dict(
    stock: Stock, self: PreTrainedModel, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
) -> None:
    """Have `load_state_dict` of a patched model, and of its sub-models, take the names of checkpoints."""
    if record_of(self) is not None:
        _, _, missing_keys, _, error_msgs = args
        _name_as_parameters(self, state_dict, prefix, missing_keys, error_msgs)
    stock(self, state_dict, prefix, *args, **kwargs)


def _name_as_parameters(
    model: PreTrainedModel,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Put parameters of transformers into a state dict, in the place of the tensors of a checkpoint that make them.

    What a state dict has only some tensors of, keeps its values where it has none.
    """
    found = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    keep_pieces(model)
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
        made = {name: split_like(tensor, own.get(name)) for name, tensor in made.items()}
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
        makes = made_by_name(taker, renamed) if isinstance(taker, WeightConverter) else [renamed]
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
