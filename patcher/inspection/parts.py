"""The common base of `Report` and `Plan`: the tree of the model, and the tables around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from patcher.compat.conversions import dot_natural_key
from patcher.compat.modeling_code import REBOUND
from patcher.compat.models import named_modules, stock_class
from patcher.display.parts import Notes, Part, Table
from patcher.display.shown import Displayable, pluralize
from patcher.display.tree import ModuleNode, Weights, module_tree
from patcher.functions.graph import Hit
from patcher.functions.models import full_name, replaced_now
from patcher.layouts.carried import fused_modules
from patcher.layouts.conversion import Converted
from patcher.layouts.transforms import describe
from patcher.loading.record import PatchedModule, PatchRecord
from patcher.loading.routes import Route
from patcher.patterns import in_state_dict, inside
from patcher.spec.forward_of import shown_name


@dataclass(frozen=True, repr=False)
class Patched(Displayable):
    """The changes to the modules, the functions and the conversions of a model.

    Attributes:
        model: the class of the model.
        patchers: (patcher, where it was passed) of those that were in force when the model and its parts were
            constructed, the innermost first.
        replaced: (path, original class, replacement) of the modules that are replaced.
        fused: (path, original class, fused class) of the modules that are fused.
        refused: (path, reason) of the modules that a fusion leaves unchanged.
        functions: (function, replacement, the classes that call it) of the functions that are replaced.
        calling: how many modules call replaced functions.
        rules: (key of a mapping, the classes or functions that it matched).
        conversions_dropped: (conversion, filter) of the stock conversions that are dropped.
        new_weights: parameters that aren't in the checkpoint and that the patcher declares as new.
        dropped_weights: unused checkpoint tensors that the patcher declares as dropped.
        warnings: the warnings of the load.
        tree: the modules of the model and their changes, with identical layers folded; None if nothing is patched.
    """

    model: str
    patchers: tuple[tuple[str, str], ...] = ()
    replaced: tuple[tuple[str, str, str], ...] = ()
    fused: tuple[tuple[str, str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    functions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    calling: int = 0
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    conversions_dropped: tuple[tuple[str, str], ...] = ()
    new_weights: tuple[str, ...] = ()
    dropped_weights: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tree: ModuleNode | None = None

    def _counted(self, verb: str) -> str:
        """Count modules and functions: `2 modules and 1 function replaced (in calls of 4 modules)`."""
        modules, functions = len(self.replaced) + len(self.fused), len(self.functions)
        parts = [pluralize(modules, "module")] if modules or not functions else []
        parts += [pluralize(functions, "function")] if functions else []
        called = f" (in calls of {pluralize(self.calling, 'module')})" if functions else ""
        return f"{' and '.join(parts)} {verb}{called}"

    def _patched_parts(self, head: str, conversions: Iterable[tuple[str, str, str]]) -> Iterator[Part]:
        """Yield the parts that reports and plans show.

        Args:
            head: the head of the last column of conversions.
            conversions: (`added` or `kept`, conversion, last column) of the conversions that aren't dropped.
        """
        yield Notes("Warnings", self.warnings, "warning")
        if len(self.patchers) > 1:  # the first row takes precedence
            yield Table("Patchers", ("in force by", "patcher"), [(origin, text) for text, origin in self.patchers])
        shown: set[str] = set()
        if self.tree is not None:
            yield self.tree.branch()
            for node in self.tree.walk():
                shown.update(weights.conversion for weights in node.weights if weights.what == "converted")
        # Exact names and paths need no row, they match themselves.
        rules = [
            row
            for row in self.rules
            if "[like(" in row[0] or (row[0].startswith("class_mapping") and row[0] != f"class_mapping[{row[1][0]!r}]")
        ]
        yield Table("Rules", ("key", "matches"), [(rule, ", ".join(names)) for rule, names in rules])
        rows = [
            ("dropped", text, f"by {pattern!r}" if pattern else "an added one takes its tensors")
            for text, pattern in self.conversions_dropped
        ]
        rows += [row for row in conversions if row[0] != "added" or row[1] not in shown]
        yield Table("Conversions", ("", "conversion", head), rows)


def fields_of_record(
    model: str, built: nn.Module, record: PatchRecord, routes: Iterable[Route], problems: Iterable[Weights] = ()
) -> dict[str, Any]:
    """Return the fields of a report or a plan that follow from the record of a load.

    Args:
        model: the class of the model.
        built: the model, or its skeleton.
        problems: the weights that don't fit.
    """
    modules = [(in_state_dict(path), module) for path, module in named_modules(built)]
    hits = replaced_now(built)
    calls = {path: called for path, module in modules if (called := _calls_of(module, hits))}
    names = {item.original.__name__ for item in record.modules} | {hit.name for hit in hits}
    replaced, fused, refused = _rows(record.replaced), _rows(record.fused), tuple(record.refused.items())
    weights = list(problems)
    for route in routes:
        if route.text:
            is_stock = isinstance(route.layout, Converted) and not route.added
            weights.append(Weights("kept" if is_stock else "converted", route.keys, route.parameters, route.text))
    weights += [Weights("new", (), (name,)) for name in record.new_weights]
    weights += [Weights("dropped", (key,)) for key in record.dropped_weights]
    return {
        "model": model,
        "patchers": tuple((repr(entry.patcher), entry.origin) for entry in record.in_force),
        "replaced": replaced,
        "fused": fused,
        "refused": refused,
        "functions": tuple((hit.name, full_name(hit.replacement), hit.callers) for hit in hits),
        "calling": len(calls),
        "rules": tuple(rule for rule in record.rules if not names.isdisjoint(rule[1])),
        "conversions_dropped": tuple((describe(transform), text) for transform, text in record.dropped),
        "new_weights": record.new_weights,
        "dropped_weights": record.dropped_weights,
        "tree": module_tree(
            model,
            [(path, stock_class(module).__qualname__) for path, module in modules],
            changed=[*replaced, *fused],
            refused=refused,
            functions=calls,
            weights=weights,
        ),
    }


def _calls_of(module: nn.Module, hits: Iterable[Hit]) -> tuple[tuple[str, str], ...]:
    """Return (function, replacement) of the replaced functions that a module calls."""
    caller = getattr(type(module), REBOUND, None)  # a fused class inherits it
    return tuple((hit.name, full_name(hit.replacement)) for hit in hits if caller and caller.__name__ in hit.callers)


def added_conversions(record: PatchRecord, model: nn.Module) -> list[str]:
    """Return the conversions that precede those of transformers, including those of fusions."""
    added = [describe(transform) for transform in (*record.added, *record.fusion_transforms)]
    return list(dict.fromkeys([*added, *(route.text for route in routes_of_fusions(model))]))


def routes_of_fusions(model: nn.Module) -> Iterator[Route]:
    """Yield the routes from stock to fused parameters of every fused module."""
    for path, _, carried in fused_modules(model):
        for layout in carried.layouts:
            named = layout.named(inside(path).__add__)
            yield Route(tuple(named.stock), tuple(named.fused), layout)


def _rows(modules: Iterable[PatchedModule]) -> tuple[tuple[str, str, str], ...]:
    """Return (path, original, replacement) of modules, in the order of the layers."""
    ordered = sorted(modules, key=lambda module: dot_natural_key(module.path))
    return tuple((module.path, module.original.__qualname__, shown_name(module.replacement)) for module in ordered)
