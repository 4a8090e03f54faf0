"""What of a patcher has matched nothing, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from transformers.core_model_loading import WeightTransform

from patcher.compat.conversions import dot_natural_key, source_patterns
from patcher.construction.in_force import LAYOUT, InForce, Matched
from patcher.errors import InvalidPatcherError, UnmatchedPatchError
from patcher.expressions import cut, search
from patcher.fusions.base import Fusion
from patcher.fusions.families import fusion_named
from patcher.layouts.transforms import conversions_of, describe, identity
from patcher.patterns import compress, is_expression, matches_path, nearest, nearest_paths
from patcher.spec.validation import MODULE_MAPPINGS

#: Of more than so many problems, these are named: each is compared with what the model has.
_MOST = 10


def check_matches(
    entry: InForce, matched: Matched, *, classes: bool = True, conversions: bool = True, model_name: str = ""
) -> UnmatchedPatchError | None:
    """The error that names each argument of a patcher that matched nothing.

    Args:
        classes: whether class keys, fusions and new weights are judged.
        conversions: whether filters, conversions and dropped weights are, which count only where a checkpoint was
            read.
    """
    if entry.is_registry:
        return None  # it meets every model of the process
    patcher = entry.patcher
    problems = list(islice(_problems(entry, matched, classes, conversions), _MOST + 1))
    if not problems:
        return None
    if len(problems) > _MOST:
        problems[-1] = "and others"
    name, where = (f" {patcher.name!r}" if patcher.name else ""), (f" in {model_name}" if model_name else "")
    return UnmatchedPatchError(
        f"The patcher{name} asks for what it can't do{where}:\n"
        + "".join(f"  {problem}\n" for problem in problems)
        + "Correct it or take it out; with strict=False this is a warning."
    )


def _problems(entry: InForce, matched: Matched, classes: bool, conversions: bool) -> Iterator[str]:
    if classes:
        yield from _unmatched_classes(entry, matched)
        yield from _unmatched_functions(entry, matched)
        yield from _not_found(entry, matched, "new_weights", "the name of no parameter", "parameters")
    if conversions and matched.has_read:
        field = "filtered_weight_conversion_patterns"
        yield from _not_found(entry, matched, field, "no conversion of the model", "patterns")
        converting = matched.of(entry, "conversions")
        for where, transform in _conversions(entry, matched):
            if identity(transform) not in converting:
                yield f"{where}: {describe(transform)} {_unused(transform, matched)}"
        yield from _not_found(entry, matched, "dropped_weights", "no key of the checkpoint", "checkpoint keys")


def _conversions(entry: InForce, matched: Matched) -> Iterator[tuple[str, WeightTransform]]:
    """The conversions of a patcher, with where they are written; of classes only those that were built."""
    for transform in entry.patcher.extra_weight_conversions:
        yield "extra_weight_conversions", transform
    mappings = [getattr(entry.patcher, field) for field in MODULE_MAPPINGS]
    fields = zip(MODULE_MAPPINGS, mappings, strict=True)
    built = {mapping[key]: None for field, mapping in fields for key in mapping if key in matched.of(entry, field)}
    for cls in built:
        for transform in conversions_of(cls):
            yield f"{cls.__qualname__}.conversion_mapping", transform


def _not_found(entry: InForce, matched: Matched, field: str, where: str, what: str) -> Iterator[str]:
    """The expressions of a field that are found nowhere, each with the nearest of what there is."""
    found, known = matched.of(entry, field), getattr(matched, what.replace(" ", "_"))
    for text in getattr(entry.patcher, field):
        if text not in found:
            hint = _suggest(text, known if what == "patterns" else folded(known), what)
            yield f"{field}: {text!r} is found in {where}; {hint}"


def _unused(transform: WeightTransform, matched: Matched) -> str:
    """Why a conversion did nothing: no tensor is called like a source of it, or no parameter like its target."""
    made = folded(name for owner, name in matched.renamed if owner == identity(transform))
    if made:
        return (
            f"makes {', '.join(map(cut, made[:3]))}, which the model doesn't have; "
            f"{_suggest(made[0], folded(matched.parameters), 'parameters')}"
        )
    known = folded(matched.checkpoint_keys)
    return f"took no tensor; {_suggest(source_patterns(transform)[0], known, 'checkpoint keys')}"


def idle_source(transform: WeightTransform, text: str, checkpoint_keys: Iterable[str]) -> str:
    """What is said of a source that took nothing, of a conversion of which others did."""
    return (
        f"extra_weight_conversions: {text!r} of {describe(transform)} took no tensor; "
        f"{_suggest(text, folded(checkpoint_keys), 'checkpoint keys')}"
    )


def _unmatched_classes(entry: InForce, matched: Matched) -> Iterator[str]:
    patcher = entry.patcher
    keys = matched.of(entry, "class_mapping")
    grouped = {key for group in patcher.alternatives for key in group}
    for group in patcher.alternatives:
        if not keys.intersection(group):
            yield (
                f"class_mapping: no class of the model matches {'any of ' if len(group) > 1 else ''}"
                f"{', '.join(map(repr, group))}; "
                f"{_suggest(group[0], matched.classes, 'classes')}"
            )
    for key in patcher.class_mapping:
        if key not in keys and key not in grouped:
            yield f"class_mapping: no class of the model matches {key!r}{_reason(key, matched)}"
    named = matched.of(entry, "module_mapping")
    for key in patcher.module_mapping:
        if key not in named:
            yield f"module_mapping: {_nothing_at(key, matched)}"
    for owner, key, path, other in sorted(matched.shared, key=lambda item: item[1:]):
        if owner == entry:
            yield (
                f"module_mapping: {key!r} names {path}, which is {other} as well: a module at two paths is replaced "
                f"where both are named; add {other!r} with the same class"
            )
    for fusion in patcher.fusions:
        yield from _unmatched_fusion(entry, fusion, matched)


def _unmatched_functions(entry: InForce, matched: Matched) -> Iterator[str]:
    """The functions that nothing of the model calls by name, each with the nearest of those that something does."""
    found = matched.of(entry, "function_mapping")
    for key in entry.patcher.function_mapping:
        if key in found:
            continue
        name = key.rpartition(":")[2]
        tables = sorted(table for function, table in matched.registries if function == name)
        callers = sorted(caller for function, caller in matched.hidden if function == name)
        unchosen = sorted(chosen for function, *chosen in matched.unchosen if function == name)
        if unchosen:
            default, argument, value = unchosen[0]
            hint = f" under {argument}={value!r}: load the model with {argument}='eager'"
            if default != name:
                hint = f", for nothing calls {default}{hint}"
            elif argument == "attn_implementation":
                hint += (
                    ", or make your function an implementation: transformers.AttentionInterface.register('mine', "
                    "function), and attn_implementation='mine' in place of the function_mapping"
                )
        elif callers:
            hint = f": what calls it, {callers[0]}, is itself replaced"
        elif tables:
            hint = (
                f": the modeling code looks for it in {tables[0]}, which all models share, when it runs. Register a "
                "function of your own there, and choose it by its name"
            )
        elif name in matched.functions:
            hint = f": the model calls another function of that name; write {name!r} for any"
        else:
            hint = f"; {_suggest(name, matched.functions, 'functions')}"
        yield f"function_mapping: nothing in the modeling code calls {key!r}{hint}"


def _unmatched_fusion(entry: InForce, fusion: str | Fusion, matched: Matched) -> list[str]:
    patterns = fusion.modules if isinstance(fusion, Fusion) else ()
    if not patterns:
        # A layout is that of the whole model, of which a part may be loaded; what of it isn't fused, its weights say.
        if fusion in matched.of(entry, "fusions") or entry.origin == LAYOUT:
            return []
        return [f"fusions: {fusion!r} found no module that it can fuse{_refused(fusion, matched) or _absent(fusion)}"]
    problems = []
    for pattern in patterns:
        if (fusion, pattern) in matched.of(entry, "modules"):
            continue
        named = sorted((path for path in matched.paths if matches_path(pattern, path)), key=dot_natural_key)
        if not named:
            problems.append(f"fusions: {fusion!r} is asked for at {_nothing_at(pattern, matched)}")
        else:
            why = _refused(fusion, matched, named)
            hint = why or f"; what is inside of those that it names would be {pattern.removesuffix('.**')}.**"
            problems.append(f"fusions: {fusion!r} can't fuse any module that {pattern!r} names{hint}")
    return problems


def _nothing_at(pattern: str, matched: Matched) -> str:
    near = nearest_paths(pattern, sorted(matched.paths, key=dot_natural_key))
    return f"{pattern!r}, where the model has no module" + (f"; nearest: {', '.join(near)}" if near else "")


def _refused(fusion: str | Fusion, matched: Matched, named: Iterable[str] | None = None) -> str:
    """What a fusion has looked at and left alone, at these paths or anywhere: alike layers in one line."""
    reasons: dict[str, list[str]] = {}
    for owner, path, reason in matched.refused:
        if owner == fusion and (named is None or path in named):
            reasons.setdefault(reason, []).append(path)
    listed = sorted(f"{', '.join(folded(paths)[:2])} ({reason})" for reason, paths in reasons.items())[:5]
    return f"; it refused {', '.join(listed)}" if listed else ""


def _absent(fusion: str | Fusion) -> str:
    subject = fusion_named(fusion).subject
    return f": no module of the model has {subject}" if subject else ""


def _reason(key: str, matched: Matched) -> str:
    classes = matched.classes
    if "." in key:
        last = key.rpartition(".")[2]
        if last in classes and last.isidentifier():
            return f": it is a dotted name, and a key is the bare name of a class; write {last!r}"
        at = {cls for path, cls in matched.places if _is_at(key, path)}
        if at:
            return (
                ": it is a path, and a key is the name of a class, which is replaced wherever it is; for the class "
                f"at that path write {', '.join(map(repr, sorted(at)))}"
            )
    if key in classes or (is_expression(key) and any(search(key, name) for name in classes)):
        return (
            ": the model has it, but not from modeling code: what that takes from torch's own namespace, `nn.Linear`, "
            "and what a replacement builds in its own code, is left alone. Replace the class that builds it"
        )
    return f"; {_suggest(key, classes, 'classes')}"


def _is_at(key: str, path: str) -> bool:
    """Whether a path, or a pattern of paths, names the module at this one; `layers[0]` is how Python names it."""
    try:
        return matches_path(re.sub(r"\[(\d+)\]", r".\1", key), path)
    except InvalidPatcherError:
        return False


def _suggest(name: str, candidates: Iterable[str], what: str) -> str:
    known = sorted(candidates)
    close = nearest(name, known)
    # Tail by tail: `q_proj.weight` is near to `model.layers.{0..1}.self_attn.q_proj.weight`.
    if not close:
        tails = {text[-len(name) :]: text for text in known if len(text) > len(name)}
        close = [tails[tail] for tail in nearest(name, tails)]
    # Segment by segment: `adaptor` is near to `model.layers.{0..1}.mlp.adapter.bias`.
    if not close:
        segments = {segment: text for text in reversed(known) for segment in text.split(".")}
        close = [segments[segment] for segment in nearest(re.sub(r"[\\^$]", "", name).split(".")[-1], segments)]
    if close:
        return f"nearest: {', '.join(map(cut, close))}"
    if not known:
        return f"the model has no {what}"
    return f"it has {', '.join(map(cut, known[:8]))}{', ...' if len(known) > 8 else ''}"


def ordered(keys: Iterable[str]) -> tuple[str, ...]:
    """Names in the order of the layers."""
    return tuple(sorted(keys, key=dot_natural_key))


def folded(keys: Iterable[str]) -> list[str]:
    """The same, with runs of numbers folded."""
    return compress(ordered(keys))
