"""The fourth step of a load: its keys are routed and checked, and the weights are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from patcher.compat.conversions import (
    copy_transform,
    is_prequantized,
    key_renamer,
    set_used_conversions,
    stock_conversions,
    with_model_prefix,
)
from patcher.compat.models import mark_initialized, named_modules, named_parameters, settle_keys, state_tensors, ties
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT, tell_blocks
from patcher.errors import PatchedWeightsError
from patcher.expressions import search
from patcher.layouts.carried import fused_modules
from patcher.layouts.layouts import lies_in_blocks
from patcher.layouts.sources import named_sources
from patcher.layouts.transforms import converts, is_concatenation
from patcher.loading.findings import fold_names, outcome_of_weights, sort_names
from patcher.loading.load import Loaded, Selected
from patcher.loading.router import Router, arrange_in_blocks
from patcher.loading.routes import Routing, unfit_error
from patcher.patterns import inside, parents
from patcher.resolution.resolution import skeleton


def read(
    selected: Selected,
    checkpoint: Mapping[str, Any],
    load_config: Any,
    read_weights: Callable[[Mapping[str, Any], Any], tuple[Any, Any]],
) -> Loaded:
    """Check the names and shapes of a checkpoint, then have its weights read, and check what became of them.

    Args:
        read_weights: called with a checkpoint and a load config; returns the loading info and the offload index.

    Raises:
        UnmatchedPatchError: a filter or a conversion had no effect.
        PatchedWeightsError: parameters of replaced modules are missing, tensors are left over, a conversion failed.
    """
    dry_run = selected.dry_run
    if dry_run is not None and not dry_run.has_checkpoint:
        return Loaded(**vars(selected), info=Routing())
    mapping = list(load_config.weight_mapping or [])
    routing = _route(selected, checkpoint, mapping, load_config)
    check = partial(check_weights, selected, routing, checkpoint)
    if dry_run is not None:
        planned = check(routing)
        for name, parameter in named_parameters(planned.model):  # so that transformers' own rules apply as in a load
            if name not in routing.absent:
                mark_initialized(parameter)
        settle_keys(planned.model, routing)
        return planned
    if problem := routing.problem or routing.failure:
        raise problem
    is_predictable = not is_prequantized(load_config.hf_quantizer) and not routing.conversion_errors
    loaded = check(routing) if is_predictable else None
    weights, conversions = dict(routing.rest), mapping
    if selected.runtime_layout:  # the renamings of transformers have been applied; the others are a quantizer's
        conversions = [item for item in mapping if isinstance(item, WeightConverter)]
    if routing.sources:
        named, conversion = named_sources(routing.sources)
        weights, conversions = {**weights, **named}, [conversion, *mapping]
    info, disk_index = read_weights(weights, replace(load_config, weight_mapping=conversions))
    set_used_conversions(selected.model, mapping, None if routing.is_runtime_layout else routing.used)
    if loaded is None or not routing.agrees_with(info):
        loaded = check(info)
    return replace(loaded, info=info, disk_index=disk_index)


def _route(selected: Selected, checkpoint: Mapping[str, Any], mapping: list[Any], load_config: Any) -> Routing:
    """Route the keys of a checkpoint."""
    model = selected.model
    if selected.runtime_layout:
        return _route_runtime_layout(model, checkpoint, mapping)

    def dtype(name: str) -> torch.dtype:
        """Return the dtype that the load gives a parameter."""
        plan: dict[str, torch.dtype] = load_config.dtype_plan or {}
        planned = next((kind for pattern, kind in plan.items() if re.search(pattern.replace("*", ".*"), name)), None)
        return planned or (router.state[name].dtype if name in router.state else torch.get_default_dtype())

    router = Router(
        model,
        checkpoint,
        mapping,
        selected.conversions.added,
        num_key_mapping=len(selected.key_mapping or ()),
        replaced=selected.record.paths_of_replacements,
        quantizer=load_config.hf_quantizer,
        dtype=dtype if selected.dry_run is None else None,
    )
    return router.run()


def _route_runtime_layout(model: PreTrainedModel, checkpoint: Mapping[str, Any], mapping: list[Any]) -> Routing:
    """Route a checkpoint with the parameters of the patched model, which aren't renamed."""
    state = state_tensors(model)
    renamings = [copy_transform(item) for item in mapping if not isinstance(item, WeightConverter)]
    rename = key_renamer(renamings, model, state)
    known = {key: with_model_prefix(key, model, state) for key in checkpoint}
    keys = {key if name in state else rename(name)[0]: key for key, name in known.items()}
    weights = {name: checkpoint[key] for name, key in keys.items()}
    # A base model accepts the names of a model with a head, and vice versa.
    placed = {with_model_prefix(name, model, state): tensor for name, tensor in weights.items()}
    routing = Router(model, placed).run()
    routing.rest, routing.sources, routing.is_runtime_layout = weights, {}, True
    layouts = [layout for carrier in fused_modules(model) for layout in carrier.fused]
    if any(map(lies_in_blocks, layouts)):
        arrange_in_blocks(routing.rest, {with_model_prefix(name, model, state): name for name in keys}, layouts)
    return routing


