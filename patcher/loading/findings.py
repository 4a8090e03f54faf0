"""What of a patcher has had no effect, and why: found where modules are constructed, and where weights are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import copy_transform, dot_natural_key, source_patterns, target_patterns
from patcher.compat.models import state_tensors, stock_class
from patcher.construction.construction import Construction
from patcher.construction.in_force import LAYOUT, InForce, Key, Outcome, Unused
from patcher.errors import InvalidPatcherError, PatchedWeightsError, PatcherError, UnmatchedPatchError, nearest, warn
from patcher.expressions import cut, search
from patcher.functions.models import NO_FUNCTIONS, Functions
from patcher.fusions.base import Fusion
from patcher.fusions.families import fusion_named
from patcher.layouts.transforms import conversions_of, converts, describe, identity
from patcher.loading.routes import Routing
from patcher.patterns import compress, is_expression, matches_path, nearest_paths
from patcher.resolution.resolution import NO_CHANGE, Resolution
from patcher.spec.like import Like
from patcher.spec.validation import MODULE_MAPPINGS, required_groups

if TYPE_CHECKING:
    from patcher.loading.load import Selected

#: Of more than so many problems, these are named: each is compared with what the model has.
_MOST = 10
#: (path, class) of the modules of a model, as they were before anything was replaced.
Places = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Diagnostics:
    """What is wrong with a load: raised at once where that is strict, otherwise one warning at its end.

    Attributes:
        warnings: the warnings at the end.
        errors: what a load would have raised, if it is one that goes on to find everything.
        goes_on: whether it is.
    """

    warnings: tuple[str, ...] = ()
    errors: tuple[PatcherError, ...] = ()
    goes_on: bool = False

    def adding(self, error: PatcherError | None, *, strict: bool) -> Diagnostics:
        """With one more, unless there is none."""
        if error is None:
            return self
        if not strict:
            return replace(self, warnings=(*self.warnings, str(error)))
        if not self.goes_on:
            raise error
        if self.errors and isinstance(error, PatchedWeightsError):
            return self  # which weights don't fit follows from what had no effect
        return replace(self, errors=(*self.errors, error))

    def with_unused(self, entries: Iterable[InForce], outcome: Outcome, model_name: str = "") -> Diagnostics:
        """With one error for each of these patchers that names all of it that has had no effect."""
        result = self
        for entry in entries:
            unused = list(islice(outcome.problems_of(entry), _MOST + 1))
            problems = [problem() for problem in unused[:_MOST]] + ["and others"] * (len(unused) > _MOST)
            name = f" {entry.patcher.name!r}" if entry.patcher.name else ""
            error = UnmatchedPatchError(
                f"These parts of the patcher{name} have no effect{f' in {model_name}' if model_name else ''}:\n"
                + "".join(f"  {problem}\n" for problem in problems)
                + "Correct it or take it out; with strict=False this is a warning."
            )
            result = result.adding(error if problems else None, strict=entry.patcher.strict)
        return result

    def warn(self) -> None:
        """Warn, at the line of the call of the load."""
        if self.warnings:
            warn("\n".join(dict.fromkeys(self.warnings)))


# --- modules -------------------------------------------------------------------------------------------------------


def outcome_of_modules(
    construction: Construction, model: PreTrainedModel | None = None, modules: Iterable[tuple[str, nn.Module]] = ()
) -> Outcome:
    """What of the patchers in force has had an effect on a model that is constructed, and why the rest hasn't.

    Args:
        modules: those of the model; of no model at all without any.
    """
    resolution: Resolution = construction.resolution or NO_CHANGE
    plan, functions = resolution.fusion_plan, construction.functions or NO_FUNCTIONS
    stock = [(path, stock_class(module)) for path, module in modules]
    places = tuple((path, cls.__name__) for path, cls in stock)
    classes = {cls.__name__: cls for _, cls in stock}
    used: set[Key] = set()
    unused: dict[Unused, Callable[[], str]] = {}
    for entry in construction.rules.entries:
        patcher = entry.patcher
        for group in required_groups(patcher.class_mapping, patcher.alternatives):
            unused[entry, "class_mapping", group] = partial(_no_class, group, places, classes)
        for key in patcher.module_mapping:
            unused[entry, "module_mapping", (key,)] = partial(_no_module, "module_mapping:", key, places)
        for fusion in patcher.fusions:
            fused, refused = plan.by_fusion.get(fusion, ()), plan.refused.get(fusion, {})
            # A layout is that of the whole model, of which a part may be loaded: what isn't fused, its weights say.
            patterns = (fusion.modules if isinstance(fusion, Fusion) else ()) or ("**",) * (entry.origin != LAYOUT)
            for pattern in patterns:
                unused[entry, "fusions", ((fusion, pattern),)] = partial(_not_fused, fusion, pattern, refused, places)
                if any(matches_path(pattern, path) for path in fused):
                    used.add((entry, "fusions", (fusion, pattern)))
        for key in patcher.function_mapping:
            unused[entry, "function_mapping", (key,)] = partial(_not_called, key, functions)
        if patcher.new_weights:
            names = tuple(state_tensors(model)) if model is not None else ()
            found = [each for each in patcher.new_weights if any(search(each, name) for name in names)]
            used |= {(entry, "new_weights", text) for text in found}
            unused |= _not_found(entry, "new_weights", "the name of no parameter", "parameters", names)
    for function in functions.replaced:
        used |= {(construction.rules.entries[number], "function_mapping", key) for number, key in function.keys}
    return construction.outcome | Outcome(frozenset(used), unused)


def _no_class(group: tuple[str, ...], places: Places, classes: Mapping[str, type[nn.Module]]) -> str:
    key, keys = group[0], f"{'any of ' if len(group) > 1 else ''}{', '.join(map(repr, group))}"
    return f"class_mapping: no class of the model matches {keys}{_meant(key, places, classes)}"


def _meant(key: str, places: Places, classes: Mapping[str, type[nn.Module]]) -> str:
    """What the key of a class was probably meant to be, and how it differs from that."""
    if isinstance(key, Like):
        close = nearest(key.target.rpartition(":")[2], classes, 1)
        return f"; nearest: {close[0]}, which differs: {key.why_not(classes[close[0]])}" if close else ""
    named = {name for path, name in places if "." in key and (name == key.rpartition(".")[2] or _is_at(key, path))}
    if named:
        return (
            ": a key is the bare name of a class, which is replaced wherever it is; write "
            f"{', '.join(map(repr, sorted(named)))}, or give a path in module_mapping"
        )
    if key in classes or (is_expression(key) and any(search(key, name) for name in classes)):
        return (
            ": the model has it, but not from modeling code: what that takes from torch's own namespace, `nn.Linear`, "
            "and what a replacement builds in its own code, is left alone. Replace the class that builds it"
        )
    return f"; {suggest(key, classes, 'classes')}"


def _is_at(key: str, path: str) -> bool:
    """Whether a path, or a pattern of paths, names the module at this one; `layers[0]` is how Python names it."""
    try:
        return matches_path(re.sub(r"\[(\d+)\]", r".\1", key), path)
    except InvalidPatcherError:
        return False


def _no_module(where: str, pattern: str, places: Places) -> str:
    near = nearest_paths(pattern, sorted({path for path, _ in places}, key=dot_natural_key))
    return f"{where} {pattern!r}, where the model has no module" + (f"; nearest: {', '.join(near)}" if near else "")


def _not_fused(fusion: str | Fusion, pattern: str, refused: Mapping[str, str], places: Places) -> str:
    named = {path for path, _ in places if matches_path(pattern, path)}
    if not named and pattern != "**":
        return _no_module(f"fusions: {fusion!r} is requested at", pattern, places)
    reasons: dict[str, list[str]] = {}
    for path in named & refused.keys():
        reasons.setdefault(refused[path], []).append(path)
    listed = sorted(f"{', '.join(folded(paths)[:2])} ({reason})" for reason, paths in reasons.items())[:5]
    hint = f"; it refused {', '.join(listed)}" if listed else ""
    if pattern == "**":
        subject = fusion_named(fusion).subject
        missing = f": no module of the model has {subject}" if subject else ""
        return f"fusions: {fusion!r} found no module that it can fuse{hint or missing}"
    inside = f"; what is inside of those that it names would be {pattern.removesuffix('.**')}.**"
    return f"fusions: {fusion!r} can't fuse any module that {pattern!r} names{hint or inside}"


def _not_called(key: str, functions: Functions) -> str:
    name = key.rpartition(":")[2]
    if name in functions.hints:
        hint = functions.hints[name]
    elif name in functions.known:
        hint = f": the model calls another function of that name; write {name!r} for any"
    else:
        hint = f"; {suggest(name, functions.known, 'functions')}"
    return f"function_mapping: nothing in the modeling code calls {key!r}{hint}"


# --- weights -------------------------------------------------------------------------------------------------------


def outcome_of_weights(
    selected: Selected, routing: Routing, checkpoint: Mapping[str, Any], unexpected: Iterable[str]
) -> Outcome:
    """What filters, conversions and dropped weights had an effect on the checkpoint, and why the rest hadn't."""
    entries = [each for each in selected.in_force if converts(each.patcher) or each.patcher.dropped_weights]
    if not entries:
        return Outcome()
    conversions, keys = selected.conversions, tuple(checkpoint)
    effective = {each for route in routing.routes for each in route.by}
    done = {identity(each.transform) for each in (conversions.added if selected.runtime_layout else effective)}
    dropped = {text for _, text in conversions.dropped}
    stock = [*conversions.kept, *(transform for transform, _ in conversions.dropped)]
    patterns = {text for each in stock for text in (*source_patterns(each), *target_patterns(each))}
    parameters = tuple(state_tensors(selected.model)) if len(done) < len(conversions.added) else ()
    used: set[Key] = set()
    unused: dict[Unused, Callable[[], str]] = {}
    for entry in entries:
        field = "filtered_weight_conversion_patterns"
        used |= {(entry, field, text) for text in dropped} | {(entry, "conversions", each) for each in done}
        unused |= _not_found(entry, field, "no conversion of the model", "patterns", patterns)
        for where, transform in _conversions(entry, selected.outcome):
            reason = partial(_idle, where, transform, keys, parameters)
            unused[entry, "conversions", (identity(transform),)] = reason
        texts = entry.patcher.dropped_weights
        names = {*keys, *unexpected}
        found = [each for each in texts if selected.runtime_layout or any(search(each, name) for name in names)]
        used |= {(entry, "dropped_weights", text) for text in found}
        unused |= _not_found(entry, "dropped_weights", "no key of the checkpoint", "checkpoint keys", keys)
    return Outcome(frozenset(used), unused)


