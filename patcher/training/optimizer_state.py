"""Optimizer state in the layout of transformers: saved from a patched model's optimizer, and loaded into one.

The state of each parameter and the options of its group are a record, by parameter name. A layout that joins
parameters joins their records: tensors as the parameters, all else has to be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from patcher.compat.models import named_parameters
from patcher.errors import InvalidPatcherError, PatchedWeightsError
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.conversion import Converted, only_moves
from patcher.layouts.layouts import Cut, Flatten, Layout, Rows, by_itself
from patcher.layouts.sharded import check_not_flat, distribute_like, full_tensor, reshard_modules
from patcher.loading.state_dicts import carriers_in, stock_parameter_names
from patcher.patterns import compress, unwrapped

#: Optimizers that update a value from its own gradient and state, and from scalars of the whole parameter.
_NAMES = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = tuple(getattr(optim, name) for name in _NAMES)
_SAME = "With the same patcher as before use optimizer.state_dict() and optimizer.load_state_dict(state)"
_ADVICE = (
    "Parts of one parameter are trained together: put them into one group, or load the model without the fusion or "
    "conversion that joins them"
)


class Record(NamedTuple):
    """The options of a parameter's group, one object per group, and the parameter's state."""

    options: dict[str, Any]
    state: Mapping[str, Any]


def original_optimizer_state_dict(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state that the optimizer would have for the stock model, by the names of its parameters.

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

    Resume with other fusions, or with none:

    >>> model = AutoModelForCausalLM.from_config(config)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> load_original_state_dict(model, saved[0])
    <All keys matched successfully>
    >>> load_original_optimizer_state_dict(model, optimizer, saved[1])

    The form is that of torch's `get_optimizer_state_dict` for the stock model, but no step is made if none has been
    yet. Tensors may be the optimizer's own. Collective for sharded parameters: each process has to call it.

    Args:
        model: any module, also a wrapper of a patched model such as `DistributedDataParallel`.
        optimizer: of all or some of its parameters. It must update fused and converted parameters elementwise, as
            Adam and SGD do.

    Raises:
        InvalidPatcherError: if it isn't known to do so, or a layout isn't known to only move values; layouts of this
            package's fusions are, and conversions by those operations of transformers that do.
        PatchedWeightsError: if parts of an original parameter are trained differently.
    """
    run = _Run(model, optimizer)
    groups = [_options(group) for group in run.optimizer.param_groups]
    records = {
        name: Record(options, run.optimizer.state.get(parameter, {}))
        for options, parameters in zip(groups, run.groups, strict=True)
        for name, parameter in parameters.items()
    }
    _convert(records, run.layouts, "the optimizer", is_fused=True)
    names = [name for name in dict.fromkeys([*run.stock_names(), *records]) if name in records]
    packed = []
    for options, group in zip(groups, run.optimizer.param_groups, strict=True):
        members = [name for name in names if records[name].options is options]
        packed.append({**options, "params": members} | ({"param_names": members} if "param_names" in group else {}))
    states = {name: records[name].state for group in packed for name in group["params"]}
    return {"state": {name: state for name, state in states.items() if state}, "param_groups": packed}