# --- checks ----------------------------------------------------------------------------------------------------------


def check_weights(selected: Selected, routing: Routing, checkpoint: Mapping[str, Any], info: Any) -> Loaded:
    """Check by the loading info, or an expected one, that the weights are what was requested, and record them.

    Raises:
        UnmatchedPatchError: a filter or a conversion had no effect.
        PatchedWeightsError: parameters of replaced modules are missing, tensors are left over, a conversion failed.
    """
    diagnostics = selected.diagnostics.with_error(routing.problem, strict=True)
    changes: dict[str, Any] = {
        "read": not routing.is_runtime_layout,
        "routes": tuple(route for route in routing.routes if route.is_carried),
        "dropped": selected.conversions.dropped,
    }
    if routing.failure is not None:
        diagnostics = replace(diagnostics, errors=(*diagnostics.errors, routing.failure))
    else:
        outcome = outcome_of_weights(selected, routing, checkpoint, info.unexpected_keys)
        if selected.dry_run is None:
            tell_blocks(outcome)
        diagnostics = diagnostics.with_unused(selected.requested, outcome, selected.model_class.__name__)
        weights = _Weights(selected, routing, checkpoint, info)
        diagnostics = diagnostics.with_error(weights.joining_error(), strict=True)
        diagnostics = diagnostics.with_error(weights.error(), strict=selected.strict)
        changes |= {"new_weights": weights.new, "dropped_weights": weights.dropped}
    values = vars(selected) | {"record": replace(selected.record, **changes), "diagnostics": diagnostics}
    return Loaded(**values, info=info, routing=routing)


