"""The course of one load: what is in force, what was built and read, and whether it is what was asked for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, TypeVar

import transformers
from packaging.specifiers import SpecifierSet
from transformers import PreTrainedModel

from patcher import fingerprints, seams
from patcher.conversions import describe, joins
from patcher.errors import InvalidPatcherError, PatchedWeightsError, PatcherWarning
from patcher.journals import journal_of, track
from patcher.patcher import Patcher
from patcher.record import PatchRecord, Replaced, keep_record
from patcher.resolution import Arranged, arrange, skeleton
from patcher.scope import Layer, Scope, active_scope, opened, original_class
from patcher.simulation import Outcome
from patcher.strictness import (
    Complaints,
    class_names,
    judge_matches,
    judge_weights,
    note_conversions,
    stock_outcome,
)
from patcher.values import Intent, forget_indices, keep_new_weights

__all__ = [
    "Session",
    "check_pins",
    "finish_by_hand",
    "layers_in_force",
    "process_wide",
    "set_process_wide",
    "unpatched",
]

T = TypeVar("T")

# --- what is in force ----------------------------------------------------------------------------------------------

#: The patcher of `patcher.monkey_patching`: one value, replaced as a whole.
_process_wide: Patcher | None = None


def process_wide() -> Patcher:
    """The patcher that every load of this process meets."""
    return _process_wide or Patcher(strict=False)


def set_process_wide(patcher: Patcher) -> None:
    global _process_wide
    _process_wide = patcher if patcher.class_mapping else None


def registry_layer() -> Layer | None:
    """The process-wide registry as a layer, if anything is registered."""
    current = _process_wide
    return None if current is None or _UNPATCHED.get() else Layer(current, "monkey_patching")


#: whether the process-wide registry is left out
_UNPATCHED: ContextVar[bool] = ContextVar("patcher_unpatched", default=False)


def unpatched(call: Callable[[], T]) -> T:
    """What a call gives where no patcher is in force but those it brings: stock, to compare with."""

    def alone() -> T:
        _UNPATCHED.set(True)
        return call()

    return Context().run(alone)  # an empty context: no `applied()` around us either


def layers_in_force(patcher: Any) -> tuple[list[Layer], list[Layer]]:
    """All layers, the innermost first, and those of them that this very call has put in force."""
    own: list[Layer] = []
    if patcher is not None:
        if not isinstance(patcher, Patcher):
            raise InvalidPatcherError(
                f"patcher= takes a patcher.Patcher, found {patcher!r} ({type(patcher).__name__}); "
                'write patcher=Patcher({"LlamaMLP": MyMLP}).'
            )
        own.append(Layer(patcher, "patcher="))
    scope = active_scope()
    layers = [*own, *(scope.layers if scope is not None else ())]
    registry = registry_layer()
    if registry is not None and not any(layer.is_registry for layer in layers):
        layers.append(registry)
    return layers, own


def check_pins(patcher: Patcher, model_class: type[PreTrainedModel] | None = None) -> None:
    """The fingerprints decide, the release alone is worth a warning."""
    fingerprints.check(patcher, model_class)
    if patcher.transformers and not SpecifierSet(patcher.transformers).contains(
        transformers.__version__, prereleases=True
    ):
        warnings.warn(
            f"The patcher{f' {patcher.name!r}' if patcher.name else ''} was verified on transformers "
            f"{patcher.transformers}, installed is {transformers.__version__}.",
            PatcherWarning,
            stacklevel=2,
        )


# --- one load ------------------------------------------------------------------------------------------------------


class Session:
    """One `from_pretrained` under some layers, from the first line to the finished model."""

    def __init__(self, model_class: type[PreTrainedModel], layers: list[Layer], own: list[Layer]) -> None:
        self.model_class = model_class
        self.layers = layers
        self.own = own
        self.complaints = Complaints()
        self.scope = Scope(layers)
        self.scope.on_built = self.built
        self.model: PreTrainedModel | None = None
        self.record: PatchRecord | None = None
        self.arranged = Arranged([], [], [])
        self.tracked: list[Any] = []
        self.followed: set[int] = set()
        self.key_mapping: dict[str, str] | None = None
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.has_read = False
        self.intent = Intent((), frozenset())
        #: where transformers finds what the device map puts on the disk
        self.disk_index: dict[str, Any] | None = None

    def add(self, layer: Layer) -> None:
        """Put one more layer around the others, before anything is built."""
        self.set_layers([*self.layers, layer], [*self.own, layer])

    def set_layers(self, layers: list[Layer], own: list[Layer]) -> None:
        """What is in force, before anything is built."""
        self.layers, self.own = layers, own
        self.scope = Scope(self.layers)
        self.scope.on_built = self.built

    @property
    def strict(self) -> bool:
        return any(layer.patcher.strict for layer in self.layers if not layer.is_registry)

    @contextmanager
    def construction(self) -> Iterator[None]:
        """While `cls(config)` runs."""
        started = time.perf_counter()
        with opened(self.scope):
            yield
        self.seconds["construction"] = time.perf_counter() - started
        for layer in self.own:
            self.complaints.add(judge_matches(layer, model_name=self._name), strict=layer.patcher.strict)

    @property
    def _name(self) -> str:
        return self.model_class.__name__

    def built(self, model: PreTrainedModel) -> None:
        """The modules stand, on meta; no weight has been read."""
        self.model = model
        self.record = _record(model, self.scope)
        self.intent = Intent.of(model, self.scope)

    def conversions(self, stock: list[Any]) -> list[Any]:
        """The conversions of this load, from those of transformers: before the quantizer adapts them."""
        asked = len(self.key_mapping or ())  # what the user's key_mapping asks for runs first and is never filtered
        fusions = self.record.fusion_transforms if self.record is not None else ()
        self.arranged = arrange(stock[asked:], self.layers, fusions)
        self.tracked = [track(transform) for transform in self.arranged.added]
        # transformers reverses what joins unequal parts, as a conversion that somebody has registered may, into equal
        # ones. So that is followed as well.
        kept = [track(item) if joins(item) else item for item in self.arranged.kept]
        self.followed = {id(item) for item in kept if journal_of(item) is not None}
        return [*stock[:asked], *self.tracked, *kept]

    def read(self, model: PreTrainedModel, checkpoint: dict[str, Any], load_config: Any, info: Any) -> None:
        """The weights have been read: put down what was done, and see whether it is what was asked for."""
        if self.record is None or self.has_read:
            return
        self.has_read = True
        self.seconds["reading"] = time.perf_counter() - self.started - self.seconds.get("construction", 0.0)
        journals = [journal for item in self.tracked if (journal := journal_of(item)) is not None]
        mapping = load_config.weight_mapping or []
        for journal, item in zip(journals, self.tracked, strict=True):
            # A quantizer that has rewritten a conversion has made one that nobody can follow.
            journal.lost = not any(item is other for other in mapping)
        for journal in journals:
            if journal.failed:
                text = next(
                    (str(info.conversion_errors[key]) for key in journal.failed if key in info.conversion_errors), ""
                )
                raise PatchedWeightsError(
                    f"{describe(journal.transform)} failed for {', '.join(journal.failed[:3])}: "
                    f"{text.strip().splitlines()[-2] if len(text.strip().splitlines()) > 1 else text}\n"
                    "Check the patterns, the order of the sources and the operations of this conversion."
                )
        parameters = set(model.state_dict()) if journals else set()
        fired = [journal for journal in journals if journal.had_effect(parameters, model.base_model_prefix)]
        note_conversions(
            self.layers,
            self.arranged.dropped,
            fired,
            [*self.arranged.kept, *(t for t, _ in self.arranged.dropped)],
            checkpoint,
        )
        mapping = [*self.tracked_lost(mapping), *map(self._without_need, mapping)]
        used = [item for item in mapping if journal_of(item) is None and seams.was_used(item)]
        seams.set_used_conversions(model, used)
        self.record.conversions = tuple(
            journal_of(item) or item for item in mapping if journal_of(item) is not None or seams.was_used(item)
        )
        self.record.dropped = tuple(self.arranged.dropped)
        self.record.read = True
        for layer in self.own:
            self.complaints.texts.clear()  # said again, with all that was read
            self.complaints.add(judge_matches(layer, model_name=self._name), strict=layer.patcher.strict)
        mismatched = {
            name: f"found {tuple(found)}, expected {tuple(shape)}" for name, found, shape in info.mismatched_keys
        }
        found = judge_weights(
            model,
            self.record.replaced,
            self.layers,
            missing=self.intent.without_aliases(
                set(info.missing_keys), [text for layer in self.layers for text in layer.patcher.new_weights]
            ),
            mismatched=mismatched,
            unexpected=set(info.unexpected_keys),
            stock_outcome=lambda: self.stock_outcome(model, checkpoint),
        )
        self.record.new_weights = self.intent.with_aliases(found.new)
        self.record.dropped_weights = found.dropped
        self.complaints.add(found.error, strict=self.strict)

    def stock_outcome(self, model: PreTrainedModel, checkpoint: dict[str, Any]) -> Outcome:
        """What the load would have come to without any patcher."""
        return stock_outcome(skeleton(self.record_class, model.config), self.key_mapping, checkpoint)

    def _without_need(self, item: Any) -> Any:
        """A stock conversion that was followed and has joined equal parts, as transformers knows it."""
        journal = journal_of(item)
        if journal is None or id(item) not in self.followed or journal.is_uneven():
            return item
        seams.take_over_use(item, journal.transform)
        return journal.transform

    @property
    def record_class(self) -> type[PreTrainedModel]:
        assert self.record is not None
        return self.record.model_class

    def tracked_lost(self, mapping: list[Any]) -> list[Any]:
        return [item for item in self.tracked if not any(item is other for other in mapping)]

    def finished(self, model: PreTrainedModel) -> None:
        if self.record is not None:
            self.seconds["total"] = time.perf_counter() - self.started
            self.record.seconds = self.seconds
            self.record.warnings = tuple(self.complaints.texts)
            keep_record(model, self.record)
            forget_indices(model)
        self.scope.built.clear()
        self.scope.arguments.clear()
        self.complaints.warn()


def _record(model: PreTrainedModel, scope: Scope) -> PatchRecord:
    chosen = {id(built.module): not built.layer.is_registry for built in scope.built}
    fused = scope.resolution.fused if scope.resolution is not None else {}
    replaced, fused_as = [], {}
    for path, module in model.named_modules(remove_duplicate=False):
        original = original_class(module)
        if original is not None:
            if path in fused:
                fused_as[path] = (original, type(module))
            replaced.append(Replaced(path, original, type(module), chosen.get(id(module), True)))
    names = class_names(model)
    for layer in scope.layers:
        layer.candidates.setdefault("classes", set()).update(names)
        if scope.resolution is not None:
            layer.candidates.setdefault("refused", set()).update(
                f"{path} ({reason})" for path, reason in scope.resolution.refused.items()
            )
    return PatchRecord(
        model_class=original_class(model) or type(model),  # type: ignore[arg-type]
        patchers=tuple((layer.patcher, layer.origin) for layer in scope.layers),
        replaced=tuple(replaced),
        fused=fused_as,
        refused=dict(scope.resolution.refused) if scope.resolution is not None else {},
        fusion_transforms=scope.resolution.fusion_transforms if scope.resolution is not None else (),
        fused_parameters=_fused_parameters(model, scope),
        fusions={fusion: paths for fusion, paths in scope.resolution.by_fusion.items() if paths}
        if scope.resolution is not None
        else {},
    )


def _fused_parameters(model: PreTrainedModel, scope: Scope) -> frozenset[str]:
    if scope.resolution is None or not scope.resolution.fused:
        return frozenset()
    layout, names = scope.resolution.layout, set()
    for path in scope.resolution.fused:
        for name, tensor in model.get_submodule(path).state_dict(prefix=f"{path}." if path else "").items():
            if layout.get(name) != tensor.shape:
                names.add(name)
    return frozenset(names)


def finish_by_hand(scope: Scope, model: PreTrainedModel) -> None:
    """A model made without a checkpoint stands: `Model(config)` in a block, or `from_config`."""
    record = _record(model, scope)
    keep_new_weights(model, scope, [text for layer in scope.layers for text in layer.patcher.new_weights])
    Intent.of(model, scope)
    forget_indices(model)
    keep_record(model, record)
    scope.built.clear()
    scope.arguments.clear()
