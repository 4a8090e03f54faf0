"""Tensor and expert parallelism of a patched model: translate the plan of transformers to the names of its layers.

A plan says how the layers of a model are sharded among processes, by their names in transformers:

    model.layers.*.self_attn.q_proj    colwise          each process computes some of the outputs
    model.layers.*.self_attn.o_proj    rowwise          each takes some of the inputs, and the results are summed

Joined projections are sharded as their parts would be: the rows lie in as many blocks as there are processes, each
with its share of every part, so that a process which takes one block has its own heads of queries, keys and values.
The layers of experts are sharded one by one. Weights that a class mapping has converted are replicated.

Errors are raised before a weight is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn

from patcher.compat.models import in_plan, named_modules, set_plans, sizes, state_tensors
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
from patcher.layouts.carried import ModuleLayouts, carry, fused_modules
from patcher.layouts.layouts import Layout, Rows, lies_in_blocks
from patcher.loading.load import Selected
from patcher.loading.state_dicts import check_no_part_named, layer_name, parts_of, routes_from_scratch
from patcher.patterns import inside
from patcher.resolution.resolution import skeleton

#: The arguments with which `from_pretrained` shards a model.
ARGUMENTS = ("distributed_config", "tp_plan", "tp_size")
#: The advice where the layers of experts can't be sharded.
LEAVE_EXPERTS = "Leave sequential_experts out; stacks of experts are sharded as in transformers."


def follow_plan(load: Selected, quantizer: Any) -> None:
    """Translate the plan of a model to the layers that it has, and order its joined rows by process.

    Raises:
        InvalidPatcherError: if a layer can't be sharded as the plan says; the message has an alternative.
    """
    if all(load.options.get(name) is None for name in ARGUMENTS):  # a saved config may have a plan without them
        return
    config = load.model.config.distributed_config
    count = sizes(config)
    if max(count) > 1 and quantizer is not None and (fused_modules(load.model) or load.conversions.added):
        raise InvalidPatcherError(
            "A patcher with weight conversions was used together with a quantizer and a distributed_config that "
            "shards weights among processes; that is not supported. Leave the fusions and conversions out, or the "
            "quantizer, or load in one process."
        )
    if count.tensors == count.experts == 1:
        return
    modules: dict[str, set[str]] = {}
    for path, _ in named_modules(load.model):
        modules.setdefault(in_plan(path), set()).add(path)
    _check_names(load, config, modules)
    plan = Plan(tensor_plan(load.model, config), count.tensors)
    expert_plan = {**(getattr(load.model, "ep_plan", None) or {}), **(getattr(config, "ep_plan", None) or {})}
    experts = Plan(expert_plan if count.experts > 1 else {}, count.experts)
    # Before 5.19 experts were distributed to processes by a plan that replaces that of tensor parallelism.
    are_distributed = bool(getattr(config, "enable_expert_parallel", False)) and not hasattr(config, "ep_size")
    for path in _converted(load):  # first, as fused modules in one that has all of its weights have theirs
        _replicate(plan, path)
        experts.drop_below(path)
    changes = []
    for path, module, carried in fused_modules(load.model):
        if isinstance(module, ListedExperts) and (are_distributed or experts.below(path)):
            raise cannot([path], "ep_size distributes stacks of experts, and these are layers", LEAVE_EXPERTS)
        changes.append((module, _shard(plan, path, module, carried)))
    rules, expert_rules = plan.result(modules), experts.result(modules) if count.experts > 1 else None
    _check_followed(config, rules)
    for module, carried in changes:  # last, so that a refused plan leaves the model unchanged
        carry(module, carried)
        for layout in filter(lies_in_blocks, carried.layouts):
            layer, _, kind = layout.fused[0].rpartition(".")
            if kind == "weight":
                setattr(module, f"{layer}_sizes", layout.block_sizes)
    set_plans(load.model, rules, expert_rules)


def _check_names(load: Selected, config: Any, modules: Collection[str]) -> None:
    """Refuse plans whose rules match parts of joined layers and no module of the model."""
    parts = parts_of(load)
    for argument in ("tp_plan", "ep_plan"):
        plan = getattr(config, argument, None)
        if isinstance(plan, dict):
            unused = plan.keys() - modules
            named = {name for name in parts if not unused.isdisjoint((in_plan(name), in_plan(layer_name(name))))}
            check_no_part_named(argument, named, parts)


def _check_followed(config: Any, rules: dict[str, str]) -> None:
    """Refuse a plan that is passed as an argument if the patched model can't follow it."""
    if not isinstance(config.tp_plan, dict):
        return
    if others := sorted(config.tp_plan.keys() - rules.keys()):
        raise cannot(others, "the patched model has other layers there", "Leave them out of tp_plan.")
    if replaces_plan(config) and (absent := sorted(rules.keys() - config.tp_plan.keys())):
        raise cannot(absent, "tp_plan has rules for their parts only", "Name them in tp_plan.")


def _shard(plan: Plan, path: str, module: nn.Module, carried: ModuleLayouts) -> ModuleLayouts:
    """Add the rules for a fused module to the plan, and return its layouts under that plan.

    Raises:
        InvalidPatcherError: if the layers can't be sharded as their parts would be.
    """
    if any(isinstance(layout, Matrices) for layout in carried.layouts):
        _shard_experts(plan, path, carried)
        return carried
    layouts: list[Layout] = []
    for layout in carried.layouts:
        layers = [f"{inside(path)}{name}".rpartition(".")[0] for name in layout.stock]
        if type(layout) is Rows:
            layout = _shard_rows(plan, path, module, carried, layout)
        elif sharded := [layer for layer in layers if plan.style(layer)]:
            raise cannot(sharded, f"how to shard {layout} is not known")
        layouts.append(layout)
    return replace(carried, layouts=tuple(layouts))