class _Weights:
    """The weights of replaced modules that are `absent` or `left_over`, without declared `new` and `dropped` ones."""

    def __init__(self, selected: Selected, routing: Routing, checkpoint: Mapping[str, Any], info: Any) -> None:
        self.selected, self.routing, self.checkpoint, self.info = selected, routing, checkpoint, info
        self.model = model = selected.model
        self.patchers = [entry.patcher for entry in selected.in_force if not entry.is_registry]
        # Errors of a quantizer's conversions are raised by transformers, at the end.
        self.missing = set(info.missing_keys) - info.conversion_errors.keys()
        #: parameter -> the conversion of a patcher that makes it
        self.makers = {name: route.text for route in routing.routes if route.added for name in route.parameters}
        self.mismatched = {
            name: f"{f'{self.makers[name]} makes' if name in self.makers else 'the checkpoint has'} {tuple(shape)}, "
            f"the model has {tuple(expected)}"
            for name, shape, expected in info.mismatched_keys
        }
        self._replaced = tuple(inside(item.path) for item in selected.record.modules if item.chosen)
        # Conversions and filters apply to all names that they match: they may take what another module needs.
        is_converted = any(map(converts, self.patchers))
        amiss = self.missing | self.mismatched.keys()
        absent = {key for key in amiss if is_converted or self._is_under_replaced(key)}
        absent = absent - ties(model).keys() if absent else absent
        self.new = sort_names(self._declared(absent, "new_weights"))
        if absent:  # persistent buffers keep what was computed, so only parameters count
            absent &= {name for name, _ in named_parameters(model)}
        left_over = set(filter(self._is_under_replaced, info.unexpected_keys))
        self.dropped = sort_names(self._declared(left_over, "dropped_weights"))
        self.absent, self.left_over = absent.difference(self.new), left_over.difference(self.dropped)

    def _is_under_replaced(self, key: str) -> bool:
        # A checkpoint may have the prefix of the base model where the model's names have none, or vice versa.
        prefix = inside(self.model.base_model_prefix)
        return any(name.startswith(self._replaced) for name in (key, prefix + key, key.removeprefix(prefix)))

    def _declared(self, keys: Iterable[str], field: str) -> list[str]:
        expressions = [text for patcher in self.patchers for text in getattr(patcher, field)]
        return [key for key in keys if any(search(text, key) for text in expressions)]

    @cached_property
    def stock(self) -> Routing:
        """The routing of the checkpoint into the stock model."""
        stock, mapping = skeleton(self.selected.record.model_class, self.model.config), self.selected.key_mapping
        return Router(stock, self.checkpoint, stock_conversions(stock, dict(mapping) if mapping else None)).run()

    def joining_error(self) -> PatchedWeightsError | None:
        """Return the error for parts that patchers join, and that are missing or don't fit the stock model."""
        added = self.selected.conversions.added
        if not added or not (self.routing.absent or any(is_concatenation(item.transform) for item in added)):
            return None
        absent, resolve = self.routing.absent - ties(self.model).keys() - {*self.new}, self.routing.resolve
        sources = {name: key for name in self.stock.missing_keys if absent and (key := resolve(name)).added}
        joining = [item for item in self.routing.routes if item.added and is_concatenation(item.added[-1].transform)]
        parts = {name for item in joining for name in item.stock}
        misfits = [
            f"{name}: found {tuple(shape)}, expected {tuple(expected)}"
            for name, shape, expected in sorted(self.stock.mismatched_keys)
            if name in parts
        ]
        lacking = [name for name, key in sources.items() if key.name in absent]
        return unfit_error({"lacking": lacking, "misfits": misfits})

    def error(self) -> PatchedWeightsError | None:
        """Return the error for absent and left over weights, without those that the stock load would report too."""
        if error := self._unfused_layout_error():
            return error
        if self.absent or self.left_over:
            # What is missing or left over in fused modules of a runtime layout, stock knows by no name.
            fused, is_stock = fused_modules(self.model), not self.routing.is_runtime_layout
            layouts = [layout for carrier in fused if is_stock for layout in carrier.fused]
            own = tuple(inside(carrier.path) for carrier in fused if not is_stock)
            parts_of = {name: layout.stock for layout in layouts for name in layout.fused}
            self.absent = {key for key in self.absent if not self.stock.absent.issuperset(parts_of.get(key, (key,)))}
            self.left_over -= {key for key in self.stock.unexpected_keys if not key.startswith(own)}
        if not self.patchers or not (self.absent or self.left_over):
            return None
        return PatchedWeightsError(self._text())

    def _unfused_layout_error(self) -> PatchedWeightsError | None:
        """Return the error for a runtime layout whose modules, against what the config says, aren't fused here.

        Parameters inside of these are missing, and the checkpoint has others there. Outside of the model there may be
        weights of other heads.
        """
        entries = [entry for entry in self.selected.in_force if entry.origin in (FUSION_CONFIG, LAYOUT)]
        named = [name for entry in entries for name in entry.patcher.fusions]
        missing = self.missing & {name for name, _ in named_parameters(self.model)} if named else set()
        lacking = {path for key in missing for path in parents(key)[-2:]} - {""}
        paths = {path for path, _ in named_modules(self.model)} if lacking else set()
        others = self.info.unexpected_keys if lacking else ()
        fused = tuple(inside(carrier.path) for carrier in fused_modules(self.model)) if lacking else ()
        unfused = lacking & {next(path for path in reversed(parents(key)) if path in paths) for key in others}
        unfused = {path for path in unfused if not inside(path).startswith(fused)}
        if not unfused:
            return None
        return PatchedWeightsError(
            f"The config names fusions, {', '.join(map(repr, named))}, in whose layout the checkpoint is, and these "
            "modules of it are not fused here:\n"
            + "".join(f"  {path}\n" for path in fold_names(unfused))
            + f"Patcher(fusions={named!r}).resolve(model_class, config).refused says why. Load it with the releases "
            "that have saved it, and save it in the original format (the default)."
        )

    def _text(self) -> str:
        parameters = dict(named_parameters(self.model))
        absent = set(filter(self._is_under_replaced, self.absent))
        lines = []
        if elsewhere := self.absent - absent:
            lines.append("The patcher's conversions or filters take weights from modules that are not replaced:")
            lines += self._listed(elsewhere)
            if any(patcher.filtered_weight_conversion_patterns for patcher in self.patchers):
                lines.append(
                    "A filter drops a stock conversion for the whole model: replace every class that needs it, or "
                    "take the filter out."
                )
        if not absent and not self.left_over:
            return "\n".join(lines)
        lines.append("The replaced modules and the checkpoint don't fit together.")
        misfits = absent & self.mismatched.keys()
        if absent - misfits:
            lines.append("Not in the checkpoint, so these would keep their initial values:")
            lines += self._listed(absent - misfits)
        if misfits:
            lines.append("Of another shape than in the model:")
            lines += self._listed(misfits)
        if self.left_over:
            lines.append("In the checkpoint, and unused:")
            lines += self._listed(self.left_over)
        transposed = transpositions(item for item in self.info.mismatched_keys if item[0] not in self.makers)
        if transposed:
            lines.append("The checkpoint has some transposed. Convert them (from transformers.core_model_loading):")
            lines.append(f"  extra_weight_conversions=[{', '.join(transposed)}]")
        if misfits & self.makers.keys():
            lines.append("Correct the conversion, or give the parameter the shape that the conversion makes.")
        elif not transposed:
            lines.append(
                "If a conversion is missing, add it: "
                "extra_weight_conversions=[WeightConverter([...], [...], operations=[...])]."
            )
        declarations = {
            "new": f"new_weights={expressions_for(absent, parameters)}" if absent else "",
            "unused": f"dropped_weights={expressions_for(self.left_over, ())}" if self.left_over else "",
        }
        kinds = " or ".join(filter(declarations.get, declarations))
        additions = ", ".join(filter(None, declarations.values()))
        lines.append(f"If they are meant to be {kinds}, add to the Patcher: {additions}")
        if misfits:
            lines.append("Where shapes differ, load with ignore_mismatched_sizes=True as well.")
        return "\n".join(lines)

    def _listed(self, keys: set[str]) -> list[str]:
        """Return lines of names with their mismatched shapes; layers with the same shapes are folded."""
        by_text: dict[str, list[str]] = {}
        for key in sort_names(keys):
            by_text.setdefault(f": {self.mismatched[key]}" if key in self.mismatched else "", []).append(key)
        return [f"  {name}{text}" for text, names in by_text.items() for name in fold_names(names)]