def _conversions(entry: InForce, outcome: Outcome) -> Iterator[tuple[str, WeightTransform]]:
    """The conversions of a patcher, with where they are written; of classes only those that were built."""
    for transform in entry.patcher.extra_weight_conversions:
        yield "extra_weight_conversions", transform
    keys = [(field, key) for field in MODULE_MAPPINGS for key in getattr(entry.patcher, field)]
    built = {getattr(entry.patcher, field)[key]: None for field, key in keys if (entry, field, key) in outcome.used}
    for cls in built:
        yield from ((f"{cls.__qualname__}.conversion_mapping", transform) for transform in conversions_of(cls))


def _idle(where: str, transform: WeightTransform, keys: Iterable[str], parameters: Iterable[str]) -> str:
    """Why a conversion did nothing: no tensor is called like a source of it, or no parameter like its target."""
    renaming = copy_transform(transform)
    made = folded({name for name, pattern in map(renaming.rename_source_key, keys) if pattern is not None})
    if not made:
        nearest_keys = suggest(source_patterns(transform)[0], folded(keys), "checkpoint keys")
        return f"{where}: {describe(transform)} took no tensor; {nearest_keys}"
    known = folded(parameters)
    if where.endswith(".conversion_mapping") and made[0] in known:
        return (
            f"{where}: {describe(transform)} took no tensor: names in the conversion_mapping of a class begin inside "
            "of the module that it replaces, without the name of that module"
        )
    return (
        f"{where}: {describe(transform)} makes {', '.join(map(cut, made[:3]))}, which the model doesn't have; "
        f"{suggest(made[0], known, 'parameters')}"
    )


