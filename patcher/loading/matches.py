"""What of a patcher has matched nothing, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import islice

from patcher.compat.conversions import dot_natural_key, source_patterns
from patcher.construction.in_force import LAYOUT, InForce, Matched
from patcher.conversions.transforms import describe, identity
from patcher.errors import UnmatchedPatchError
from patcher.expressions import search
from patcher.fusions.base import Fusion
from patcher.patterns import compress, is_expression, matches_path, nearest, nearest_paths

#: Of more than so many problems, these are named: each is compared with what the model has.
_MOST = 20


def check_matches(
    entry: InForce, matched: Matched, *, classes: bool = True, conversions: bool = True, model_name: str = ""
) -> UnmatchedPatchError | None:
    """The error that names each class key, filter, conversion or fusion of a patcher that matched nothing.

    Args:
        classes: whether class keys and fusions are judged.
        conversions: whether filters and conversions are, which count only where a checkpoint was read.
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
    patcher = entry.patcher
    if classes:
        yield from _unmatched_classes(entry, matched)
    if conversions and matched.has_read:
        dropping = matched.of(entry, "filtered_weight_conversion_patterns")
        for text in patcher.filtered_weight_conversion_patterns:
            if text not in dropping:
                yield (
                    f"filtered_weight_conversion_patterns: {text!r} is found in no conversion of the model; "
                    f"{_suggest(text, matched.patterns, 'patterns')}"
                )
        converting = matched.of(entry, "extra_weight_conversions")
        for transform in patcher.extra_weight_conversions:
            if identity(transform) not in converting:
                yield (
                    f"extra_weight_conversions: {describe(transform)} took no tensor; "
                    f"{_suggest(source_patterns(transform)[0], folded(matched.checkpoint_keys), 'checkpoint keys')}"
                )


def _unmatched_classes(entry: InForce, matched: Matched) -> Iterator[str]:
    patcher = entry.patcher
    keys = matched.of(entry, "class_mapping")
    grouped = {key for group in patcher.alternatives for key in group}
    for group in patcher.alternatives:
        if not keys.intersection(group):
            yield (
                f"class_mapping: no class of the model matches any of {', '.join(map(repr, group))}; "
                f"{_suggest(group[0], matched.classes, 'classes')}"
            )
    for key in patcher.class_mapping:
        if key not in keys and key not in grouped:
            yield f"class_mapping: no class of the model matches {key!r}{_reason(key, matched.classes)}"
    for fusion in patcher.fusions:
        yield from _unmatched_fusion(entry, fusion, matched)


def _unmatched_fusion(entry: InForce, fusion: str | Fusion, matched: Matched) -> list[str]:
    patterns = fusion.modules if isinstance(fusion, Fusion) else ()
    if not patterns:
        # A layout is that of the whole model, of which a part may be loaded; what of it isn't fused, its weights say.
        if fusion in matched.of(entry, "fusions") or entry.origin == LAYOUT:
            return []
        return [f"fusions: {fusion!r} found no module that it can fuse{_refused(matched.refused)}"]
    problems = []
    for pattern in patterns:
        if (fusion, pattern) in matched.of(entry, "modules"):
            continue
        named = sorted((path for path in matched.paths if matches_path(pattern, path)), key=dot_natural_key)
        if not named:
            near = nearest_paths(pattern, sorted(matched.paths, key=dot_natural_key))
            hint = f"; nearest: {', '.join(near)}" if near else ""
            problems.append(f"fusions: {fusion!r} is asked for at {pattern!r}, where the model has no module{hint}")
        else:
            why = _refused(text for text in matched.refused if text.partition(" (")[0] in named)
            hint = why or f"; what is inside of those that it names would be {pattern.removesuffix('.**')}.**"
            problems.append(f"fusions: {fusion!r} can't fuse any module that {pattern!r} names{hint}")
    return problems


def _refused(texts: Iterable[str]) -> str:
    listed = sorted(texts)[:5]
    return f"; it refused {', '.join(listed)}" if listed else ""


def _reason(key: str, classes: Set[str]) -> str:
    if key in classes or (is_expression(key) and any(search(key, name) for name in classes)):
        return (
            ": the model has it, but not from modeling code: what that takes from torch's own namespace, `nn.Linear`, "
            "and what a replacement builds in its own code, is left alone. Replace the class that builds it"
        )
    return f"; {_suggest(key, classes, 'classes')}"


def _suggest(name: str, candidates: Iterable[str], what: str) -> str:
    known = sorted(candidates)
    close = nearest(name, known)
    # Tail by tail: `q_proj.weight` is near to `model.layers.{0..1}.self_attn.q_proj.weight`.
    if not close:
        tails = {text[-len(name) :]: text for text in known if len(text) > len(name)}
        close = [tails[tail] for tail in nearest(name, tails)]
    if close:
        return f"nearest: {', '.join(close)}"
    if not known:
        return f"the model has no {what}"
    return f"it has {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"


def ordered(keys: Iterable[str]) -> tuple[str, ...]:
    """Names in the order of the layers."""
    return tuple(sorted(keys, key=dot_natural_key))


def folded(keys: Iterable[str]) -> list[str]:
    """The same, with runs of numbers folded."""
    return compress(ordered(keys))
