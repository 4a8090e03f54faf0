"""Whether a load does what the patcher says: what is missing, what is left over, and all that is said of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from patcher.compat.models import named_modules, named_parameters, ties
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT, InForce, Matched
from patcher.errors import PatchedWeightsError, PatcherError, warn
from patcher.expressions import search
from patcher.layouts.selection import converts
from patcher.layouts.sources import shape_of
from patcher.loading.matches import check_matches, folded, ordered
from patcher.loading.record import Replaced
from patcher.loading.routes import Routing
from patcher.loading.suggestions import missing_conversions


@dataclass(frozen=True)
class Diagnostics:
    """What is wrong with a load: raised at once where that is strict, otherwise said in one warning at its end.

    Attributes:
        warnings: what is said at the end.
        errors: what a load would have raised, if it is one that goes on to find everything.
        goes_on: whether it is.
    """

    warnings: tuple[str, ...] = ()
    errors: tuple[PatcherError, ...] = ()
    goes_on: bool = False

    def adding(self, error: PatcherError | None, *, strict: bool) -> Diagnostics:
        """With one more, unless there is none.

        Raises:
            PatcherError: `error`, where that is strict.
        """
        if error is None:
            return self
        if not strict:
            return replace(self, warnings=(*self.warnings, str(error)))
        if not self.goes_on:
            raise error
        if self.errors and isinstance(error, PatchedWeightsError):
            return self  # which weights don't fit follows from what didn't match
        return replace(self, errors=(*self.errors, error))

    def adding_matches(
        self,
        entries: Iterable[InForce],
        matched: Matched,
        model_name: str = "",
        *,
        classes: bool = True,
        conversions: bool = True,
    ) -> Diagnostics:
        """With what of these patchers has matched nothing, see `check_matches`.

        Raises:
            UnmatchedPatchError: something of a strict one.
        """
        result = self
        for entry in entries:
            error = check_matches(entry, matched, classes=classes, conversions=conversions, model_name=model_name)
            result = result.adding(error, strict=entry.patcher.strict)
        return result

    def warn(self) -> None:
        """Say it, at the line of whoever asked for the load."""
        if self.warnings:
            warn("\n".join(dict.fromkeys(self.warnings)))


@dataclass(frozen=True)
class WeightsFound:
    """The weights of replaced modules that the checkpoint doesn't have, or has for nobody."""

    new: tuple[str, ...]
    dropped: tuple[str, ...]
    error: PatchedWeightsError | None


