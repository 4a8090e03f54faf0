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
from patcher.layouts.carried import PickledClass
from patcher.layouts.layouts import Layout
from patcher.layouts.transforms import select_conversions
from patcher.loading.routes import Route
from patcher.patterns import inside
from patcher.spec.patcher import Patcher

RECORD = "_patcher_record"


@dataclass(frozen=True)
class PatchedModule:
    """One module that is another than in transformers.

    Attributes:
        chosen: whether a `Patcher` says so rather than the process-wide registry, which wasn't written for this
            very model.
        fusion: the fusion that has made it, None for what a mapping has replaced.
        layouts: which parameters of a fused module have become which.
    """

    path: str
    original: type[nn.Module]
    replacement: type[nn.Module]
    chosen: bool = True
    fusion: str | Fusion | None = None
    layouts: tuple[Layout, ...] = ()

    def __reduce__(self) -> Any:
        return _unpickled_module, tuple((vars(self) | {"replacement": PickledClass.of(self.replacement)}).values())


@dataclass(frozen=True, eq=False)
class PatchRecord:
    """Kept on the outermost model and on each of its sub-models."""

    model_class: type[PreTrainedModel]
    #: the patchers in force, the innermost first
    in_force: tuple[InForce, ...]
    modules: tuple[PatchedModule, ...] = ()
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

    @property
    def replaced(self) -> list[PatchedModule]:
        """What mappings have put in place of others."""
        return [each for each in self.modules if each.fusion is None]

    @property
    def fused(self) -> list[PatchedModule]:
        """What fusions have made."""
        return [each for each in self.modules if each.fusion is not None]

    @property
    def fusions(self) -> list[str | Fusion]:
        """The fusions that have made something, in the order of the patchers."""
        named, made = (
            (fusion for each in self.patchers for fusion in each.fusions),
            {each.fusion for each in self.modules},
        )
        return [fusion for fusion in dict.fromkeys(named) if fusion in made]

    def replacements(self) -> list[tuple[str, type[nn.Module]]]:
        """(path, class) of what mappings have put in place of others."""
        return [(each.path, each.replacement) for each in self.replaced]

    @property
    def paths_of_replacements(self) -> tuple[str, ...]:
        """Where mappings, chosen for this model, have put others."""
        return tuple(each.path for each in self.replaced if each.chosen)

    @property
    def added(self) -> list[WeightTransform]:
        """The conversions that patchers have added, and their classes; those of fusions are others."""
        return [each.transform for each in select_conversions((), self.patchers, replaced=self.replacements()).added]

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchRecord:
        return self

    def __reduce__(self) -> Any:
        return _unpickled, (vars(self),)


def _unpickled_module(path: str, original: Any, replacement: Any, *rest: Any) -> PatchedModule:
    return PatchedModule(path, original, PickledClass.read(replacement), *rest)


def _unpickled(values: dict[str, Any]) -> PatchRecord:
    importlib.import_module("patcher").install()  # so that the model saves there as it does here
    return PatchRecord(**values)


def record_of(model: nn.Module) -> PatchRecord | None:
    """The record of a patched model, or of a sub-model of one."""
    return model.__dict__.get(RECORD)


def store_record(models: Iterable[tuple[str, PreTrainedModel]], record: PatchRecord) -> None:
    """Put the record on the model, and on its sub-models what they need to be saved by themselves."""
    for path, model in models:
        part = _part(record, inside(path), stock_class(model)) if path else record
        model.__dict__[RECORD] = part


def _part(record: PatchRecord, prefix: str, model_class: Any) -> PatchRecord:
    return PatchRecord(
        model_class=model_class,
        is_part=True,
        in_force=record.in_force,
        read=record.read,
        functions=record.functions,
        rules=record.rules,
        modules=tuple(
            replace(each, path=each.path.removeprefix(prefix))
            for each in record.modules
            if each.path.startswith(prefix)
        ),
    )
