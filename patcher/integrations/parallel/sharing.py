"""Tensor and expert parallelism of a patched model: the plan of transformers, by the names that the model has.

A plan says how the layers of a model are shared among processes, by the names that they have in transformers:

    model.layers.*.self_attn.q_proj    colwise          each process computes some of the outputs
    model.layers.*.self_attn.o_proj    rowwise          each takes some of the inputs, and the results are summed

Projections that are joined are shared as their parts would be: the rows lie in as many blocks as there are processes,
each with its share of every part, so that a process which takes one block has its own heads of queries, keys and
values. The layers of experts are shared one by one. What a class mapping has converted, no plan knows: each process
has all of it.

What can't be done raises before a weight is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn

from patcher.compat.models import named_modules, state_tensors
from patcher.compat.parallel import in_plan, set_plans, sizes
from patcher.compat.standing_alone import ListedExperts
from patcher.errors import InvalidPatcherError
from patcher.fusions.experts.matrices import Matrices
from patcher.fusions.families import fusion_named
from patcher.integrations.parallel.plans import (
    GATHERED,
    INPUTS,
    OUTPUTS,
    SUMMED_EXPERTS,
    Plan,
    cannot,
    replaces_plan,
    tensor_plan,
)
from patcher.layouts.carried import ModuleLayouts, fused_modules
from patcher.layouts.either_layout import carry
from patcher.layouts.layouts import Layout, Rows, lies_in_blocks
from patcher.loading.load import Selected
from patcher.loading.stock_view import check_no_part_is_named, from_scratch, layer_name, parts_of
from patcher.patterns import inside
from patcher.resolution.resolution import skeleton

#: What makes `from_pretrained` share a model.
ASKED = ("distributed_config", "tp_plan", "tp_size")
#: What can be done where the layers of experts can't be shared.
LEAVE_EXPERTS = "Leave sequential_experts out; stacks of experts are shared as transformers does."


def follow_plan(load: Selected, quantizer: Any) -> None:
    """Have the plan of a model name the layers that it has, and its joined rows lie as the processes share them.

    Raises:
        InvalidPatcherError: a layer can't be shared as the plan has it; with what can be done instead.
    """
    if all(load.options.get(name) is None for name in ASKED):  # a config may be that of a model that was shared
        return
    config = load.model.config.distributed_config
    count = sizes(config)
    if max(count) > 1 and quantizer is not None and (fused_modules(load.model) or load.conversions.added):
        raise InvalidPatcherError(
            "A patcher with weight conversions was used together with a quantizer and a distributed_config that "
            "shares weights among processes; that is not supported. Leave the fusions and conversions out, or the "
            "quantizer, or load in one process."
        )
    if count.tensors == count.experts == 1:
        return
    modules: dict[str, set[str]] = {}
    for path, _ in named_modules(load.model):
        modules.setdefault(in_plan(path), set()).add(path)
    _check_names(load, config, modules)
    plan = Plan(tensor_plan(load.model, config), count.tensors)
    of_experts = {**(getattr(load.model, "ep_plan", None) or {}), **(getattr(config, "ep_plan", None) or {})}
    experts = Plan(of_experts if count.experts > 1 else {}, count.experts)
    # Before 5.19 experts were distributed to processes by a plan that takes the place of that of tensor parallelism.
    are_distributed = bool(getattr(config, "enable_expert_parallel", False)) and not hasattr(config, "ep_size")
    changes = []
    for path, module, carried in fused_modules(load.model):
        if isinstance(module, ListedExperts) and (are_distributed or experts.below(path)):
            raise cannot([path], "ep_size deals stacks of experts to processes, and these are layers", LEAVE_EXPERTS)
        changes.append((module, _share(plan, path, module, carried)))
    for path in _converted(load):
        _replicate(plan, path)
        experts.drop_below(path)
    rules, rules_of_experts = plan.result(modules), experts.result(modules) if count.experts > 1 else None
    _check_followed(config, rules)
    for module, carried in changes:  # now that all of the plan is known to be possible
        carry(module, carried)
        for layout in filter(lies_in_blocks, carried.layouts):
            owner, _, last = layout.fused[0].rpartition(".")
            if last == "weight":
                setattr(module, f"{owner}_sizes", layout.block_sizes)
    set_plans(load.model, rules, rules_of_experts)


def _check_names(load: Selected, config: Any, modules: Collection[str]) -> None:
    """Refuse plans that name parts of joined layers, and none of what plans call the modules of the model."""
    parts = parts_of(load)
    for what in ("tp_plan", "ep_plan"):
        given = getattr(config, what, None)
        if isinstance(given, dict):
            idle = given.keys() - modules
            named = {name for name in parts if not idle.isdisjoint((in_plan(name), in_plan(layer_name(name))))}
            check_no_part_is_named(what, named, parts)


def _check_followed(config: Any, rules: dict[str, str]) -> None:
    """Refuse a plan that is given as an argument, where that isn't the one to follow."""
    if not isinstance(config.tp_plan, dict):
        return
    if others := sorted(config.tp_plan.keys() - rules.keys()):
        raise cannot(others, "the patched model has other layers there", "Leave them out of tp_plan.")
    if replaces_plan(config) and (absent := sorted(rules.keys() - config.tp_plan.keys())):
        raise cannot(absent, "tp_plan has rules for what is joined there", "Name them in tp_plan.")


