"""Whether the weights that were read, or would be, are what was requested; and what is recorded of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from patcher.compat.models import named_parameters, ties
from patcher.construction.in_force import FUSION_CONFIG, LAYOUT, tell_blocks
from patcher.errors import PatchedWeightsError
from patcher.expressions import search
from patcher.layouts.carried import fused_modules
from patcher.layouts.transforms import converts, is_concatenation
from patcher.loading.findings import folded, ordered, outcome_of_weights
from patcher.loading.load import Loaded, Selected
from patcher.loading.routes import Routing
from patcher.loading.unfit import unfit_error
from patcher.patterns import inside


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
        stock_routing: gives what the stock load would do with the checkpoint.

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
    else:
        outcome = outcome_of_weights(selected, routing, checkpoint, info.unexpected_keys)
        if selected.dry_run is None:
            tell_blocks(outcome)
        for entry in selected.own:
            # What the model doesn't have was reported when it was built, where that is an error.
            found = outcome if entry.patcher.strict else selected.outcome | outcome
            diagnostics = diagnostics.with_unused([entry], found, selected.model_class.__name__)
        weights = _Weights(selected, routing, checkpoint, info)
        added = selected.conversions.added
        if added and (routing.absent or any(is_concatenation(each.transform) for each in added)):
            diagnostics = diagnostics.adding(weights.joining_error(stock_routing()), strict=True)
        diagnostics = diagnostics.adding(weights.error(stock_routing), strict=selected.strict)
        done |= {"new_weights": weights.new, "dropped_weights": weights.dropped}
    values = vars(selected) | {"record": replace(selected.record, **done), "diagnostics": diagnostics}
    return Loaded(**values, info=info, routing=routing)


class _Weights:
    """The weights under replaced modules that the checkpoint doesn't have, or has for nothing.

    Attributes:
        absent: parameters that the checkpoint doesn't have, or in another shape.
        left_over: its keys that go nowhere.
        new, dropped: those of both that a patcher has declared.
    """

    def __init__(self, selected: Selected, routing: Routing, checkpoint: Mapping[str, Any], info: Any) -> None:
        self.selected, self.routing, self.checkpoint, self.info = selected, routing, checkpoint, info
        self.model = model = selected.model
        self.patchers = [entry.patcher for entry in selected.in_force if not entry.is_registry]
        # What a quantizer has raised for, transformers raises for itself, at the end.
        self.missing = set(info.missing_keys) - info.conversion_errors.keys()
        #: parameter -> the conversion of a patcher that makes it
        self.made_by = {name: route.text for route in routing.routes if route.by for name in route.parameters}
        self.mismatched = {
            name: f"{self._maker(name)} {tuple(found)}, the model has {tuple(shape)}"
            for name, found, shape in info.mismatched_keys
        }
        self._replaced = tuple(inside(item.path) for item in selected.record.modules if item.chosen)
        # Conversions, and filters, have no bounds but their patterns: they may take what another module needs.
        is_converted = any(map(converts, self.patchers))
        amiss = self.missing | self.mismatched.keys()
        absent = {key for key in amiss if is_converted or self._is_under_replaced(key)}
        if absent:  # persistent buffers keep what was computed, so only parameters count
            absent &= {name for name, _ in named_parameters(model)} - ties(model).keys()
        left_over = set(filter(self._is_under_replaced, info.unexpected_keys))
        declared = self._declared(absent, "new_weights"), self._declared(left_over, "dropped_weights")
        self.new, self.dropped = map(ordered, declared)
        self.absent, self.left_over = absent.difference(self.new), left_over.difference(self.dropped)

    def _maker(self, name: str) -> str:
        return f"{self.made_by[name]} makes" if name in self.made_by else "the checkpoint has"

    def _is_under_replaced(self, key: str) -> bool:
        # A checkpoint may have the prefix of the base model where the model's names have none, or the other way round.
        prefix = inside(self.model.base_model_prefix)
        return any(name.startswith(self._replaced) for name in (key, prefix + key, key.removeprefix(prefix)))

    def _declared(self, keys: Iterable[str], name: str) -> list[str]:
        expressions = [text for patcher in self.patchers for text in getattr(patcher, name)]
        return [key for key in keys if any(search(text, key) for text in expressions)]

    def joining_error(self, stock: Routing) -> PatchedWeightsError | None:
        """The error for what conversions of patchers join of parts that are missing, or that don't fit one by one.

        Args:
            stock: what the stock model makes of the checkpoint: the parts may add up to the shape of the whole.
        """
        absent, follow = self.routing.absent - ties(self.model).keys() - {*self.new}, self.routing.follow
        taken = {name: found for name in stock.missing_keys if absent and (found := follow(name)).by}
        joining = [route for route in self.routing.routes if route.by and is_concatenation(route.by[-1].transform)]
        parts = {name for route in joining for name in route.stock}
        misfits = [
            f"{name}: found {tuple(found)}, expected {tuple(own)}"
            for name, found, own in sorted(stock.mismatched_keys)
            if name in parts
        ]
        lacking = [name for name, found in taken.items() if found.name in absent]
        return unfit_error({"lacking": lacking, "misfits": misfits})

    def error(self, stock_routing: Callable[[], Routing]) -> PatchedWeightsError | None:
        """The error for them: what the stock load would miss or ignore as well doesn't count."""
        if torn := self._torn():
            return torn
        if self.absent or self.left_over:
            stock = stock_routing()
            # What a runtime layout lacks, it lacks under its own names.
            fused = () if self.routing.is_runtime_layout else fused_modules(self.model)
            layouts = [layout for each in fused for layout in each.fused]
            parts_of = {name: layout.stock for layout in layouts for name in layout.fused}
            self.absent = {key for key in self.absent if not stock.absent.issuperset(parts_of.get(key, (key,)))}
            self.left_over -= stock.unexpected_keys
        if not self.patchers or not (self.absent or self.left_over):
            return None
        return PatchedWeightsError(self._text())

    def _torn(self) -> PatchedWeightsError | None:
        """The error for a runtime layout whose modules aren't fused here, as the config says that they are.

        Parameters of theirs are missing, of which the checkpoint has others: of joined projections one level below
        (`x.q_proj.weight`, `x.qkv_proj.weight`), of others inside of the very module (`x.proj.weight`,
        `x.proj.linear.weight`). Beside the whole model there may be what other heads need.
        """
        entries = [entry for entry in self.selected.in_force if entry.origin in (FUSION_CONFIG, LAYOUT)]
        named = [name for entry in entries for name in entry.patcher.fusions]
        missing = self.missing & {name for name, _ in named_parameters(self.model)} if named else set()
        holders = [{_above(key, levels) for key in missing} for levels in (1, 2)]
        places = [{_above(key, levels) for key in self.info.unexpected_keys} for levels in (1, 2, 3)]
        torn = ((holders[0] & set().union(*places)) | (holders[1] & set().union(*places[:2]))) - {""}
        if not torn:
            return None
        return PatchedWeightsError(
            f"The config names fusions, {', '.join(map(repr, named))}, in whose layout the checkpoint is, and these "
            "modules of it are not fused here:\n"
            + "".join(f"  {path}\n" for path in folded(torn))
            + f"Patcher(fusions={named!r}).resolve(model_class, config).refused says why. Load it with the releases "
            "that have saved it, and save it in the original format (the default)."
        )

    def _text(self) -> str:
        own = dict(named_parameters(self.model))
        absent = set(filter(self._is_under_replaced, self.absent))
        lines = []
        if elsewhere := self.absent - absent:
            lines.append(
                "The patcher's conversions or filters keep the checkpoint from modules that are not replaced:"
            )
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
            lines.append("Not in the checkpoint, so these would keep what __init__ gave them:")
            lines += self._listed(absent - misfits)
        if misfits:
            lines.append("Not of the shape that the model has:")
            lines += self._listed(misfits)
        if self.left_over:
            lines.append("In the checkpoint, and unused:")
            lines += self._listed(self.left_over)
        turned = transposing(each for each in self.info.mismatched_keys if each[0] not in self.made_by)
        if turned:
            lines.append("The checkpoint has some transposed. Convert them (from transformers.core_model_loading):")
            lines.append(f"  extra_weight_conversions=[{', '.join(turned)}]")
        if misfits & self.made_by.keys():
            lines.append("Correct the conversion, or give the parameter the shape that the conversion makes.")
        elif not turned:
            lines.append(
                "If a conversion is missing, add it: "
                "extra_weight_conversions=[WeightConverter([...], [...], operations=[...])]."
            )
        declared = {
            "new": f"new_weights={expressions_for(absent, own)}" if absent else "",
            "unused": f"dropped_weights={expressions_for(self.left_over, ())}" if self.left_over else "",
        }
        kinds, additions = " or ".join(filter(declared.get, declared)), ", ".join(filter(None, declared.values()))
        lines.append(f"If they are meant to be {kinds}, add to the Patcher: {additions}")
        if misfits:
            lines.append("Where shapes differ, load with ignore_mismatched_sizes=True as well.")
        return "\n".join(lines)

    def _listed(self, keys: set[str]) -> list[str]:
        """The names with the problems of their shapes; layers with the same ones are folded."""
        by_text: dict[str, list[str]] = {}
        for key in ordered(keys):
            by_text.setdefault(f": {self.mismatched[key]}" if key in self.mismatched else "", []).append(key)
        return [f"  {name}{text}" for text, names in by_text.items() for name in folded(names)]


def _above(key: str, levels: int) -> str:
    """The path some levels above a name; "" where there is none."""
    return ".".join(key.split(".")[:-levels])


# --- what to add to a patcher, as code -------------------------------------------------------------------------------


def transposing(mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> list[str]:
    """The conversions of parameters that the checkpoint has transposed, as code.

    Args:
        mismatched: name, the shape that was found, its own.
    """
    names = sorted(
        name for name, found, own in mismatched if len(tuple(own)) == 2 and tuple(own) == tuple(found)[::-1]
    )
    tails = dict.fromkeys(re.escape(".".join(name.split(".")[-2:])).replace(r"\.", ".") for name in names)
    return [f"WeightConverter({tail!r}, {tail!r}, operations=[Transpose(0, 1)])" for tail in tails]


def expressions_for(keys: set[str], others: Iterable[str]) -> list[str]:
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
