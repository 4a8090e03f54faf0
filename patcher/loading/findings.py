"""The parts of a patcher that have no effect, and why: in the modules of a model, and in the weights of a load."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, WeightTransform

from patcher.compat.conversions import (
    copy_transform,
    dot_natural_key,
    source_patterns,
    stock_revert,
    target_patterns,
)
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
from patcher.patterns import compress, inside, is_expression, matches_path, nearest_paths
from patcher.resolution.resolution import NO_CHANGE, Resolution, skeleton
from patcher.spec.forward_of import shown_name
from patcher.spec.like import Like
from patcher.spec.validation import MODULE_MAPPINGS, required_groups

if TYPE_CHECKING:
    from patcher.loading.load import Selected

#: How many problems of a patcher are explained: each of them is compared with the names of the model.
_MAX_PROBLEMS = 10
#: (path, name of the stock class) of the modules of a model.
Places = tuple[tuple[str, str], ...]
#: Unused part of a patcher -> a function that explains why.
Explanations = dict[Unused, Callable[[], str]]


@dataclass(frozen=True)
class Diagnostics:
    """The problems of a load: raised at once if strict, otherwise one warning at its end."""

    warnings: tuple[str, ...] = ()
    errors: tuple[PatcherError, ...] = ()
    #: whether the load goes on after an error, to find all of them
    collects_errors: bool = False

    def with_error(self, error: PatcherError | None, *, strict: bool) -> Diagnostics:
        """Return the diagnostics with one more problem; raise it if that is due."""
        if error is None:
            return self
        if not strict:
            return replace(self, warnings=(*self.warnings, str(error)))
        if not self.collects_errors:
            raise error
        if self.errors and isinstance(error, PatchedWeightsError):
            return self  # weights that don't fit are a consequence of what had no effect
        return replace(self, errors=(*self.errors, error))

    def with_unused(self, entries: Iterable[InForce], outcome: Outcome, model_name: str = "") -> Diagnostics:
        """Return the diagnostics with one error per patcher, which lists its parts without effect."""
        result = self
        for entry in entries:
            unused = list(islice(outcome.problems_of(entry), _MAX_PROBLEMS + 1))
            problems = [explain() for explain in unused[:_MAX_PROBLEMS]]
            problems += ["and others"] * (len(unused) > _MAX_PROBLEMS)
            name = f" {entry.patcher.name!r}" if entry.patcher.name else ""
            error = UnmatchedPatchError(
                f"These parts of the patcher{name} have no effect{f' in {model_name}' if model_name else ''}:\n"
                + "".join(f"  {problem}\n" for problem in problems)
                + "Correct or remove them; with strict=False this is a warning."
            )
            result = result.with_error(error if problems else None, strict=entry.patcher.strict)
        return result

    def warn(self) -> None:
        """Warn, at the line that called the load."""
        if self.warnings:
            warn("\n".join(dict.fromkeys(self.warnings)))


# --- modules -------------------------------------------------------------------------------------------------------


def outcome_of_modules(
    construction: Construction, model: PreTrainedModel | None = None, modules: Iterable[tuple[str, nn.Module]] = ()
) -> Outcome:
    """Return which parts of the patchers in force affected the modules of a model, and why the others didn't."""
    resolution: Resolution = construction.resolution or NO_CHANGE
    functions: Functions = construction.functions or NO_FUNCTIONS
    stock = [(path, stock_class(module)) for path, module in modules]
    places = tuple((path, cls.__name__) for path, cls in stock)
    classes = {cls.__name__: cls for _, cls in stock}
    built = [(item.match.original.__name__, shown_name(item.match.replacement)) for item in construction.built]
    replaced = [f"{original} by {replacement}" for original, replacement in dict.fromkeys(built)]
    used: set[Key] = set()
    unused: Explanations = {}
    for entry in construction.rules.entries:
        patcher = entry.patcher
        for group in required_groups(patcher.class_mapping, patcher.alternatives):
            explain = partial(_unmatched_classes, group, places, classes, construction.rules.replacements)
            unused[entry, "class_mapping", group] = explain
        for key in patcher.module_mapping:
            unused[entry, "module_mapping", (key,)] = partial(_unmatched_path, "module_mapping:", key, places)
        for fusion in patcher.fusions:
            fused = [path for path, request in resolution.fusions.items() if request == fusion]
            refused = resolution.refusals.get(fusion, {})
            # A layout on disk is that of a whole model, of which a part may be loaded: its weights are checked later.
            patterns = (fusion.modules if isinstance(fusion, Fusion) else ()) or ("**",) * (entry.origin != LAYOUT)
            for pattern in patterns:
                explain = partial(_unused_fusion, fusion, pattern, refused, places, replaced)
                unused[entry, "fusions", ((fusion, pattern),)] = explain
                if any(matches_path(pattern, path) for path in fused):
                    used.add((entry, "fusions", (fusion, pattern)))
        for key in patcher.function_mapping:
            unused[entry, "function_mapping", (key,)] = partial(_uncalled_function, key, functions)
        if patcher.new_weights:
            names = tuple(state_tensors(model)) if model is not None else ()
            matches = [text for text in patcher.new_weights if any(search(text, name) for name in names)]
            used |= {(entry, "new_weights", text) for text in matches}
            unused |= _unmatched_expressions(entry, "new_weights", "no parameter", "parameters", names)
    for function in functions.replaced:
        used |= {(construction.rules.entries[index], "function_mapping", key) for index, key in function.keys}
    if model is None:
        unused = {part: partial(_nothing_built, *part[1:]) for part in unused}
    return construction.outcome | Outcome(frozenset(used), unused)


