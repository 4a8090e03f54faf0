"""The record of a patched model: enough to save it, to report on it, and to revert it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from patcher.compat.modeling_code import unrebound
from patcher.compat.models import named_modules, original_class, stock_class
from patcher.construction.in_force import InForce
from patcher.functions.rebinding import rebinder_of
from patcher.fusions.base import Fusion
from patcher.layouts.carried import PickledClass, carried_by
from patcher.layouts.transforms import select_conversions
from patcher.loading.routes import Route
from patcher.patterns import in_state_dict, inside
from patcher.spec.patcher import Patcher

RECORD = "_patcher_record"


@dataclass(frozen=True)
class PatchedModule:
    """A module that was replaced or fused."""

    path: str
    original: type[nn.Module]
    replacement: type[nn.Module]
    #: whether a `Patcher` chose it: the process-wide registry wasn't written for this very model
    chosen: bool = True
    #: None for a replacement of a mapping
    fusion: str | Fusion | None = None

    def __reduce__(self) -> Any:
        return _unpickled_module, tuple((vars(self) | {"replacement": PickledClass.of(self.replacement)}).values())


@dataclass(frozen=True, eq=False)
class PatchRecord:
    """The record on the outermost model, and in part on each of its sub-models."""

    model_class: type[PreTrainedModel]
    #: the patchers in force, the innermost first
    in_force: tuple[InForce, ...]
    modules: tuple[PatchedModule, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    #: path -> the fusion of a module that has been unfused since
    unfused: Mapping[str, str | Fusion] = field(default_factory=dict)
    #: (key of a mapping, the classes or functions that it matched)
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fusion_transforms: tuple[WeightTransform, ...] = ()
    #: whether it is the record of a sub-model
    is_part: bool = False
    #: whether a checkpoint in the original layout was read; otherwise conversions are found when the model is saved
    read: bool = False
    #: the routes of the load that modules carry
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
        """The replacements of mappings."""
        return [item for item in self.modules if item.fusion is None]

    @property
    def fused(self) -> list[PatchedModule]:
        return [item for item in self.modules if item.fusion is not None]

    @property
    def fusions(self) -> list[str | Fusion]:
        """The fusions that fused a module, in the order of the patchers."""
        effective = {item.fusion for item in self.modules}
        requested = dict.fromkeys(fusion for patcher in self.patchers for fusion in patcher.fusions)
        return [fusion for fusion in requested if fusion in effective]

    def replacements(self) -> list[tuple[str, type[nn.Module]]]:
        """Return the (path, class) pairs of the replacements of mappings."""
        return [(item.path, item.replacement) for item in self.replaced]

    @property
    def paths_of_replacements(self) -> tuple[str, ...]:
        """The paths of replacements, without those of the process-wide registry."""
        return tuple(item.path for item in self.replaced if item.chosen)

    @property
    def added(self) -> list[WeightTransform]:
        """The conversions of patchers and of their classes, without those of fusions."""
        return [item.transform for item in select_conversions((), self.patchers, replaced=self.replacements()).added]

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchRecord:
        return self

    def __reduce__(self) -> Any:
        return _unpickled, (vars(self),)


def _unpickled_module(path: str, original: Any, replacement: Any, *rest: Any) -> PatchedModule:
    return PatchedModule(path, original, PickledClass.read(replacement), *rest)


def _unpickled(values: dict[str, Any]) -> PatchRecord:
    importlib.import_module("patcher").install()  # so that the unpickled model saves like this one
    return PatchRecord(**values)


def record_of(model: nn.Module) -> PatchRecord | None:
    """Return the record of a patched model, or of a sub-model of one."""
    return model.__dict__.get(RECORD)


def patched_models(
    model: nn.Module, *, separately: bool = False
) -> Iterator[tuple[str, PreTrainedModel, PatchRecord]]:
    """Yield (path, model, record) of each outermost patched model.

    Args:
        separately: whether to yield also parts of these that were patched by other patchers, such as those that were
            moved or exchanged.
    """
    records: dict[str, PatchRecord] = {}
    for path, part in named_modules(model):
        if (record := record_of(part)) is not None and isinstance(part, PreTrainedModel):
            around = next((records[prefix] for prefix in reversed(records) if path.startswith(prefix)), None)
            if around is None or (separately and record.in_force != around.in_force):
                records[inside(path)] = record
                yield path, part, record


def joined_record(model: nn.Module) -> PatchRecord | None:
    """Return the record of a model, joined with those of parts that were patched separately."""
    own = {inside(path): record for path, _, record in patched_models(model, separately=True)}
    records = [_moved(record, prefix, tuple(own)) for prefix, record in own.items()]
    if not records:
        return None
    names = ("in_force", "modules", "rules", "fusion_transforms", "routes", "dropped", "warnings")
    united: dict[str, Any] = {
        name: tuple(dict.fromkeys(item for record in records for item in getattr(record, name)))
        for name in (*names, "new_weights", "dropped_weights")
    }
    return replace(
        own.get("") or PatchRecord(stock_class(model), ()),  # type: ignore[arg-type]
        refused={path: reason for record in records for path, reason in record.refused.items()},
        read=all(record.read for record in records),
        **united,
    )


def patched_now(model: nn.Module) -> PatchRecord | None:
    """Return the joined record of a model, with the modules that are patched now.

    Some may have been removed since, exchanged, or moved here from another model.
    """
    record, modules = joined_record(model), list[PatchedModule]()
    known = {item.path: item for item in record.modules} if record is not None else {}
    for name, module in named_modules(model):
        if (original := original_class(module)) is not None:
            path, cls = in_state_dict(name), unrebound(type(module))
            item = known.pop(path, None)
            if item is None or not issubclass(cls, item.replacement):  # other tools derive classes from it
                item = PatchedModule(path, original, cls, fusion=getattr(carried_by(module), "fusion", None))
            modules.append(item)
    if record is None:
        if not modules and not any(rebinder_of(module) for _, module in named_modules(model)):
            return None
        record = PatchRecord(stock_class(model), ())  # type: ignore[arg-type]
    gone = tuple(map(inside, known))
    return replace(
        record,
        modules=tuple(modules),
        routes=tuple(route for route in record.routes if not any(name.startswith(gone) for name in route.parameters)),
        new_weights=tuple(name for name in record.new_weights if not name.startswith(gone)),
    )


def _moved(record: PatchRecord, prefix: str, prefixes: Iterable[str]) -> PatchRecord:
    """Return a record by the names of a model around that of the record, without those in parts with other records."""
    parts = tuple(part.removeprefix(prefix) for part in prefixes if part.startswith(prefix) and part != prefix)

    def moved(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for name in names if not inside(name).startswith(parts))

    routes = [route for route in record.routes if moved(route.parameters)]
    return replace(
        record,
        modules=tuple(replace(item, path=path) for item in record.modules for path in moved([item.path])),
        refused={prefix + path: reason for path, reason in record.refused.items() if moved([path])},
        routes=tuple(replace(route, keys=moved(route.keys), parameters=moved(route.parameters)) for route in routes),
        new_weights=moved(record.new_weights),
        dropped_weights=moved(record.dropped_weights),
    )


def store_record(models: Iterable[tuple[str, PreTrainedModel]], record: PatchRecord) -> None:
    """Store the record on a model, and on its sub-models what they need to be saved separately."""
    for path, model in models:
        model.__dict__[RECORD] = _part(record, inside(path), stock_class(model)) if path else record


def _part(record: PatchRecord, prefix: str, model_class: Any) -> PatchRecord:
    return PatchRecord(
        model_class=model_class,
        is_part=True,
        in_force=record.in_force,
        read=record.read,
        rules=record.rules,
        modules=tuple(
            replace(item, path=item.path[len(prefix) :])
            for item in record.modules
            if inside(item.path).startswith(prefix)
        ),
    )
