"""A trial: random operations on a stock model and on a patched one, which must agree after each of them."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from patcher import PatcherError
from tests.coverage.checks import in_float64
from tests.lockstep import libraries  # noqa: F401 - more operations
from tests.lockstep.operations import OPERATIONS, NotHereError, Seen
from tests.lockstep.patchers import CLASSES, FUSIONS, OF_LAYERS
from tests.lockstep.subjects import IN_FILE, TINY, WAYS, Side, Stock, Subject

#: of the largest value: steps of optimizers amplify what float64 rounds
TOLERANCE = 1e-5
#: What is done to models of generated files too: their parts have no names of stock, and no function of this package
#: is for them.
IN_FILES = (
    "training",
    "training with checkpointing",
    "clipped step",
    "scaled",
    "frozen",
    "a moving average",
    "through a vector",
    "deepcopied",
    "pickled",
    "saved",
    "own state dict",
    "a hook is added",
    "something is added",
    "embeddings are resized",
    "embeddings are untied",
    "cast",
    "in shared memory",
    "counted",
    "another attention",
    "generated",
    "saved from a state dict",
    "a layer has the values of another",
    "compiled",
    "exported",
    "called with other parameters",
    "recorded",
    "a backward hook runs",
    "state dicts of torch distributed",
    "offloaded",
    "loaded with a layer on the disk",
    "generated in another way",
)
#: What isn't done to models with layers in other layouts: it is for linear layers, or compares by their names.
FOR_LINEAR_LAYERS = (
    "gradients",
    "a part is written",
    "a part is read",
    "a part is pruned",
    "a part is parametrized",
    "a linear layer is changed",
    "an adapter is added",
    "an adapter is merged",
    "an adapter is loaded",
    "another kind of adapter",
)


@dataclass(frozen=True)
class Trial:
    """What is done, so that it can be done again.

    Attributes:
        subject: the name of the model.
        patcher: the name of the patcher.
        operations: names of operations, each with the seed of its choices.
        way: how the model comes by it.
    """

    subject: str
    patcher: str
    operations: tuple[tuple[str, int], ...]
    way: str = WAYS[0]

    @classmethod
    def random(
        cls, seed: int, length: int, subjects: Sequence[str] = (), only: Collection[str] = (), *, in_file: bool = False
    ) -> Trial:
        """Return the trial of a seed."""
        choice = Random(seed)
        subject = choice.choice(subjects or sorted(TINY))
        of_layers = f"{OF_LAYERS} {choice.randint(0, 1_000_000)}"
        others = [] if in_file else [of_layers, of_layers, *(CLASSES if "llama" in subject else ())]
        patcher = choice.choice([*FUSIONS, *others])
        names = [name for name in (IN_FILES if in_file else OPERATIONS) if not only or name in only]
        if patcher == of_layers:
            names = [name for name in names if name not in FOR_LINEAR_LAYERS]
        operations = tuple((choice.choice(names), choice.randint(0, 1_000_000)) for _ in range(length))
        return cls(subject, patcher, operations, IN_FILE if in_file else choice.choice(WAYS))

    def __str__(self) -> str:
        return f"{self.subject}, {self.patcher}, {self.way}: {'; '.join(name for name, _ in self.operations)}"


@dataclass
class Trials:
    """Runs trials, and counts what became of their operations.

    Attributes:
        folder: where checkpoints are kept.
        counts: operation -> how often both sides did it, `refused`: how often the patched one refused it.
        refusals: refusal -> a trial with it.
    """

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, Trial] = field(default_factory=dict)
    _subjects: dict[str, Subject] = field(default_factory=dict)

    def subject(self, name: str) -> Subject:
        if name not in self._subjects:
            if name not in TINY:  # there are hundreds
                shutil.rmtree(self.folder / "other", ignore_errors=True)
                return Subject.write(name, self.folder / "other")
            self._subjects[name] = Subject.write(name, self.folder / name)
        return self._subjects[name]

    def failure_of(self, trial: Trial) -> str:
        """Run a trial; what is wrong, "" if nothing is.

        Raises:
            NoSubjectError: if stock can't run the model.
        """
        with in_float64():
            subject = self.subject(trial.subject)
            try:
                stock, patched = subject.sides(trial.patcher, trial.way)
            except PatcherError as error:
                self.counts[f"{trial.way}: refused"] += 1
                self.refusals.setdefault(str(error), trial)
                return ""
            try:
                failure = difference(observed(stock), observed(patched))
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            for name, seed in trial.operations:
                failure = failure or self._failure_of_one(name, seed, stock, patched, trial)
            return failure

    def shortest(self, trial: Trial) -> Trial:
        """Return a failing trial without the operations that it fails without."""
        for index in reversed(range(len(trial.operations))):
            operations = trial.operations[:index] + trial.operations[index + 1 :]
            if self.failure_of(replace(trial, operations=operations)):
                trial = replace(trial, operations=operations)
        return trial

    def _failure_of_one(self, name: str, seed: int, stock: Side, patched: Side, trial: Trial) -> str:
        operation = OPERATIONS[name]
        seen: tuple[Seen, Seen] = {}, {}
        kept = stock.model
        try:
            before, kept = Stock.of(stock.model), copy.deepcopy(stock.model)
            stock.model = operation(stock, before, Random(seed), seen[0])
            expected = observed(stock)
        except Exception as error:
            if not isinstance(error, NotHereError):
                self.counts[f"{name}: stock raises {type(error).__name__}"] += 1
            stock.model = kept
            return ""
        try:
            patched.model = operation(patched, before, Random(seed), seen[1])
        except Exception as error:
            if not is_refusal(error) and not (isinstance(error, NotHereError) and trial.patcher in CLASSES):
                return f"{name}: {type(error).__name__}: {error}"
            self.counts[f"{name}: refused"] += 1
            self.refusals.setdefault(f"{type(error).__name__}: {error}", trial)
            stock.model = kept
            wrong = difference(observed(stock), observed(patched))
            return wrong and f"{name} was refused ({error}), and left something changed: {wrong}"
        self.counts[name] += 1
        result = difference(*seen)
        return (result and f"{name}: {result}") or difference(expected, observed(patched))


def is_refusal(error: Exception) -> bool:
    """Whether an error is a clear refusal: of this package, or by a part that has no such attribute."""
    return isinstance(error, PatcherError) or (isinstance(error, AttributeError) and "is rows of" in str(error))


def observed(side: Side) -> dict[str, Any]:
    """Return what a model computes and holds."""
    with torch.no_grad():
        outputs = side.run(side.model)
    return {"outputs": outputs, "weights in the original layout": dict(side.held(side.model))}


def difference(expected: Any, actual: Any) -> str:
    """Return the first difference of two values, "" if they agree within the tolerance."""
    if isinstance(expected, Mapping):
        if expected.keys() != actual.keys():
            only = [sorted(expected.keys() - actual.keys())[:5], sorted(actual.keys() - expected.keys())[:5]]
            return f"only stock has {only[0]}, only the patched model has {only[1]}"
        differences = ((name, difference(value, actual[name])) for name, value in expected.items())
        return next((f"{name}: {text}" for name, text in differences if text), "")
    if isinstance(expected, list | tuple):
        return difference(dict(enumerate(expected)), dict(enumerate(actual)))
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return "" if expected == actual else f"{expected!r} and {actual!r}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"{expected.dtype} {tuple(expected.shape)} and {actual.dtype} {tuple(actual.shape)}"
    if torch.allclose(expected, actual, rtol=0, atol=TOLERANCE * (1 + largest(expected)), equal_nan=True):
        return ""
    return f"off by {largest(expected - actual):.2g}"


def largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
