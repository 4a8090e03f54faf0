"""A load that stops where it would read: the same steps by names and shapes, and what it would complain about."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, NoReturn

from transformers import PreTrainedModel

from patcher import seams
from patcher.errors import PatchedWeightsError, PatcherError
from patcher.resolution import skeleton
from patcher.scope import Layer
from patcher.session import Session
from patcher.simulation import Outcome, simulate
from patcher.strictness import Complaints, stock_outcome

__all__ = ["Info", "Rehearsal", "RehearsedSignal"]


class RehearsedSignal(BaseException):
    """The load has come to where it would read. No error: nothing between here and there may catch it."""


class Collected(Complaints):
    """What a load would raise, the first error first, and what it would warn of."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[PatcherError] = []

    def add(self, error: PatcherError | None, *, strict: bool) -> None:
        if error is None or not strict:
            super().add(error, strict=strict)
        elif not (self.errors and isinstance(error, PatchedWeightsError)):
            # Which weights don't fit follows from what didn't match, and would be said twice.
            self.errors.append(error)


class Info:
    """What transformers knows of a load at its end, from what the load would come to."""

    def __init__(self, outcome: Outcome) -> None:
        self.missing_keys = set(outcome.missing)
        self.unexpected_keys = set(outcome.unexpected)
        self.mismatched_keys = {(name, *shapes) for name, shapes in outcome.mismatched.items()}
        self.conversion_errors = outcome.conversion_errors


class Rehearsal(Session):
    """The course of a load that reads nothing.

    Args:
        unknown: the keys of the checkpoint whose shapes nobody knows.
        has_checkpoint: whether there is one; without it conversions and weights are not judged.
    """

    def __init__(
        self, model_class: type[PreTrainedModel], unknown: Set[str] = frozenset(), *, has_checkpoint: bool = True
    ) -> None:
        super().__init__(model_class, [], [])
        self.unknown = unknown
        self.has_checkpoint = has_checkpoint
        self.complaints: Collected = Collected()
        self.outcome = Outcome()
        #: what is left of `outcome` when what transformers doesn't mind is taken away
        self.info = Info(self.outcome)

    def set_layers(self, layers: list[Layer], own: list[Layer]) -> None:
        super().set_layers(layers, own)
        self.scope.on_meta = True

    @contextmanager
    def construction(self) -> Iterator[None]:
        with super().construction():
            yield
        if self.complaints.errors:  # there a load would have ended; what is still to come is not said again
            for layer in self.own:
                layer.matched.update(layer.patcher.class_mapping, layer.patcher.fusions)

    def rehearse(self, model: PreTrainedModel, checkpoint: dict[str, Any], load_config: Any) -> NoReturn:
        """What stands in for reading.

        Raises:
            RehearsedSignal: always; that or what the load would raise here.
        """
        if self.model is None:
            self.built(model)
        if self.has_checkpoint:
            self.outcome = simulate(model, load_config.weight_mapping or [], checkpoint, self.unknown, going_on=True)
            self.info = Info(self.outcome)
            self.read(model, checkpoint, load_config, self.info)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            for name in self.outcome.loaded & set(parameters):
                seams.mark_initialized(parameters[name])
            seams.settle_keys(model, self.info)
        raise RehearsedSignal

    def stock_outcome(self, model: PreTrainedModel, checkpoint: dict[str, Any]) -> Outcome:
        return stock_outcome(skeleton(self.record_class, model.config), self.key_mapping, checkpoint, self.unknown)
