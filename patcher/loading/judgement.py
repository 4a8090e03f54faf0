"""Whether the weights that were read, or would be, are what was requested; and what is recorded of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from patcher.compat.conversions import copy_transform, source_patterns, target_patterns
from patcher.compat.models import state_tensors
from patcher.construction.in_force import InForce, Matched, tell_blocks
from patcher.errors import PatchedWeightsError
from patcher.expressions import Expressions
from patcher.layouts.conversion import Converted
from patcher.layouts.selection import converts
from patcher.layouts.transforms import identity, is_concatenation
from patcher.loading.checks import Diagnostics, check_weights, failed_text
from patcher.loading.load import Loaded, Selected
from patcher.loading.matches import idle_source
from patcher.loading.routes import Routing, joined_wrong


def judge(
    selected: Selected,
    routing: Routing,
    checkpoint: Mapping[str, Any],
    info: Any,
    stock_routing: Callable[[], Routing],
) -> Loaded:
    """Record what was done with the weights, and check that it is what was requested.

    Args:
        info: what transformers knows of the load, or would know.
        stock_routing: gives what the unpatched load would do with the checkpoint.

    Raises:
        UnmatchedPatchError: a filter or a conversion had no effect.
        PatchedWeightsError: parameters of replaced modules are missing, tensors are left over, a conversion failed.
    """
    diagnostics = selected.diagnostics.adding(routing.problem, strict=True)
    done: dict[str, Any] = {
        "read": not routing.is_runtime_layout,
        "routes": tuple(route for route in routing.routes if route.is_carried),
        "dropped": selected.conversions.dropped,
    }
    if routing.failure is not None:
        diagnostics = replace(diagnostics, errors=(*diagnostics.errors, routing.failure))
        return _loaded(selected, routing, info, diagnostics, done)
    if _fails_to_quantize(info, routing):
        raise PatchedWeightsError(failed_text(info.conversion_errors, selected.model))
    matched = selected.matched | _matched_by_reading(selected, routing, checkpoint, info.unexpected_keys)
    if selected.dry_run is None:
        tell_blocks(matched)
    for entry in selected.own:
        classes = not entry.patcher.strict  # otherwise what the model doesn't have was said when it was built
        diagnostics = diagnostics.adding_matches([entry], matched, selected.model_class.__name__, classes=classes)
    expressions = [text for entry in selected.in_force for text in entry.patcher.new_weights]
    if routing.made_of or any(is_concatenation(each.transform) for each in selected.conversions.added):
        diagnostics = diagnostics.adding(joined_wrong(routing, stock_routing(), Expressions(expressions)), strict=True)
    found = check_weights(
        selected.model,
        selected.record.replaced,
        selected.in_force,
        info,
        missing=selected.traits.without_aliases(set(info.missing_keys), expressions),
        parts_of=routing.parts_of,
        checkpoint=checkpoint,
        idle=_idle_sources(routing, checkpoint),
        stock_outcome=stock_routing,
    )
    diagnostics = diagnostics.adding(found.error, strict=selected.strict)
    done |= {"new_weights": selected.traits.with_aliases(found.new), "dropped_weights": found.dropped}
    return _loaded(selected, routing, info, diagnostics, done)


def _loaded(
    selected: Selected, routing: Routing, info: Any, diagnostics: Diagnostics, done: Mapping[str, Any]
) -> Loaded:
    values = vars(selected) | {"record": replace(selected.record, **done), "diagnostics": diagnostics}
    return Loaded(**values, info=info, routing=routing)


def _fails_to_quantize(info: Any, routing: Routing) -> bool:
    """Whether a quantizer has raised for parameters that conversions of patchers have made."""
    made = {name for route in routing.routes if route.by for name in route.parameters}
    return not made.isdisjoint(info.conversion_errors)


def _idle_sources(routing: Routing, checkpoint: Mapping[str, Any]) -> list[str]:
    """What is said of source patterns that took nothing while others of the same conversion did."""
    taken: dict[Any, set[str]] = {}
    for route in routing.routes:
        if route.by and isinstance(route.layout, Converted):
            taken.setdefault(route.by[-1], set()).update(route.layout.patterns)
    return [
        idle_source(added.transform, text, checkpoint)
        for added, patterns in taken.items()
        for text, pattern in zip(source_patterns(added.transform), added.transform.source_patterns, strict=True)
        if pattern not in patterns
    ]


def _matched_by_reading(
    selected: Selected, routing: Routing, checkpoint: Mapping[str, Any], unexpected: Iterable[str]
) -> Matched:
    """Which filters, conversions and dropped weights had an effect, and what there was for them."""
    entries = [entry for entry in selected.in_force if converts(entry.patcher) or entry.patcher.dropped_weights]
    if not entries:
        return Matched(has_read=True)
    added = selected.conversions.added
    parameters = set(state_tensors(selected.model)) if added else set()
    names = {*checkpoint, *unexpected}
    effective = added if selected.runtime_layout else routing.effective
    done = {identity(each.transform) for each in effective}
    idle = [each for each in added if identity(each.transform) not in done]
    keys: set[tuple[InForce, str, Hashable]] = set()
    for entry in entries:
        keys |= {(entry, "filtered_weight_conversion_patterns", text) for _, text in selected.conversions.dropped}
        keys |= {(entry, "conversions", each) for each in done}
        dropped = Expressions(entry.patcher.dropped_weights)
        found = entry.patcher.dropped_weights if selected.runtime_layout else dropped.found_among(names)
        keys |= {(entry, "dropped_weights", text) for text in found}
    stock = [*selected.conversions.kept, *(transform for transform, _ in selected.conversions.dropped)]
    patterns = {text for each in stock for text in (*source_patterns(each), *target_patterns(each))}
    renamed = set()
    for each in idle:  # what it would make, which the model doesn't have
        renaming = copy_transform(each.transform)
        made = {renaming.rename_source_key(key) for key in checkpoint}
        renamed |= {(identity(each.transform), name) for name, pattern in made if pattern is not None}
    return Matched(
        frozenset(keys),
        parameters=frozenset(parameters),
        patterns=frozenset(patterns),
        checkpoint_keys=frozenset(checkpoint),
        renamed=frozenset(renamed),
        has_read=True,
    )
