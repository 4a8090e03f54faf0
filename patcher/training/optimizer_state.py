"""The state of an optimizer in the layout of transformers: of a patched model, and into the optimizer of one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn, optim

from patcher.errors import InvalidPatcherError, PatchedWeightsError
from patcher.layouts.layouts import Layout, Rows
from patcher.layouts.sharded import keep_pieces, split_like
from patcher.training.elementwise import not_elementwise, only_moves_values
from patcher.training.moves import PARAMS, Move, check_shapes, listed, moved, options, same
from patcher.training.names import Names

#: Where fusions stay as they are.
_SAME = "With the same patcher as before use optimizer.state_dict() and optimizer.load_state_dict(state)"


def original_optimizer_state_dict(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """The state that an optimizer would have beside the model of transformers, by the names of its parameters.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> from patcher import Patcher, load_original_optimizer_state_dict, load_original_state_dict
    >>> from patcher import original_optimizer_state_dict, original_state_dict
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    >>> model = AutoModelForCausalLM.from_config(config, patcher=Patcher(fusions=["qkv", "gate_up"]))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    >>> optimizer.step()
    >>> saved = original_state_dict(model), original_optimizer_state_dict(model, optimizer)
    >>> [name for name in saved[1]["state"] if "self_attn" in name][:2]
    ['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.k_proj.weight']

    The run goes on with other fusions, or without:

    >>> model = AutoModelForCausalLM.from_config(config)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> load_original_state_dict(model, saved[0])
    <All keys matched successfully>
    >>> load_original_optimizer_state_dict(model, optimizer, saved[1])

    It has the form that `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict` has for the stock
    model. Unlike that it makes no step where none has been made. As in `optimizer.state_dict()` tensors may be the
    optimizer's. What is sharded over processes is gathered: each process has to call this.

    Args:
        model: any module, also one around a patched model, as `DistributedDataParallel` is.
        optimizer: of its parameters, or of some of them. What fusions and conversions have made has to be trained
            value by value, as Adam, SGD and their like do.

    Raises:
        InvalidPatcherError: the optimizer isn't known to do so, or a conversion or a layout to only move
            values: those of transformers' operations that do, and of this package's fusions, are.
        PatchedWeightsError: parts of an original parameter are trained differently.
    """
    optimizer, names = _checked(model, optimizer)
    packed = optimizer.state_dict()
    own = [names.own[id(parameter)] for parameter in _parameters(optimizer)]
    groups = [{**group, PARAMS: [own[number] for number in group[PARAMS]]} for group in packed["param_groups"]]
    state = {own[key] if isinstance(key, int) else key: value for key, value in packed["state"].items()}
    moves = [
        Move(layout.fused, layout.stock, tuple(layout.fused_shapes()), layout.separate)
        for layout in names.made_with(own)
    ]
    return moved(groups, state, moves, "the optimizer", names.order)


def load_original_optimizer_state_dict(model: nn.Module, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state in the layout of transformers: the inverse of `original_optimizer_state_dict`.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> from patcher import Patcher, load_original_optimizer_state_dict
    >>> from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    >>> stock = AutoModelForCausalLM.from_config(config)
    >>> state = get_optimizer_state_dict(stock, torch.optim.AdamW(stock.parameters()))
    >>> fused = Patcher(fusions="qkv").apply(stock)
    >>> optimizer = torch.optim.AdamW(fused.parameters())
    >>> load_original_optimizer_state_dict(fused, optimizer, state)
    >>> optimizer.state[fused.model.layers[0].self_attn.qkv_proj.weight]["exp_avg"].shape
    torch.Size([192, 64])

    Options of the groups are taken from the state, as `torch.optim.Optimizer.load_state_dict` does; here groups are
    matched by the parameters that they hold. All is checked before anything is loaded.

    Args:
        model: as in `original_optimizer_state_dict`, with any fusions or none.
        optimizer: as there.
        state: what that has given, or `get_optimizer_state_dict` for a stock model.

    Raises:
        InvalidPatcherError: as in `original_optimizer_state_dict`.
        PatchedWeightsError: the state is of other parameters or groups, or parts of one parameter were trained
            differently, so that they can't be joined.
    """
    optimizer, names = _checked(model, optimizer)
    parameters = {names.own[id(parameter)]: parameter for parameter in _parameters(optimizer)}
    made = names.made_with(parameters)
    groups, values = _read(state, names)
    _check_parameters(parameters, made, {*values, *(name for group in groups for name in group[PARAMS])})
    moves = [Move(layout.stock, layout.fused, layout.stock_shapes, layout.fuse) for layout in made]
    found = moved(groups, values, moves, "the state")
    own = [[names.own[id(parameter)] for parameter in group[PARAMS]] for group in optimizer.param_groups]
    numbers = {name: number for number, name in enumerate(parameters)}
    if not not_elementwise(optimizer):
        for name, entries in found["state"].items():
            check_shapes(name, entries, parameters[name].shape, "the state")
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name]: {key: _like(value, parameters[name]) for key, value in entries.items()}
                for name, entries in found["state"].items()
            },
            "param_groups": [
                {
                    **_options_of(place, members, found["param_groups"], optimizer.param_groups[place]),
                    PARAMS: [numbers[name] for name in members],
                }
                for place, members in enumerate(own)
            ],
        }
    )


