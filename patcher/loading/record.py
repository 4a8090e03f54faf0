"""What a model remembers of how it was patched: enough to save it, to report on it, and to go back."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.models import stock_class
from patcher.construction.in_force import InForce
from patcher.fusions.base import Fusion
from patcher.fusions.fused_module import MadeClass
from patcher.layouts.layouts import Layout
from patcher.layouts.selection import select_conversions
from patcher.loading.routes import Route
from patcher.patterns import inside
from patcher.spec.patcher import Patcher

RECORD = "_patcher_record"


@dataclass(frozen=True)
class Replaced:
    """One replaced module."""

    path: str
    original: type[nn.Module]
    replacement: type[nn.Module]
    #: from a `Patcher` rather than from the process-wide registry, which nobody has written for this very model
    chosen: bool = True


@dataclass(frozen=True, eq=False)
class PatchRecord:
    """Kept on the outermost model and on each of its sub-models."""

    model_class: type[PreTrainedModel]
    #: the patchers in force, the innermost first
    in_force: tuple[InForce, ...]
    replaced: tuple[Replaced, ...] = ()
    #: path -> original class and fused class
    fused: Mapping[str, tuple[type[nn.Module], type[nn.Module]]] = field(default_factory=dict)
    #: fusion -> the paths that it has fused
    fusions: Mapping[str | Fusion, tuple[str, ...]] = field(default_factory=dict)
    #: path -> which parameters of a fused module have become which
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    #: path -> the fusion of a module that has been un-fused since
    unfused: Mapping[str, str | Fusion] = field(default_factory=dict)
    #: (function, what is called in its place, the classes that call it) of each function that is replaced
    functions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    #: (key of a mapping, the classes or functions that it matched)
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fusion_transforms: tuple[WeightTransform, ...] = ()
    #: whether it is that of a model inside of another one
    is_part: bool = False
    #: whether a checkpoint in the original layout was read; otherwise the conversions are found when it is saved
    read: bool = False
    #: what conversions of patchers have made in the load
    routes: tuple[Route, ...] = ()
    dropped: tuple[tuple[WeightTransform, str], ...] = ()
    new_weights: tuple[str, ...] = ()
    dropped_weights: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def patchers(self) -> tuple[Patcher, ...]:
        return tuple(entry.patcher for entry in self.in_force)

    def classes_of_replaced(self) -> dict[str, tuple[type[nn.Module], type[nn.Module]]]:
        """path -> original class and replacement, of what a class mapping has replaced."""
        return {item.path: (item.original, item.replacement) for item in self.replaced if item.path not in self.fused}

    def replacements(self) -> list[tuple[str, type[nn.Module]]]:
        """(path, class) of what a mapping has put in place of others."""
        return [(item.path, item.replacement) for item in self.replaced if item.path not in self.fused]

    @property
    def paths_of_replacements(self) -> tuple[str, ...]:
        """Where mappings, chosen for this model, have put others."""
        return tuple(item.path for item in self.replaced if item.chosen and item.path not in self.fused)

    @property
    def added(self) -> list[WeightTransform]:
        """The conversions that patchers have added, and their classes; those of fusions are others."""
        return [each.transform for each in select_conversions((), self.patchers, replaced=self.replacements()).added]

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchRecord:
        return self

    def __reduce__(self) -> Any:
        values = vars(self) | {
            "fused": {path: (original, MadeClass.of(cls)) for path, (original, cls) in self.fused.items()},
            "replaced": [
                (each.path, each.original, MadeClass.of(each.replacement), each.chosen) for each in self.replaced
            ],
        }
        return (_unpickled, (values,))


def _unpickled(values: dict[str, Any]) -> PatchRecord:
    importlib.import_module("patcher").install()  # so that the model saves there as it does here

    def known(cls: Any) -> Any:
        return cls.again() if isinstance(cls, MadeClass) else cls

    values["fused"] = {path: (original, known(cls)) for path, (original, cls) in values["fused"].items()}
    values["replaced"] = tuple(
        Replaced(path, was, known(cls), chosen) for path, was, cls, chosen in values["replaced"]
    )
    return PatchRecord(**values)


def record_of(model: nn.Module) -> PatchRecord | None:
    """The record of a patched model, or of a sub-model of one."""
    return model.__dict__.get(RECORD)


def keep_record(models: Iterable[tuple[str, PreTrainedModel]], record: PatchRecord) -> None:
    """Put the record on the model, and on its sub-models what they need to be saved by themselves."""
    for path, model in models:
        part = _part(record, inside(path), stock_class(model)) if path else record
        model.__dict__[RECORD] = part


def _part(record: PatchRecord, prefix: str, model_class: Any) -> PatchRecord:
    def within(paths: Iterable[str]) -> dict[str, str]:
        return {path: path.removeprefix(prefix) for path in paths if path.startswith(prefix)}

    fusions = {fusion: tuple(within(paths).values()) for fusion, paths in record.fusions.items()}
    return PatchRecord(
        model_class=model_class,
        is_part=True,
        in_force=record.in_force,
        read=record.read,
        functions=record.functions,
        rules=record.rules,
        replaced=tuple(
            replace(item, path=item.path.removeprefix(prefix))
            for item in record.replaced
            if item.path.startswith(prefix)
        ),
        fused={name: record.fused[path] for path, name in within(record.fused).items()},
        layouts={name: record.layouts[path] for path, name in within(record.layouts).items()},
        fusions={fusion: paths for fusion, paths in fusions.items() if paths},
    )