def check_weights(
    model: PreTrainedModel,
    replaced: Iterable[Replaced],
    entries: Iterable[InForce],
    info: Any,
    *,
    missing: set[str],
    parts_of: Mapping[str, tuple[str, ...]],
    checkpoint: Mapping[str, Any],
    idle: Iterable[str],
    stock_outcome: Callable[[], Routing],
) -> WeightsFound:
    """Find the weights under replaced modules that don't come from the checkpoint, or go nowhere.

    Args:
        info: what transformers knows of the load.
        missing: of the keys that it misses, those that are no other names of what was read.
        checkpoint: its tensors, or what stands for them.
        idle: what is said of sources of conversions that took nothing.
        parts_of: fused parameter -> the parameters of transformers that it is made of, of those that are missing.
        stock_outcome: what the unpatched load would do with the checkpoint: asked only if something is amiss, for what
            it would miss or ignore as well doesn't count.
    """
    if not (missing or info.unexpected_keys or info.mismatched_keys):
        return WeightsFound((), (), None)
    patchers = [entry.patcher for entry in entries if not entry.is_registry]
    mismatched = {
        name: f"found {tuple(found)}, expected {tuple(shape)}" for name, found, shape in info.mismatched_keys
    }
    paths = [item.path for item in replaced if item.chosen]
    everywhere = "" in paths
    prefixes = tuple(f"{path}." for path in paths if path)

    def under_replaced(key: str) -> bool:
        # A checkpoint may have the prefix of the base model where the model's names have none, or the other way round.
        prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
        return everywhere or any(name.startswith(prefixes) for name in (key, prefix + key, key.removeprefix(prefix)))

    def declared(keys: Iterable[str], name: str) -> tuple[str, ...]:
        expressions = [text for patcher in patchers for text in getattr(patcher, name)]
        return ordered(key for key in keys if any(search(text, key) for text in expressions))

    # Conversions, and filters, have no bounds but their patterns: they may take what another module needs.
    is_converted = any(map(converts, patchers))
    parameters: set[str] = set()
    absent = {key for key in missing | set(mismatched) if is_converted or under_replaced(key)} - ties(model).keys()
    if absent:  # persistent buffers keep what was computed, so only parameters count
        parameters = {name for name, _ in named_parameters(model)}
        absent &= parameters
    left_over = {key for key in info.unexpected_keys if under_replaced(key)}
    new, dropped = declared(absent, "new_weights"), declared(left_over, "dropped_weights")
    absent.difference_update(new)
    left_over.difference_update(dropped)
    if absent or left_over:
        stock = stock_outcome()
        not_read = {*stock.missing, *stock.mismatched}
        absent = {key for key in absent if not not_read.issuperset(parts_of.get(key, (key,)))}
        left_over -= stock.unexpected
    error = None
    named = [name for entry in entries if entry.origin in (FUSION_CONFIG, LAYOUT) for name in entry.patcher.fusions]
    if named and (torn := _torn(missing & {name for name, _ in named_parameters(model)}, info.unexpected_keys)):
        error = PatchedWeightsError(
            f"The config names fusions, {', '.join(map(repr, named))}, in whose layout the checkpoint is, and these "
            "modules of it are not fused here:\n"
            + "".join(f"  {path}\n" for path in folded(torn))
            + f"Patcher(fusions={named!r}).resolve(model_class, config).refused says why. Load it with the releases "
            "that have saved it, and save it in the original format (the default)."
        )
    elif patchers and (absent or left_over):
        failed = {key: text for key, text in info.conversion_errors.items() if key in absent}
        if failed:
            error = PatchedWeightsError(failed_text(failed, model))
        else:
            elsewhere = {key for key in absent if not under_replaced(key)}
            shapes = {name: tuple(value.shape) for name, value in named_parameters(model) if name in absent}
            left_shapes = {key: shape_of(checkpoint[key]) for key in left_over if key in checkpoint}
            suggested = missing_conversions(
                {name: shape for name, shape in shapes.items() if name not in elsewhere and name not in mismatched},
                left_shapes,
                checkpoint.keys() - left_over,
            )
            filtered = any(patcher.filtered_weight_conversion_patterns for patcher in patchers)
            text = _weights_text(
                absent - elsewhere,
                left_over,
                elsewhere,
                mismatched,
                parameters,
                suggested,
                idle,
                turned=_turned(name for name, found, shape in info.mismatched_keys if _are_transposes(found, shape)),
                filtered=filtered,
            )
            error = PatchedWeightsError(text)
    return WeightsFound(new, dropped, error)


def failed_text(failed: Mapping[str, str], model: PreTrainedModel) -> str:
    """What a quantizer has raised for parameters that are therefore missing, from what transformers has kept of it."""
    reasons: dict[str, list[str]] = {}
    for key, text in failed.items():
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        # A traceback, the line of the error, the error again, what it was doing.
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        reasons.setdefault("".join(raised[:1] or lines[-1:]), []).append(key)
    listed = "".join(f"  {', '.join(folded(keys)[:3])}: {reason}\n" for reason, keys in reasons.items())
    # Some quantizers look for these in names of modules, some in names of parameters, from the beginning.
    layers = sorted({rf".*\.{key.split('.')[-2]}" for key in failed if "." in key})
    # The head they leave out by themselves, until they are given a list.
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers += [path for path, module in named_modules(model) if module is head]
    return (
        f"These weights are in the checkpoint, and quantizing them failed:\n{listed}"
        "They aren't new, and the patcher isn't the cause. Give the quantization config what it asks for, or leave "
        f"these layers out of it: modules_to_not_convert={layers!r}."
    )


def _torn(missing: Iterable[str], unexpected: Iterable[str]) -> set[str]:
    """The modules whose parameters are missing, and of which the checkpoint has others, as a fusion would have them.

    Of joined projections those are one level below (`x.q_proj.weight`, `x.qkv_proj.weight`), of others inside of the
    very module (`x.proj.weight`, `x.proj.linear.weight`). Beside the whole model there may be what other heads need.
    """
    holders: dict[str, set[int]] = {}
    for key in missing:
        inner = key.split(".")
        for above, depth in ((1, 3), (2, 2)):
            if path := ".".join(inner[:-above]):
                holders.setdefault(path, set()).add(depth)
    found = set()
    for key in unexpected:
        inner = key.split(".")
        for depth in range(1, 4):
            path = ".".join(inner[:-depth])
            if path in holders and depth <= max(holders[path]):
                found.add(path)
    return found