def _checked(model: nn.Module, optimizer: optim.Optimizer) -> tuple[optim.Optimizer, Names]:
    """The optimizer itself, and the names of its parameters.

    Raises:
        InvalidPatcherError: what it does isn't known to be the same for parts.
        PatchedWeightsError: it has parameters that the model hasn't.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    keep_pieces(model)
    names = Names.of(model)
    parameters = _parameters(optimizer)
    if strange := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names.own]:
        raise PatchedWeightsError(
            f"{len(strange)} of the {len(parameters)} parameters of the optimizer aren't in the model, the first of "
            f"them {strange[0]}. Make the optimizer of model.parameters(), after whatever changes the model."
        )
    own = [names.own[id(parameter)] for parameter in parameters]
    made = names.made_with(own)
    if unknown := [
        name for name in (*own, *(name for layout in made for name in layout.stock)) if name in names.unexplained
    ]:
        raise InvalidPatcherError(
            f"{listed(unknown)} of the model correspond to {listed(names.unexplained[unknown[0]])} of transformers, "
            f"and no conversion of the patcher tells how. {_SAME}."
        )
    # One parameter in the same shape is only renamed, whatever its optimizer does.
    changed = [layout for layout in made if not (type(layout) is Rows and len(layout.stock) == 1)]
    if changed and (reason := not_elementwise(optimizer)):
        raise InvalidPatcherError(
            f"{type(optimizer).__name__} {reason}, so its state for {listed(changed[0].fused)} isn't that for "
            f"{listed(changed[0].stock)}. {_SAME}."
        )
    for layout in changed:
        if not only_moves_values(layout):
            raise InvalidPatcherError(
                f"{layout} isn't known to only move values, so the state for {listed(layout.fused)} isn't that for "
                f"{listed(layout.stock)}. {_SAME}."
            )
    return optimizer, names


# --- what is loaded ------------------------------------------------------------------------------------------------


def _read(state: Mapping[str, Any], names: Names) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """The groups and the state of what is to be loaded; what has several names under the first.

    Raises:
        PatchedWeightsError: it is in another form.
    """
    groups = state.get("param_groups")
    members = [name for group in groups or () for name in group[PARAMS]]
    if (
        groups is None
        or "state" not in state
        or not all(isinstance(name, str) for name in (*members, *state["state"]))
    ):
        raise PatchedWeightsError(
            "The state doesn't list the names of parameters, as that of original_optimizer_state_dict(model, "
            f"optimizer) does. What optimizer.state_dict() gives has none. {_SAME}."
        )
    return (
        [{**group, PARAMS: [names.first.get(name, name) for name in group[PARAMS]]} for group in groups],
        {names.first.get(name, name): value for name, value in state["state"].items()},
    )


def _check_parameters(own: Iterable[str], made: Iterable[Layout], given: set[str]) -> None:
    stock = {name: layout.stock for layout in made for name in layout.fused}
    wanted = {part for name in own for part in stock.get(name, (name,))}
    if wanted != given:
        missing, unknown = (listed(sorted(names)) or "none" for names in (wanted - given, given - wanted))
        raise PatchedWeightsError(
            f"The state is of other parameters than the optimizer, in the layout of transformers: {missing} are the "
            f"optimizer's alone, {unknown} the state's alone. Make the optimizer of the parameters that were trained; "
            "where only some of those were that one parameter is made of now, load the model without the fusion or "
            "conversion that joins them."
        )


def _options_of(number: int, members: list[str], groups: list[dict[str, Any]], own: dict[str, Any]) -> dict[str, Any]:
    """The options that the state has for the parameters of a group of the optimizer; its own, if it has none.

    Raises:
        PatchedWeightsError: several, for some.
    """
    found = [group for group in groups if not set(members).isdisjoint(group[PARAMS])] or [own]
    for other in found[1:]:
        if differing := [key for key, value in options(found[0]).items() if not same(value, other.get(key))]:
            there = [[name for name in members if name in group[PARAMS]] for group in (found[0], other)]
            raise PatchedWeightsError(
                f"Group {number} of the optimizer holds {listed(there[0])} and {listed(there[1])}, of groups of the "
                f"state that differ in {listed(differing)}. Make the groups of the optimizer as they were."
            )
    return options(found[0])


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """A value that is the optimizer's own, and sharded as its parameter is."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    own = value.detach().clone()
    return split_like(own, parameter) if value.shape == parameter.shape else own


def _parameters(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