def load_original_optimizer_state_dict(model: nn.Module, optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load optimizer state in the layout of transformers: the inverse of `original_optimizer_state_dict`.

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

    Groups take the options that the state has for their parameters. Everything is checked before it is loaded.

    Args:
        model: as in `original_optimizer_state_dict`, with any fusions or none.
        optimizer: as there.
        state: the result of that, or of `get_optimizer_state_dict` for a stock model.

    Raises:
        InvalidPatcherError: as in `original_optimizer_state_dict`.
        PatchedWeightsError: if parameters or groups don't match, or parts of one parameter were trained differently.
    """
    run = _Run(model, optimizer)
    saved_groups = state.get("param_groups") or ()
    names = [*state.get("state", ()), *(name for group in saved_groups for name in group["params"])]
    if not ("state" in state and saved_groups and all(isinstance(name, str) for name in names)):
        raise PatchedWeightsError(
            "The state doesn't list the names of parameters, as that of original_optimizer_state_dict(model, "
            f"optimizer) does. What optimizer.state_dict() gives has none. {_SAME}."
        )
    states = {run.canonical.get(name, name): value for name, value in state["state"].items()}
    groups = [(_options(group), [run.canonical.get(name, name) for name in group["params"]]) for group in saved_groups]
    records = {name: Record(options, states.get(name) or {}) for options, members in groups for name in members}
    stock = {name: layout.stock for layout in run.layouts for name in layout.fused}
    parameters = {name: parameter for group in run.groups for name, parameter in group.items()}
    expected = {part for name in parameters for part in stock.get(name, (name,))}
    if expected != {*records, *states}:
        differences = ({*records, *states} - expected, expected - {*records, *states})
        unexpected, missing = (_listed(sorted(names)) or "none" for names in differences)
        raise PatchedWeightsError(
            "The state and the optimizer have different parameters in the layout of transformers: only in the "
            f"optimizer: {missing}; only in the state: {unexpected}. Make the optimizer of the parameters that were "
            "trained; if only some parts of a fused parameter were, load the model without the fusion or conversion "
            "that joins them."
        )
    _convert(records, run.layouts, "the state", is_fused=False)
    indices = {name: index for index, name in enumerate(parameters)}
    loaded_groups = []
    for number, (members, group) in enumerate(zip(run.groups, run.optimizer.param_groups, strict=True)):
        first, *others = members or ("",)
        for name in others:
            if difference := _difference(records[first].options, records[name].options):
                raise PatchedWeightsError(
                    f"Group {number} of the optimizer holds {first} and {name}, of groups of the state that differ: "
                    f"{difference}. Make the groups of the optimizer as they were."
                )
        options = records[first].options if members else _options(group)
        loaded_groups.append({**options, "params": [indices[name] for name in members]})
    values = {
        indices[name]: {key: _like(value, parameters[name]) for key, value in record.state.items()}
        for name, record in records.items()
        if record.state
    }
    run.optimizer.load_state_dict({"state": values, "param_groups": loaded_groups})


class _Run:
    """An unwrapped model and optimizer, and the names of its parameters.

    Attributes:
        groups: for each group of the optimizer name -> parameter.
        canonical: each name of a parameter in the model -> its first name, for tied parameters.
        layouts: the layouts of those of the optimizer's parameters that transformers doesn't have.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        check_not_flat(model)
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
            (model,) = model.children()
        reshard_modules(model)
        self.model, self.optimizer = model, optimizer
        names: dict[int, str] = {}
        self.canonical = {
            name: names.setdefault(id(parameter), name)
            for name, parameter in ((unwrapped(path), parameter) for path, parameter in named_parameters(model))
        }
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if foreign := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]:
            raise PatchedWeightsError(
                f"{len(foreign)} of the {len(parameters)} parameters of the optimizer aren't in the model, the first "
                f"of them {foreign[0]}. Make the optimizer of model.parameters(), after whatever changes the model."
            )
        self.groups = [{names[id(param)]: param for param in group["params"]} for group in optimizer.param_groups]
        layouts = [layout.named(unwrapped) for carrier in carriers_in(model) for layout in carrier.all]
        trained = {name for group in self.groups for name in group}
        self.layouts = [layout for layout in layouts if not trained.isdisjoint(layout.fused)]
        for layout in self.layouts:
            moves = type(layout) in (Rows, Cut, Flatten, Matrices)
            moves = moves or (isinstance(layout, Converted) and only_moves(layout.transform))
            is_renamed = type(layout) is Rows and len(layout.stock) == 1
            if is_renamed or (moves and type(optimizer) in ELEMENTWISE):  # a subclass of AdamW may step otherwise
                continue
            reason = f"{layout} isn't known to only move values"
            if moves:
                reason = f"{type(optimizer).__name__} isn't known to treat each value by itself, as AdamW and SGD do"
            raise InvalidPatcherError(
                f"{reason}, so its state can't be converted between {_listed(layout.fused)} and "
                f"{_listed(layout.stock)}. {_SAME}."
            )

    def stock_names(self) -> list[str]:
        """Return the parameter names of the stock model in order."""
        return [*map(unwrapped, stock_parameter_names(self.model))]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@torch.no_grad()
def _convert(records: dict[str, Record], layouts: Iterable[Layout], owner: str, *, is_fused: bool) -> None:
    """Replace records of fused parameters by those of their parts, or the reverse; errors name their `owner`."""
    for name, record in records.items():
        records[name] = Record(record.options, {key: full_tensor(value) for key, value in record.state.items()})
    made: dict[str, Record] = {}  # apart from the others: layouts may exchange names
    for layout in layouts:
        sources, targets = (layout.fused, layout.stock) if is_fused else (layout.stock, layout.fused)
        convert, shapes = (layout.separate, layout.fused_shapes()) if is_fused else (layout.fuse, layout.stock_shapes)
        relation = f"{_listed(targets)} {'is' if len(targets) == 1 else 'are'} made of"
        if missing := [name for name in sources if name not in records and name not in made]:
            raise PatchedWeightsError(
                f"{relation} {_listed(sources)}, and of these {owner} lacks {_listed(missing)}. {_ADVICE}."
            )
        first, *others = parts = [(records if name in records else made).pop(name) for name in sources]
        for name, part in zip(sources[1:], others, strict=True):
            if difference := _difference({**first.options, **first.state}, {**part.options, **part.state}):
                raise PatchedWeightsError(
                    f"{relation} {sources[0]} and {name}, and in {owner} these differ: {difference}. {_ADVICE}."
                )
        states: list[dict[str, Any]] = [{} for _ in targets]
        for key, value in first.state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                tensors = [part.state[key] for part in parts]
                for name, tensor, shape in zip(sources, tensors, shapes, strict=True):
                    if tensor.shape != torch.Size(shape):
                        actual, expected = tuple(tensor.shape), tuple(shape)
                        raise PatchedWeightsError(
                            f"{key} of {name} is {actual} in {owner}, and the parameter is {expected}."
                        )
                values = [by_itself(tensor) for tensor in convert(tensors)]
            else:
                values = [copy.deepcopy(value) for _ in targets]  # a step is counted in place
            for state, converted in zip(states, values, strict=True):
                state[key] = converted
        made |= {name: Record(first.options, state) for name, state in zip(targets, states, strict=True)}
    records |= made


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe how the options or scalars of two parameters differ, "" if they don't."""

    def text(value: Any) -> str:
        is_tensor = isinstance(value, torch.Tensor)
        return "a tensor" if is_tensor and value.dim() else str(value.item() if is_tensor else value)

    pairs = {key: [text(values.get(key, "missing")) for values in (one, other)] for key in {**one, **other}}
    return "; ".join(f"{key} is {first} and {second}" for key, (first, second) in pairs.items() if first != second)


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """Return a copy, sharded as the parameter is."""
    copied = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    return distribute_like(copied, parameter) if getattr(value, "shape", None) == parameter.shape else copied


def _listed(names: Iterable[str]) -> str:
    return ", ".join(compress(names))