# --- what to add to a patcher, as code -------------------------------------------------------------------------------


def transpositions(mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> list[str]:
    """Return the conversions, as code, for mismatched keys that the checkpoint has transposed."""
    names = sorted(
        name
        for name, shape, expected in mismatched
        if len(tuple(expected)) == 2 and tuple(expected) == tuple(shape)[::-1]
    )
    tails = dict.fromkeys(re.escape(".".join(name.split(".")[-2:])).replace(r"\.", ".") for name in names)
    return [f"WeightConverter({tail!r}, {tail!r}, operations=[Transpose(0, 1)])" for tail in tails]


def expressions_for(keys: set[str], others: Iterable[str]) -> list[str]:
    """Return expressions that match the keys by their tails, long enough to exclude the other parameters."""
    rest = {_segments(key) for key in others if key not in keys}
    tails = {parts[-length:] for parts in rest for length in range(2, len(parts))}
    result: dict[str, None] = {}
    for key in sort_names(keys):
        parts = _segments(key)
        escaped = [r"\d+" if part is None else re.escape(part) for part in parts]
        length = next((length for length in range(2, len(parts)) if parts[-length:] not in tails), None)
        if length is not None:
            expression = r"\." + r"\.".join(escaped[-length:]) + "$"
        else:
            expression = f"^{re.escape(key)}$" if parts in rest else "^" + r"\.".join(escaped) + "$"
        result[expression] = None
    return list(result)


def _segments(key: str) -> tuple[str | None, ...]:
    """Return the segments of a name, with None for each number."""
    return tuple(None if part.isdecimal() else part for part in key.split("."))