def _nothing_built(field: str, keys: Sequence[Any]) -> str:
    key = keys[0][0] if field == "fusions" else keys[0]
    return f"{field}: {key!r}; no model was built in the block, in the thread or task that has entered it"


def _unmatched_classes(
    group: tuple[str, ...], places: Places, classes: Mapping[str, type[nn.Module]], replacements: Container[Any]
) -> str:
    key, keys = group[0], f"{'any of ' if len(group) > 1 else ''}{', '.join(map(repr, group))}"
    return f"class_mapping: no class of the model matches {keys}{_class_hint(key, places, classes, replacements)}"


def _class_hint(key: str, places: Places, classes: Mapping[str, type[nn.Module]], replacements: Container[Any]) -> str:
    """Return what the key of a class was probably meant to be."""
    if isinstance(key, Like):
        close = nearest(key.target.rpartition(":")[2], classes, 1)
        if not close:
            return ""
        why = key.why_not(classes[close[0]])
        return f"; nearest: {close[0]}, which {f'differs: {why}' if why else 'is a replacement itself: it needs none'}"
    last = key.rpartition(".")[2]
    named = {name for path, name in places if "." in key and (name == last or _is_path_of(key, path))}
    if named:
        return (
            ": a key is the bare name of a class, which is replaced wherever it is; write "
            f"{', '.join(map(repr, sorted(named)))}, or give a path in module_mapping"
        )
    found = [cls for name, cls in classes.items() if key == name or (is_expression(key) and search(key, name))]
    if replacing := [repr(cls.__name__) for cls in found if key not in classes and cls in replacements]:
        return f": an expression leaves replacements alone; as a key of its own write {', '.join(replacing)}"
    if found:
        return (
            ": the model has it, but not from modeling code: what that takes from torch's own namespace, `nn.Linear`, "
            "and what a replacement builds in its own code, is left alone. Replace the class that builds it, or give "
            "a path in module_mapping"
        )
    return f"; {suggest(key, classes, 'classes')}"


def _is_path_of(key: str, path: str) -> bool:
    """Whether a key is a path or path pattern of the module at this path; `layers[0]` is accepted as well."""
    try:
        return matches_path(re.sub(r"\[(\d+)\]", r".\1", key), path)
    except InvalidPatcherError:
        return False


def _unmatched_path(where: str, pattern: str, places: Places) -> str:
    near = nearest_paths(pattern, sorted({path for path, _ in places}, key=dot_natural_key))
    return f"{where} {pattern!r}, where the model has no module" + (f"; nearest: {', '.join(near)}" if near else "")