def _shard_rows(plan: Plan, path: str, module: nn.Module, carried: ModuleLayouts, layout: Rows) -> Rows:
    prefix = inside(path)
    layers = [f"{prefix}{name.rpartition('.')[0]}" for name in layout.stock]
    styles = {layer: plan.style(layer) for layer in layers}
    (style, *others) = set(styles.values())
    fused_layer, _, kind = layout.fused[0].rpartition(".")
    if others or any(plan.style(f"{prefix}{name}") for name in (*layout.stock, *layout.fused)):
        listed = ", ".join(f"{layer}: {of_layer!r}" for layer, of_layer in styles.items())
        raise cannot([path], f"the plan shards the projections joined here in several ways ({listed})")
    style = style or plan.style(f"{prefix}{fused_layer}")
    if style is None:
        return layout
    plan.removed.update(map(in_plan, layers))
    if not fused_layer or kind not in ("weight", "bias"):  # biases of some of the projections only
        if style in GATHERED:
            return layout
        raise cannot([path], f"{layout} has biases of some of its projections only, which no plan can shard")
    if style != "colwise" and style not in GATHERED:
        raise cannot([path], f"the plan has {style!r} for {layers[0]}, which is not known to hold for joined rows")
    plan.add(f"{prefix}{fused_layer}", style)
    if style in GATHERED:
        return layout  # gathered outputs are in the order of the rows
    unit = fusion_named(carried.fusion).rows_together(module)
    if not unit:
        raise cannot([path], f"which rows of {', '.join(layers)} belong together, as those of a head do, is not known")
    for layer, rows in zip(layers, layout.sizes, strict=True):
        if rows % (unit * plan.processes):
            size = f"{rows // unit} heads of {unit} rows" if unit > 1 else f"{rows} rows"
            raise cannot(
                [layer],
                f"{size} can't be sharded equally among {plan.processes} processes",
                "Take a tp_size that divides them, or leave the fusion out.",
            )
    return replace(layout, blocks=plan.processes)


def _shard_experts(plan: Plan, path: str, carried: ModuleLayouts) -> None:
    """Add rules for the layers of experts that shard them as the plan shards the stacks."""
    rules = plan.below(path)
    if not rules:
        return
    prefix, known = inside(path), {in_plan(path)}
    styles: dict[str, str] = {}
    for layout in carried.layouts:
        assert isinstance(layout, Matrices)
        (stack,) = layout.stock
        style = plan.style(f"{prefix}{stack}")
        known.add(in_plan(f"{prefix}{stack}"))
        if all(name.endswith("bias") for name in layout.layers) or style is None:
            continue
        # Matrices are (out, in) in transformers, or (in, out) if they are transposed.
        splits_outputs = style in (INPUTS if layout.transposed else OUTPUTS)
        if style not in (*OUTPUTS, *INPUTS):
            raise cannot(
                [f"{prefix}{stack}"],
                f"the plan has {style!r} for it, which is not known to hold for the layers of each expert",
                LEAVE_EXPERTS,
            )
        layers = {f"{prefix}{name.rpartition('.')[0]}" for name in layout.fused}
        styles |= dict.fromkeys(layers, "colwise" if splits_outputs else "rowwise")
    unknown = sorted(rules.keys() - known)
    if unknown or set(styles.values()) != {"colwise", "rowwise"} or plan.style(path) != SUMMED_EXPERTS:
        listed = ", ".join(f"{name}: {style!r}" for name, style in rules.items())
        raise cannot(
            [path],
            f"the plan shards its stacks in a way that is not known to hold for the layers of each expert ({listed})",
            LEAVE_EXPERTS,
        )
    for layer, style in styles.items():
        plan.add(layer, style)
    plan.removed.update(rules.keys() - {in_plan(path)})
    plan.not_followed.add(in_plan(path))  # rowwise layers sum the results themselves


def _converted(load: Selected) -> list[str]:
    """Return the replaced modules with other parameters than in stock, or converted ones; of fusions none count."""
    paths = [item.path for item in load.record.replaced if item.path]
    if not paths:
        return []
    models = skeleton(load.record.model_class, load.model.config), load.model
    stock, patched = ({name: value.shape for name, value in state_tensors(model).items()} for model in models)
    converted = {name for route in routes_from_scratch(load.model, load.record)[0] for name in route.parameters}
    fused = {
        name for each in fused_modules(load.model) for layout in each.fused for name in (*layout.stock, *layout.fused)
    }
    others = {name for name in {**stock, **patched} if stock.get(name) != patched.get(name)} - fused
    return [path for path in paths if any(name.startswith(inside(path)) for name in converted | others)]


def _replicate(plan: Plan, path: str) -> None:
    """Drop the rules for a module if its inputs and outputs are whole, so that each process has all of it.

    Raises:
        InvalidPatcherError: if the plan gives it a share of its inputs or outputs.
    """
    styles = set(plan.below(path).values())
    if styles and not (styles <= set(GATHERED) or (styles & set(OUTPUTS) and styles & {*INPUTS, SUMMED_EXPERTS})):
        listed = ", ".join(f"{name}: {style!r}" for name, style in plan.below(path).items())
        raise cannot(
            [path],
            f"a class mapping has replaced it and converts its weights, and the plan ({listed}) "
            "gives it a share of its inputs or outputs",
            "Replace the module around it, or load without tensor parallelism.",
        )
    plan.drop_below(path)