def _weights_text(
    absent: set[str],
    left_over: set[str],
    elsewhere: set[str],
    mismatched: Mapping[str, str],
    parameters: Iterable[str],
    suggested: Iterable[str],
    idle: Iterable[str],
    *,
    turned: Iterable[str],
    filtered: bool,
) -> str:
    lines = []
    if elsewhere:
        lines.append("The patcher's conversions or filters keep the checkpoint from modules that are not replaced:")
        lines += [f"  {key}" for key in folded(elsewhere)]
        lines += [f"  ({key}: {mismatched[key]})" for key in ordered(elsewhere & set(mismatched))[:5]]
        if filtered:
            lines.append(
                "A filter drops a stock conversion for the whole model: replace every class that needs it, or take "
                "the filter out."
            )
    if not absent and not left_over:
        return "\n".join(lines)
    lines.append("The replaced modules and the checkpoint don't fit together.")
    if absent:
        lines.append("Not in the checkpoint, so these would keep what __init__ gave them:")
        lines += [f"  {key}" for key in folded(absent)]
        lines += [f"  ({key}: {mismatched[key]})" for key in ordered(absent & set(mismatched))[:5]]
    if left_over:
        lines.append("In the checkpoint, and unused:")
        lines += [f"  {key}" for key in folded(left_over)]
    lines += idle
    if suggested:
        lines.append(
            "The checkpoint has tensors of these shapes under other names. Convert them "
            "(from transformers.core_model_loading):"
        )
        lines.append(f"  extra_weight_conversions=[{', '.join(suggested)}]")
        lines.append("Names and shapes can't tell whether they are in this order: patcher.verify does.")
        lines.append("To declare them new would leave them as __init__ makes them, as a rule random.")
    if turned:
        lines.append("The checkpoint has some transposed. Convert them (from transformers.core_model_loading):")
        lines.append(f"  extra_weight_conversions=[{', '.join(turned)}]")
    additions = [f"new_weights={_expressions(absent, parameters)}"] if absent else []
    additions += [f"dropped_weights={_expressions(left_over, ())}"] if left_over else []
    lines.append(f"If that is meant, add to the Patcher: {', '.join(additions)}")
    if absent & set(mismatched):
        lines.append("Where shapes differ, load with ignore_mismatched_sizes=True as well, or give it that shape.")
    if not suggested and not turned:
        lines.append(
            "If not, a conversion is missing: "
            "extra_weight_conversions=[WeightConverter([...], [...], operations=[...])]."
        )
    return "\n".join(lines)


def _are_transposes(one: Iterable[int], other: Iterable[int]) -> bool:
    shape = tuple(one)
    return len(shape) == 2 and shape == tuple(other)[::-1]


def _turned(names: Iterable[str]) -> list[str]:
    """The conversions of parameters that the checkpoint has transposed, as code."""
    tails = dict.fromkeys(re.escape(".".join(name.split(".")[-2:])).replace(r"\.", ".") for name in sorted(names))
    return [f"WeightConverter({tail!r}, {tail!r}, operations=[Transpose(0, 1)])" for tail in tails]


def _expressions(keys: set[str], others: Iterable[str]) -> list[str]:
    """Expressions that name the keys by their tails: long enough to tell them from the other parameters."""
    rest = {_in_layers(key) for key in others if key not in keys}
    tails = {parts[-length:] for parts in rest for length in range(2, len(parts))}
    result: dict[str, None] = {}
    for key in ordered(keys):
        parts = _in_layers(key)
        escaped = [r"\d+" if part is None else re.escape(part) for part in parts]
        length = next((length for length in range(2, len(parts)) if parts[-length:] not in tails), None)
        if length is not None:
            expression = r"\." + r"\.".join(escaped[-length:]) + "$"
        else:
            expression = f"^{re.escape(key)}$" if parts in rest else "^" + r"\.".join(escaped) + "$"
        result[expression] = None
    return list(result)


def _in_layers(key: str) -> tuple[str | None, ...]:
    """The segments of a name, with None for each number."""
    return tuple(None if part.isdecimal() else part for part in key.split("."))