def _unused_fusion(
    fusion: str | Fusion, pattern: str, refused: Mapping[str, str], places: Places, replaced: Sequence[str]
) -> str:
    named = {path for path, _ in places if matches_path(pattern, path)}
    if not named and pattern != "**":
        return _unmatched_path(f"fusions: {fusion!r} is requested at", pattern, places)
    reasons: dict[str, list[str]] = {}
    for path in named & refused.keys():
        reasons.setdefault(refused[path], []).append(path)
    listed = sorted(f"{', '.join(fold_names(paths)[:2])} ({reason})" for reason, paths in reasons.items())[:5]
    hint = f"; it refused {', '.join(listed)}" if listed else ""
    if pattern == "**":
        subject = fusion_named(fusion).subject
        missing = f": no module of the model has {subject}" if subject else ""
        missing += f"; mappings have replaced {', '.join(replaced)}" if replaced else ""
        return f"fusions: {fusion!r} found no module that it can fuse{hint or missing}"
    inside = f"; what is inside of those that it names would be {pattern.removesuffix('.**')}.**"
    return f"fusions: {fusion!r} can't fuse any module that {pattern!r} names{hint or inside}"


def _uncalled_function(key: str, functions: Functions) -> str:
    name = key.rpartition(":")[2]
    if name in functions.hints:
        hint = functions.hints[name]
    elif name in functions.known and name == key:
        hint = " but its replacement, which is the same function"
    elif name in functions.known:
        hint = f": the model calls another function of that name; write {name!r} for any"
    else:
        hint = f"; {suggest(name, functions.known, 'functions')}"
    return f"function_mapping: nothing in the modeling code calls {key!r}{hint}"


# --- weights -------------------------------------------------------------------------------------------------------


def outcome_of_weights(
    selected: Selected, routing: Routing, checkpoint: Mapping[str, Any], unexpected: Iterable[str]
) -> Outcome:
    """Return which filters, conversions and dropped weights affected the checkpoint, and why the others didn't."""
    entries = [entry for entry in selected.in_force if converts(entry.patcher) or entry.patcher.dropped_weights]
    if not entries:
        return Outcome()
    conversions, keys = selected.conversions, tuple(checkpoint)
    routed = {added for route in routing.routes for added in route.added}
    run = {identity(added.transform) for added in (conversions.added if selected.runtime_layout else routed)}
    matching_filters = {text for _, text in conversions.dropped}
    stock = [*conversions.kept, *(transform for transform, _ in conversions.dropped)]
    patterns = {text for transform in stock for text in (*source_patterns(transform), *target_patterns(transform))}
    parameters: tuple[str, ...] = ()
    renamed = keys
    if len(run) < len(conversions.added):
        parameters = tuple(state_tensors(selected.model))
        for transform in stock:
            if isinstance(transform, WeightRenaming):
                renamed = tuple(copy_transform(transform).rename_source_key(key)[0] for key in renamed)
    used: set[Key] = set()
    unused: Explanations = {}
    for entry in entries:
        field = "filtered_weight_conversion_patterns"
        used |= {(entry, field, text) for text in matching_filters}
        unused |= _unmatched_expressions(entry, field, "no conversion of the model", "patterns", patterns)
        used |= {(entry, "conversions", transform) for transform in run}
        for where, transform, cls in _conversions_of_patcher(entry, selected.outcome):
            places = [item.path for item in selected.record.replaced if item.replacement is cls]
            explain = partial(_unused_conversion, where, transform, places, renamed if cls else keys, parameters)
            unused[entry, "conversions", (identity(transform),)] = explain
        texts, names = entry.patcher.dropped_weights, {*keys, *unexpected}
        matches = {text for text in texts if selected.runtime_layout or any(search(text, name) for name in names)}
        if len(matches) < len(texts):  # what the patched model has saved lacks them
            stock_model = skeleton(selected.record.model_class, selected.model.config)
            state = stock_model.state_dict()
            names = {*state, *stock_revert(stock_model, state)}
            matches |= {text for text in texts if any(search(text, name) for name in names)}
        used |= {(entry, "dropped_weights", text) for text in matches}
        unused |= _unmatched_expressions(entry, "dropped_weights", "no key of the checkpoint", "checkpoint keys", keys)
    return Outcome(frozenset(used), unused)


