"""The state of an optimizer in the layout of transformers: of a patched model, and into the optimizer of one.

What an optimizer has of each parameter is a record, by name. Those of the parameters that a layout joins become one
where they are the same, but for tensors of the shapes of the parameters, which are joined as the parameters are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from patcher.compat.models import named_parameters
from patcher.errors import InvalidPatcherError, PatchedWeightsError
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.conversion import Converted, only_moves
from patcher.layouts.layouts import Cut, Flatten, Layout, Rows, by_itself
from patcher.layouts.sharded import distribute_like, full_tensor, reshard_modules
from patcher.loading.state_dicts import carriers_in, patched_models
from patcher.patterns import compress, inside
from patcher.resolution.resolution import skeleton

#: Each value is moved by its own gradient and state, and by numbers that are the same for the whole parameter.
_NAMES = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = tuple(getattr(optim, name) for name in _NAMES)
#: What `torch.compile` and wrappers call the module that they are around, as `torch.distributed.checkpoint` knows it.
_AROUND = ("_orig_mod", "_checkpoint_wrapped_module")
#: Where fusions stay as they are.
_SAME = "With the same patcher as before use optimizer.state_dict() and optimizer.load_state_dict(state)"
_ADVICE = (
    "Parts of one parameter are trained together: put them into one group, or load the model without the fusion or "
    "conversion that joins them"
)


class Record(NamedTuple):
    """What an optimizer has of a parameter: the options of its group, which all of the group share, and its state."""

    options: dict[str, Any]
    state: Mapping[str, Any]


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
    run = _Run(model, optimizer)
    groups = [_options(group) for group in run.optimizer.param_groups]
    records = {
        name: Record(options, run.optimizer.state.get(parameter, {}))
        for options, members in zip(groups, run.groups, strict=True)
        for name, parameter in members.items()
    }
    records = _converted(records, run.layouts, "the optimizer", is_fused=True)
    order = {name: place for place, name in enumerate(run.in_transformers(records))}
    names = sorted(records, key=lambda name: order.get(name, len(order)))
    packed = []
    for options, group in zip(groups, run.optimizer.param_groups, strict=True):
        members = [name for name in names if records[name].options is options]
        packed.append({**options, "params": members} | ({"param_names": members} if "param_names" in group else {}))
    states = {name: records[name].state for group in packed for name in group["params"]}
    return {"state": {name: state for name, state in states.items() if state}, "param_groups": packed}


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
    run = _Run(model, optimizer)
    given = state.get("param_groups") or ()
    members = [name for group in given for name in group["params"]]
    if not ("state" in state and given and all(isinstance(name, str) for name in (*members, *state["state"]))):
        raise PatchedWeightsError(
            "The state doesn't list the names of parameters, as that of original_optimizer_state_dict(model, "
            f"optimizer) does. What optimizer.state_dict() gives has none. {_SAME}."
        )
    states = {run.first.get(name, name): value for name, value in state["state"].items()}
    records: dict[str, Record] = {}
    for group in given:
        options = _options(group)
        names = [run.first.get(name, name) for name in group["params"]]
        records |= {name: Record(options, states.get(name) or {}) for name in names}
    stock = {name: layout.stock for layout in run.layouts for name in layout.fused}
    parameters = {name: parameter for group in run.groups for name, parameter in group.items()}
    wanted = {part for name in parameters for part in stock.get(name, (name,))}
    if wanted != {*records, *states}:
        found = ({*records, *states} - wanted, wanted - {*records, *states})
        unknown, missing = (_listed(sorted(names)) or "none" for names in found)
        raise PatchedWeightsError(
            f"The state is of other parameters than the optimizer, in the layout of transformers: {missing} are the "
            f"optimizer's alone, {unknown} the state's alone. Make the optimizer of the parameters that were trained; "
            "where only some of those were that one parameter is made of now, load the model without the fusion or "
            "conversion that joins them."
        )
    records = _converted(records, run.layouts, "the state", is_fused=False)
    place = {name: number for number, name in enumerate(parameters)}
    groups = []
    for number, (own, group) in enumerate(zip(run.groups, run.optimizer.param_groups, strict=True)):
        first, *others = own or ("",)
        for name in others:
            if difference := _difference(records[first].options, records[name].options):
                raise PatchedWeightsError(
                    f"Group {number} of the optimizer holds {first} and {name}, of groups of the state that differ: "
                    f"{difference}. Make the groups of the optimizer as they were."
                )
        options = records[first].options if own else _options(group)
        groups.append({**options, "params": [place[name] for name in own]})
    values = {
        place[name]: {key: _like(value, parameters[name]) for key, value in record.state.items()}
        for name, record in records.items()
        if record.state
    }
    run.optimizer.load_state_dict({"state": values, "param_groups": groups})


class _Run:
    """An optimizer, and its parameters by their names in the model without those of wrappers.

    Attributes:
        optimizer: itself, without what accelerate has around it.
        groups: for each of its groups name -> parameter.
        first: each name in the model -> the first of the same parameter.
        layouts: how those of its parameters are made that are made of others.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Find the names."""
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise InvalidPatcherError(
                "FullyShardedDataParallel makes flat pieces of parameters, of which the state of an original can't "
                "be told. Use torch.distributed.fsdp.fully_shard in its place."
            )
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
            (model,) = model.children()
        reshard_modules(model)
        self.model, self.optimizer = model, optimizer
        own: dict[int, str] = {}
        self.first = {
            name: own.setdefault(id(parameter), name)
            for name, parameter in ((_bare(path), parameter) for path, parameter in named_parameters(model))
        }
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if strange := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in own]:
            raise PatchedWeightsError(
                f"{len(strange)} of the {len(parameters)} parameters of the optimizer aren't in the model, the first "
                f"of them {strange[0]}. Make the optimizer of model.parameters(), after whatever changes the model."
            )
        self.groups = [{own[id(each)]: each for each in group["params"]} for group in optimizer.param_groups]
        self._made = [layout.named(_bare) for each in carriers_in(model) for layout in each.all]
        names = {name for group in self.groups for name in group}
        self.layouts = [layout for layout in self._made if not names.isdisjoint(layout.fused)]
        for layout in self.layouts:
            if type(layout) is Rows and len(layout.stock) == 1:
                continue  # renamed, whatever the optimizer does
            moves = type(layout) in (Rows, Cut, Flatten, Matrices)
            if not (moves or (isinstance(layout, Converted) and only_moves(layout.transform))):
                reason = f"{layout} isn't known to only move values"
            elif type(optimizer) not in ELEMENTWISE:  # a subclass may step otherwise
                reason = f"{type(optimizer).__name__} isn't known to treat each value by itself, as AdamW and SGD do"
            else:
                continue
            raise InvalidPatcherError(
                f"{reason}, so its state for {_listed(layout.fused)} isn't that for {_listed(layout.stock)}. {_SAME}."
            )

    def in_transformers(self, found: Iterable[str]) -> list[str]:
        """The names of the parameters of transformers, in order; those of the optimizer are to be among them."""
        known = self.first.keys() - {name for layout in self._made for name in layout.fused}
        known |= {name for layout in self._made for name in layout.stock}
        result: list[str] = []
        for path, part, record in patched_models(self.model):
            prefix = inside(_bare(path))
            stock = [f"{prefix}{name}" for name, _ in named_parameters(skeleton(record.model_class, part.config))]
            result += stock
            own = known.intersection(found) - {*stock, *(f"{prefix}{name}" for name in record.new_weights)}
            for owner in (f"{prefix}{inside(item.path)}" for item in record.modules):
                strange = sorted(name for name in own if name.startswith(owner))
                absent = sorted(name for name in {*stock} - known if name.startswith(owner))
                if strange and absent:
                    raise InvalidPatcherError(
                        f"{_listed(strange)} of the model correspond to {_listed(absent)} of transformers, and no "
                        f"conversion of the patcher tells how. {_SAME}."
                    )
        return result


def _bare(name: str) -> str:
    """The name of a parameter or module without those of wrappers, as `torch.distributed.checkpoint` has it."""
    return ".".join(segment for segment in name.split(".") if segment not in _AROUND)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@torch.no_grad()
def _converted(
    records: dict[str, Record], layouts: Iterable[Layout], where: str, *, is_fused: bool
) -> dict[str, Record]:
    """Records by the names and shapes of the other layout: with those of parts in the place of what is fused, if they
    are of that, or the reverse.

    Args:
        where: what they are of, for errors.
    """
    result = {
        name: Record(each.options, {key: full_tensor(value) for key, value in each.state.items()})
        for name, each in records.items()
    }
    for layout in layouts:
        sources, targets = (layout.fused, layout.stock) if is_fused else (layout.stock, layout.fused)
        convert, shapes = (layout.separate, layout.fused_shapes()) if is_fused else (layout.fuse, layout.stock_shapes)
        made = f"{_listed(targets)} {'is' if len(targets) == 1 else 'are'} made of"
        if absent := [name for name in sources if name not in result]:
            raise PatchedWeightsError(
                f"{made} {_listed(sources)}, and of these {where} lacks {_listed(absent)}. {_ADVICE}."
            )
        first, *others = parts = [result.pop(name) for name in sources]
        for name, part in zip(sources[1:], others, strict=True):
            if difference := _difference(*({**each.options, **each.state} for each in (first, part))):
                raise PatchedWeightsError(
                    f"{made} {sources[0]} and {name}, and in {where} these differ: {difference}. {_ADVICE}."
                )
        states: list[dict[str, Any]] = [{} for _ in targets]
        for key, value in first.state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                values = [part.state[key] for part in parts]
                if (found := [tuple(each.shape) for each in values]) != [*map(tuple, shapes)]:
                    there, expected = (" and ".join(map(str, each)) for each in (found, map(tuple, shapes)))
                    raise PatchedWeightsError(
                        f"{key} of {_listed(sources)} is {there} in {where}, and the shape of what it is for is "
                        f"{expected}."
                    )
                values = [by_itself(each.contiguous()) for each in convert(values)]
            else:
                values = [copy.deepcopy(value) for _ in targets]  # a step is counted in place
            for state, each in zip(states, values, strict=True):
                state[key] = each
        result |= {name: Record(first.options, state) for name, state in zip(targets, states, strict=True)}
    return result


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What differs in the options or the numbers of two parameters, "" if nothing does."""
    pairs = {key: [_said(each.get(key, "missing")) for each in (one, other)] for key in {**one, **other}}
    return "; ".join(f"{key} is {first} and {second}" for key, (first, second) in pairs.items() if first != second)


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor" if value.dim() else str(value.item())
    return str(value)


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """A value that is the optimizer's own, and sharded as its parameter is."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    own = value.detach().clone()
    return distribute_like(own, parameter) if value.shape == parameter.shape else own


def _listed(names: Iterable[str]) -> str:
    return ", ".join(compress(names))