# --- names ---------------------------------------------------------------------------------------------------------


def _not_found(
    entry: InForce, field: str, where: str, what: str, known: Collection[str]
) -> dict[Unused, Callable[[], str]]:
    """How to say of each expression of a field that it is found nowhere, with the nearest of what there is."""

    def reason(text: str) -> str:
        names = known if what == "patterns" else folded(known)
        return f"{field}: {text!r} is found in {where}; {suggest(text, names, what)}"

    return {(entry, field, (text,)): partial(reason, text) for text in getattr(entry.patcher, field)}


def suggest(name: str, candidates: Iterable[str], what: str) -> str:
    """The nearest of some names to one that is none of them, or what there is."""
    known = sorted(candidates)
    # Whole; by tails (`q_proj.weight` is near to `model.layers.{0..1}.self_attn.q_proj.weight`); by segments.
    tails = {text[-len(name) :]: text for text in known if len(text) > len(name)}
    segments = {segment: text for text in reversed(known) for segment in text.split(".")}
    last = re.sub(r"[\\^$]", "", name).split(".")[-1]
    for wanted, places in ((name, {text: text for text in known}), (name, tails), (last, segments)):
        if close := nearest(wanted, places):
            return f"nearest: {', '.join(cut(places[each]) for each in close)}"
    if not known:
        return f"the model has no {what}"
    return f"it has {', '.join(map(cut, known[:8]))}{', ...' if len(known) > 8 else ''}"


def ordered(keys: Iterable[str]) -> tuple[str, ...]:
    """Names in the order of the layers."""
    return tuple(sorted(keys, key=dot_natural_key))


def folded(keys: Iterable[str]) -> list[str]:
    """The same, with runs of numbers folded."""
    return compress(ordered(keys))