def _conversions_of_patcher(
    entry: InForce, outcome: Outcome
) -> Iterator[tuple[str, WeightTransform, type[nn.Module] | None]]:
    """Yield the conversions of a patcher, where they are written, and in which class; of classes that were built."""
    for transform in entry.patcher.extra_weight_conversions:
        yield "extra_weight_conversions", transform, None
    keys = [(field, key) for field in MODULE_MAPPINGS for key in getattr(entry.patcher, field)]
    built = {getattr(entry.patcher, field)[key]: None for field, key in keys if (entry, field, key) in outcome.used}
    for cls in built:
        yield from ((f"{cls.__qualname__}.conversion_mapping", transform, cls) for transform in conversions_of(cls))


def _unused_conversion(
    where: str,
    transform: WeightTransform,
    places: Sequence[str],
    keys: Iterable[str],
    parameters: Iterable[str],
) -> str:
    """Explain a conversion that did nothing: no key matches its sources, or no parameter its target.

    Args:
        places: the paths of the modules that its class replaces; none if it isn't that of a class.
        keys: the keys of the checkpoint; for a class as the renamings of transformers make them.
    """
    hint = ""
    if places:
        hint = ": names in the conversion_mapping of a class begin inside of the module that it replaces"
        keys, parameters = _inside(places, keys) or keys, _inside(places, parameters)
    renaming = copy_transform(transform)
    targets = fold_names({name for name, pattern in map(renaming.rename_source_key, keys) if pattern is not None})
    if not targets:
        nearest_keys = suggest(source_patterns(transform)[0], fold_names(keys), "checkpoint keys")
        return f"{where}: {describe(transform)} took no tensor{hint}; {nearest_keys}"
    known = fold_names(parameters)
    if targets[0] in known:
        return f"{where}: {describe(transform)} took no tensor: another conversion takes them"
    return (
        f"{where}: {describe(transform)} makes {', '.join(map(cut, targets[:3]))}, which the model doesn't have; "
        f"{suggest(targets[0], known, 'parameters')}"
    )


def _inside(places: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the part of names that follows the path of one of the modules."""
    prefixes = tuple(map(inside, places))
    return {name.removeprefix(prefix) for name in names for prefix in prefixes if name.startswith(prefix)}


# --- names ---------------------------------------------------------------------------------------------------------


def _unmatched_expressions(entry: InForce, field: str, where: str, what: str, known: Collection[str]) -> Explanations:
    """Return the explanations for expressions of a field that match nothing, with the nearest names."""

    def explain(text: str) -> str:
        names = known if what == "patterns" else fold_names(known)
        return f"{field}: {text!r} matches {where}; {suggest(text, names, what)}"

    return {(entry, field, (text,)): partial(explain, text) for text in getattr(entry.patcher, field)}


def suggest(name: str, candidates: Iterable[str], what: str) -> str:
    """Return the candidates nearest to an unknown name, or some of them."""
    known = sorted(candidates)
    # Whole; by tails (`q_proj.weight` is near to `model.layers.{0..1}.self_attn.q_proj.weight`); by segments.
    tails = {text[-len(name) :]: text for text in known if len(text) > len(name)}
    segments = {segment: text for text in reversed(known) for segment in text.split(".")}
    last = re.sub(r"[\\^$]", "", name).split(".")[-1]
    for text, places in ((name, {text: text for text in known}), (name, tails), (last, segments)):
        if close := nearest(text, places):
            return f"nearest: {', '.join(cut(places[match]) for match in close)}"
    if not known:
        return f"the model has no {what}"
    return f"it has {', '.join(map(cut, known[:8]))}{', ...' if len(known) > 8 else ''}"


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names in the order of the layers."""
    return tuple(sorted(names, key=dot_natural_key))


def fold_names(names: Iterable[str]) -> list[str]:
    """Sort names in the order of the layers, and fold runs of numbers."""
    return compress(sort_names(names))
