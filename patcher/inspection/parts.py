"""What a `Report` and a `Plan` have in common: the tree of the model, and the tables around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from patcher.compat.conversions import dot_natural_key
from patcher.compat.models import named_modules, stock_class
from patcher.display.parts import Notes, Part, Table
from patcher.display.tree import ModuleNode, Weights, module_tree
from patcher.loading.record import PatchedModule, PatchRecord
from patcher.patterns import in_state_dict, inside
from patcher.spec.forward_of import shown_name


def tree_of(model: nn.Module, fields: Mapping[str, Any], weights: Iterable[Weights]) -> ModuleNode:
    """The tree of a model, with what the fields of a report or a plan say of its modules."""
    modules = ((in_state_dict(path), stock_class(module).__qualname__) for path, module in named_modules(model))
    return module_tree(
        fields["model"],
        modules,
        changed=[*fields["replaced"], *fields["fused"]],
        refused=fields["refused"],
        functions=fields["functions"],
        weights=weights,
    )


def converted_by_layouts(record: PatchRecord) -> Iterator[Weights]:
    """What fusions make of the parameters of each module."""
    for module in record.modules:
        for each in module.layouts:
            stock, fused = (tuple(inside(module.path) + name for name in names) for names in (each.stock, each.fused))
            yield Weights("converted", stock, fused, str(each))


def converted_in_load(record: PatchRecord) -> Iterator[Weights]:
    """What conversions of patchers have made in a load."""
    for route in record.routes:
        yield Weights("converted" if route.by else "kept", route.keys, route.parameters, route.text)


def patched_parts(told: Any, takes: str, conversions: Iterable[tuple[str, str, str]]) -> Iterator[Part]:
    """The parts of a report and of a plan, but for what is said at their ends.

    Args:
        told: either of them.
        takes: the head of the last column of conversions.
        conversions: (how it came there, conversion, what it does) of those that aren't dropped.
    """
    yield Notes("Warnings", told.warnings, "warning")
    if len(told.patchers) > 1:  # who wins: the first row
        yield Table("Patchers", ("in force by", "patcher"), [(origin, text) for text, origin in told.patchers])
    shown: set[str] = set()
    called: set[tuple[str, str]] = set()
    if told.tree is not None:
        yield told.tree
        for node in told.tree.walk():
            shown.update(weights.conversion for weights in node.weights if weights.what == "converted")
            called.update(node.functions)
    elsewhere = [each for each in told.functions if each[:2] not in called]
    # Exact names and paths say themselves what they match.
    rules = [
        row
        for row in told.rules
        if "[like(" in row[0] or (row[0].startswith("class_mapping") and row[0] != f"class_mapping[{row[1][0]!r}]")
    ]
    yield Table("Rules", ("key", "matches"), [(rule, ", ".join(names)) for rule, names in rules])
    yield Table("Functions", ("function", "is", "called by"), [(*each[:2], ", ".join(each[2])) for each in elsewhere])
    rows = [
        ("dropped", text, f"by {filtered!r}" if filtered else "an added one takes its tensors")
        for text, filtered in told.conversions_dropped
    ]
    rows += [row for row in conversions if row[0] != "added" or row[1] not in shown]
    yield Table("Conversions", ("", "conversion", takes), rows)


def counted(told: Any) -> str:
    """How many modules and functions a `Report` or a `Plan` tells of: `2 modules`, `2 modules and 1 function`."""
    modules, functions = len(told.replaced) + len(told.fused), len(told.functions)
    parts = [f"{modules} module{'' if modules == 1 else 's'}"] if modules or not functions else []
    parts += [f"{functions} function{'' if functions == 1 else 's'}"] if functions else []
    return " and ".join(parts)


def rows_of_classes(modules: Iterable[PatchedModule]) -> tuple[tuple[str, str, str], ...]:
    """(path, original, replacement), in the order of the layers."""
    ordered = sorted(modules, key=lambda each: dot_natural_key(each.path))
    return tuple((each.path, each.original.__qualname__, shown_name(each.replacement)) for each in ordered)
