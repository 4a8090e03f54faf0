"""What a `Report` and a `Plan` have in common: the tree of the model, and the tables around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from patcher.compat.conversions import dot_natural_key
from patcher.compat.models import named_modules, stock_class
from patcher.display.parts import Notes, Part, Table
from patcher.display.shown import Shown, numbered
from patcher.display.tree import ModuleNode, Weights, module_tree
from patcher.layouts.conversion import Converted
from patcher.layouts.transforms import describe
from patcher.loading.record import PatchedModule, PatchRecord
from patcher.loading.routes import Route
from patcher.patterns import in_state_dict, inside
from patcher.spec.forward_of import shown_name


@dataclass(frozen=True)
class Patched(Shown):
    """What becomes of the modules, the functions and the conversions of a model.

    Attributes:
        model: the class of the model.
        patchers: the patchers in force, the innermost first, and how each comes into force.
        replaced: (path, original class, replacement) of each module that is replaced.
        fused: (path, original class, fused class) of each module that is fused.
        refused: (path, reason) of each module that a fusion leaves alone.
        functions: (function, what is called in its place, the classes that call it) of each replaced function.
        calling: how many modules call replaced functions.
        rules: (key of a mapping, the classes or functions that it matched).
        conversions_dropped: the stock conversions that are left out, and the filter.
        new_weights: parameters that aren't in the checkpoint and that the patcher declares as new.
        dropped_weights: checkpoint tensors that aren't used and that the patcher declares as dropped.
        warnings: what the load warns of.
        tree: the modules of the model, alike layers folded, with what becomes of each; None where nothing is patched.
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
        """How many modules and functions: `2 modules and 1 function replaced (in calls of 4 modules)`."""
        modules, functions = len(self.replaced) + len(self.fused), len(self.functions)
        parts = [numbered(modules, "module")] if modules or not functions else []
        parts += [numbered(functions, "function")] if functions else []
        called = f" (in calls of {numbered(self.calling, 'module')})" if functions else ""
        return f"{' and '.join(parts)} {verb}{called}"

    def _patched_parts(self, takes: str, conversions: Iterable[tuple[str, str, str]]) -> Iterator[Part]:
        """What is shown of it.

        Args:
            takes: the head of the last column of conversions.
            conversions: (how it came there, conversion, what it does) of those that aren't dropped.
        """
        yield Notes("Warnings", self.warnings, "warning")
        if len(self.patchers) > 1:  # who wins: the first row
            yield Table("Patchers", ("in force by", "patcher"), [(origin, text) for text, origin in self.patchers])
        shown: set[str] = set()
        if self.tree is not None:
            yield self.tree.branch()
            for node in self.tree.walk():
                shown.update(weights.conversion for weights in node.weights if weights.what == "converted")
        # Exact names and paths say themselves what they match.
        rules = [
            row
            for row in self.rules
            if "[like(" in row[0] or (row[0].startswith("class_mapping") and row[0] != f"class_mapping[{row[1][0]!r}]")
        ]
        yield Table("Rules", ("key", "matches"), [(rule, ", ".join(names)) for rule, names in rules])
        rows = [
            ("dropped", text, f"by {filtered!r}" if filtered else "an added one takes its tensors")
            for text, filtered in self.conversions_dropped
        ]
        rows += [row for row in conversions if row[0] != "added" or row[1] not in shown]
        yield Table("Conversions", ("", "conversion", takes), rows)


def of_record(
    model: str, built: nn.Module, record: PatchRecord, routes: Iterable[Route], amiss: Iterable[Weights] = ()
) -> dict[str, Any]:
    """The fields of a report or a plan that follow from what a load has put down, or would.

    Args:
        model: the class of the model.
        built: the model, or its skeleton.
        routes: those of the load.
        amiss: the weights that don't fit.
    """
    names = [(in_state_dict(path), stock_class(module).__qualname__) for path, module in named_modules(built)]
    callers = {name for _, _, classes in record.functions for name in classes}
    replaced, fused, refused = _rows(record.replaced), _rows(record.fused), tuple(record.refused.items())
    weights = list(amiss)
    for each in routes:
        if each.text:
            is_stock = isinstance(each.layout, Converted) and not each.by
            weights.append(Weights("kept" if is_stock else "converted", each.keys, each.parameters, each.text))
    weights += [Weights("new", (), (name,)) for name in record.new_weights]
    weights += [Weights("dropped", (key,)) for key in record.dropped_weights]
    return {
        "model": model,
        "patchers": tuple((repr(entry.patcher), entry.origin) for entry in record.in_force),
        "replaced": replaced,
        "fused": fused,
        "refused": refused,
        "functions": record.functions,
        "calling": sum(name in callers for _, name in names),
        "rules": record.rules,
        "conversions_dropped": tuple((describe(transform), text) for transform, text in record.dropped),
        "new_weights": record.new_weights,
        "dropped_weights": record.dropped_weights,
        "tree": module_tree(
            model,
            names,
            changed=[*replaced, *fused],
            refused=refused,
            functions=record.functions,
            weights=weights,
        ),
    }


def added_by(record: PatchRecord) -> list[str]:
    """The conversions that come in front of those of transformers, those of fusions included."""
    added = [describe(transform) for transform in (*record.added, *record.fusion_transforms)]
    return list(dict.fromkeys([*added, *(route.text for route in routes_of_fusions(record))]))


def routes_of_fusions(record: PatchRecord) -> Iterator[Route]:
    """What fusions make of the parameters of each module."""
    for module in record.modules:
        for each in module.layouts:
            stock, fused = (tuple(inside(module.path) + name for name in names) for names in (each.stock, each.fused))
            yield Route(stock, fused, each)


def _rows(modules: Iterable[PatchedModule]) -> tuple[tuple[str, str, str], ...]:
    """(path, original, replacement), in the order of the layers."""
    ordered = sorted(modules, key=lambda each: dot_natural_key(each.path))
    return tuple((each.path, each.original.__qualname__, shown_name(each.replacement)) for each in ordered)