def _share(plan: Plan, path: str, module: nn.Module, carried: ModuleLayouts) -> ModuleLayouts:
    """What a fused module carries once its layers are shared as the plan has those of transformers.

    Raises:
        InvalidPatcherError: that can't be done.
    """
    if any(isinstance(layout, Matrices) for layout in carried.layouts):
        _share_experts(plan, path, carried)
        return carried
    layouts: list[Layout] = []
    for layout in carried.layouts:
        owners = [f"{inside(path)}{name}".rpartition(".")[0] for name in layout.stock]
        if type(layout) is Rows:
            layout = _shared_rows(plan, path, module, carried, layout)
        elif named := [owner for owner in owners if plan.of(owner)]:
            raise cannot(named, f"how {layout} is to be shared is not known")
        layouts.append(layout)
    return replace(carried, layouts=tuple(layouts))


def _shared_rows(plan: Plan, path: str, module: nn.Module, carried: ModuleLayouts, layout: Rows) -> Rows:
    prefix = inside(path)
    layers = [f"{prefix}{name.rpartition('.')[0]}" for name in layout.stock]
    styles = {layer: plan.of(layer) for layer in layers}
    (style, *others) = set(styles.values())
    fused_layer, _, kind = layout.fused[0].rpartition(".")
    if others or any(plan.of(f"{prefix}{name}") for name in (*layout.stock, *layout.fused)):
        listed = ", ".join(f"{layer}: {found!r}" for layer, found in styles.items())
        raise cannot([path], f"the plan shares what is joined here in several ways ({listed})")
    style = style or plan.of(f"{prefix}{fused_layer}")
    if style is None:
        return layout
    plan.gone.update(map(in_plan, layers))
    if not fused_layer or kind not in ("weight", "bias"):  # biases of some of the projections only
        if style in GATHERED:
            return layout
        raise cannot([path], f"{layout} has biases of some of its projections only, which no plan can share")
    if style != "colwise" and style not in GATHERED:
        raise cannot([path], f"the plan has {style!r} for {layers[0]}, which is not known to hold for joined rows")
    plan.add(f"{prefix}{fused_layer}", style)
    if style in GATHERED:
        return layout  # gathered, the rows are in the order in which they were cut
    unit = fusion_named(carried.fusion).rows_together(module)
    if not unit:
        raise cannot([path], f"which rows of {', '.join(layers)} belong together, as those of a head do, is not known")
    for layer, rows in zip(layers, layout.sizes, strict=True):
        if rows % (unit * plan.processes):
            what = f"{rows // unit} heads of {unit} rows" if unit > 1 else f"{rows} rows"
            raise cannot(
                [layer],
                f"{what} can't be shared equally among {plan.processes} processes",
                "Take a tp_size that divides them, or leave the fusion out.",
            )
    return replace(layout, blocks=plan.processes)


def _share_experts(plan: Plan, path: str, carried: ModuleLayouts) -> None:
    """Share the layers of each expert as the plan has the stacks."""
    rules = plan.below(path)
    if not rules:
        return
    prefix, known = inside(path), {in_plan(path)}
    styles: dict[str, str] = {}
    for layout in carried.layouts:
        assert isinstance(layout, Matrices)
        (stack,) = layout.stock
        style = plan.of(f"{prefix}{stack}")
        known.add(in_plan(f"{prefix}{stack}"))
        if all(name.endswith("bias") for name in layout.layers) or style is None:
            continue
        # Of a matrix as transformers has it: (out, in), or (in, out) where it is transposed.
        of_outputs = style in (INPUTS if layout.transposed else OUTPUTS)
        if style not in (*OUTPUTS, *INPUTS):
            raise cannot(
                [f"{prefix}{stack}"],
                f"the plan has {style!r} for it, which is not known to hold for the layers of each expert",
                LEAVE_EXPERTS,
            )
        layers = {f"{prefix}{name.rpartition('.')[0]}" for name in layout.fused}
        styles |= dict.fromkeys(layers, "colwise" if of_outputs else "rowwise")
    unknown = sorted(rules.keys() - known)
    if unknown or set(styles.values()) != {"colwise", "rowwise"} or plan.of(path) != SUMMED_EXPERTS:
        listed = ", ".join(f"{name}: {style!r}" for name, style in rules.items())
        raise cannot(
            [path],
            f"the plan shares its stacks in a way that is not known to hold for the layers of each expert ({listed})",
            LEAVE_EXPERTS,
        )
    for layer, style in styles.items():
        plan.add(layer, style)
    plan.gone.update(rules.keys() - {in_plan(path)})
    plan.not_followed.add(in_plan(path))  # the layers that take some of the inputs sum the results themselves


def _converted(load: Selected) -> list[str]:
    """The modules that a class mapping has replaced and whose parameters are others, or are made by conversions."""
    paths = [item.path for item in load.record.replaced if item.path]
    if not paths:
        return []
    models = skeleton(load.record.model_class, load.model.config), load.model
    stock, own = ({name: value.shape for name, value in state_tensors(each).items()} for each in models)
    made = {name for each in from_scratch(load.model, load.record)[0] for name in each.parameters}
    changed = [name for name in {**stock, **own} if name in made or stock.get(name) != own.get(name)]
    return [path for path in paths if any(name.startswith(inside(path)) for name in changed)]


def _replicate(plan: Plan, path: str) -> None:
    """Have each process compute a module as a whole, where it takes and gives what all processes have.

    Raises:
        InvalidPatcherError: the plan gives it a share of something.
    """
    styles = set(plan.below(path).values())
    if styles and not (styles <= set(GATHERED) or (styles & set(OUTPUTS) and styles & {*INPUTS, SUMMED_EXPERTS})):
        listed = ", ".join(f"{name}: {style!r}" for name, style in plan.below(path).items())
        raise cannot(
            [path],
            f"a class mapping has replaced it and converts its weights, and the plan ({listed}) "
            "has it work on a share of something",
            "Replace the module around it, or load without tensor parallelism.",
        )
    plan.drop_below(path)
