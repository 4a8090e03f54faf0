"""Rounds in which stock, stock again and each candidate load and run, in an order that is drawn anew each time."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from patcher.errors import InvalidPatcherError
from patcher.spec.patcher import Patcher
from patcher.verification.checks import TOLERANCES
from patcher.verification.comparing import error_text
from patcher.verification.gains import Gain, decided, gain
from patcher.verification.members import joined, members_of, only
from patcher.verification.numerics import difference
from patcher.verification.sides import Side
from patcher.verification.verify import verify
from patcher.verification.works import Loaded, Work, loaded, works_of

STOCK, AGAIN = "stock", "stock again"
#: The mean of prompts, decoding and training.
ALL = "all that is run"
#: Of more members not every subset is measured.
FEW = 3
#: So many rounds are to fit into the time, and more are not needed; loads take no more than this part of it.
_WANTED, _ENOUGH, _LOADING = 12, 40, 0.5
#: A model that is made anew computes what stock does within so many tolerances of its type.
_APART = 2.0


def measured_members(patcher: Patcher) -> list[Patcher]:
    """Each key and each fusion alone; a patcher with conversions is one member."""
    members = members_of(patcher)
    conversions = patcher.extra_weight_conversions or patcher.filtered_weight_conversion_patterns
    if len(members) < 2 or conversions or patcher.new_weights or patcher.dropped_weights:
        return [patcher]
    return [only(patcher, [member]) for member in members]


def candidates_of(patchers: Sequence[Patcher], members: Sequence[Patcher]) -> list[Patcher]:
    """What is measured: what was given, and the subsets of its members; of many each alone, and all."""
    sizes = range(1, len(members) + 1) if len(members) <= FEW else (1, len(members))
    subsets = (joined(some) for size in sizes for some in combinations(members, size))
    return unique([*patchers, *filter(None, subsets)])


def unique(patchers: Iterable[Patcher]) -> list[Patcher]:
    """Without those that do what one before them does."""
    found: dict[Patcher, Patcher] = {}
    for each in patchers:
        found.setdefault(each.replace(name="", alternatives=()), each)
    return list(found.values())


class OverError(Exception):
    """The time is over."""


@dataclass
class Deadline:
    """How long it may take."""

    seconds: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def passed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started

    def check(self) -> None:
        """Raise where twice the time is nearly over."""
        if self.passed > 1.8 * self.seconds:
            raise OverError


@dataclass
class Rounds:
    """A benchmark under way: what is measured and how, then what was found."""

    side: Side
    scratch: Path
    seed: int
    deadline: Deadline
    step: Callable[..., None]
    parts: Sequence[str]
    checks: bool = True  # whether what isn't the same as stock is left out
    models: dict[Any, Any] = field(default_factory=dict)  # STOCK, AGAIN, or a patcher
    works: list[Work] = field(default_factory=list)
    rounds: list[dict[Any, dict[str, float]]] = field(default_factory=list)
    candidates: list[Patcher] = field(default_factory=list)
    failed: dict[Patcher, dict[str, str]] = field(default_factory=dict)
    left_out: dict[Patcher, str] = field(default_factory=dict)
    loading: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def verify(self, patchers: Iterable[Patcher]) -> None:
        """Leave out those that aren't what stock is."""
        options = {name: value for name, value in self.side.options.items() if name not in ("dtype", "torch_dtype")}
        for each in patchers:
            self._tell("verification")
            options |= {"model_class": self.side.cls, "quick": True, "seed": self.seed, "progress": False}
            found = verify(self.side.folder, each, **options)
            if not found.passed:
                self.left_out[each] = f"it differs from stock: {'; '.join(found.failures)}"

    def prepare(self, inputs: Any, count: int) -> None:
        """What stock is run on, where so many patchers are measured."""
        self._tell("inputs")
        self.models[STOCK] = stock = self.side.load(self.scratch, self.seed)
        seconds = (self.deadline.seconds - self.deadline.passed) * (1 - _LOADING) / (_WANTED * (count + 2))
        self.works = works_of(stock, self.side, inputs, self.parts, seconds, self.seed)
        if not self.works:
            raise InvalidPatcherError(
                f"{self.side.class_name} runs on none of the inputs that were tried; write "
                "benchmark(..., inputs={...}), the arguments of its forward."
            )

    def measure(self, candidates: Sequence[Patcher], share: float = 1.0) -> None:
        """Rounds of these, until so much of the time is over; the first, in which all is new, doesn't count."""
        self.candidates = unique([*self.candidates, *candidates])
        for key in self.models.keys() - {STOCK, AGAIN, *candidates}:
            del self.models[key]
        with suppress(OverError):
            self._round(candidates, self.works[:1])
            for _ in range(_ENOUGH):
                started = self.deadline.passed
                self.rounds.append(self._round(candidates, self.works))
                if 2 * self.deadline.passed - started > share * self.deadline.seconds:
                    break

    def _tell(self, what: str) -> None:
        self.step(what, self.deadline.passed / self.deadline.seconds)

    def _round(self, candidates: Sequence[Patcher], works: Sequence[Work]) -> dict[Any, dict[str, float]]:
        self._tell(f"round {len(self.rounds) + 1}")
        found: dict[Any, dict[str, float]] = {}
        self._load([STOCK, AGAIN, *candidates], found)
        keys = [STOCK, AGAIN, *(each for each in candidates if each not in self.left_out)]
        for work in works:
            for key in self.random.sample(keys, len(keys)):
                self.deadline.check()
                try:
                    found.setdefault(key, {}).update(work.run(self.models[key]))
                except Exception as error:  # stock could: the patcher can't
                    if not isinstance(key, Patcher):
                        raise
                    self.failed.setdefault(key, {})[work.title] = error_text(error)
        return found

    def _load(self, keys: Sequence[Any], found: dict[Any, dict[str, float]]) -> None:
        """Load all anew, so that it isn't luck where weights lie; where that takes too long, once."""
        keys = [key for key in keys if key not in self.left_out]
        is_first = any(key not in self.models for key in keys)
        if not is_first and self.names and self.loading > _LOADING * self.deadline.passed:
            return
        started, outputs = time.perf_counter(), {}
        for key in keys:
            self.models.pop(key, None)
        gc.collect()
        for key in self.random.sample(keys, len(keys)):
            self.deadline.check()
            side = self.side if not isinstance(key, Patcher) else Side(
                self.side.cls, self.side.folder, self.side.options, key
            )  # fmt: skip
            try:
                one: Loaded = loaded(side, self.scratch, self.seed, self.works[0].arguments)
            except Exception as error:
                if not isinstance(key, Patcher):
                    raise
                self.left_out[key] = error_text(error)
                continue
            self.models[key], outputs[key] = one.model, one.outputs
            figures = {"load": one.seconds} | ({} if one.bytes is None else {"memory": one.bytes})
            found[key] = {name: value for name, value in figures.items() if name in self.parts}
        allowed = _APART * TOLERANCES.get(self.models[STOCK].dtype, 1e-5)
        for key in outputs if is_first else ():
            apart = difference(outputs[key], outputs[STOCK])
            if not apart.within(allowed) and self.checks:
                self.left_out[key] = f"its outputs differ from stock's by {apart.absolute:.2g}"
        self.loading += time.perf_counter() - started

    # --- what was found

    @property
    def names(self) -> dict[str, str]:
        """What was run -> of what kind it is."""
        return {name: kind for work in self.works for name, kind in work.names.items()}

    def of_stock(self) -> dict[str, float]:
        """The medians of stock."""
        names = ["load", "memory", *self.names]
        values = {name: [each[STOCK][name] for each in self.rounds if name in each[STOCK]] for name in names}
        return {name: median(listed) for name, listed in values.items() if listed}

    def gains(self) -> dict[Patcher, dict[str, Gain]]:
        """Of each patcher what was run, and all of it together."""
        found: dict[tuple[Patcher, str], Gain] = {}
        for key in self.candidates:
            for name in [ALL, *self.of_stock()]:
                rows = [row for each in self.rounds if key in each and (row := list(self._row(each, key, name)))]
                if rows:
                    found[key, name] = gain(rows)
        gains: dict[Patcher, dict[str, Gain]] = {}
        for is_all in (True, False):  # whether one pays is decided first, and for itself
            some = {key: one for key, one in found.items() if (key[1] == ALL) is is_all}
            for (key, name), one in decided(some).items():
                gains.setdefault(key, {})[name] = one
        return gains

    def _row(self, one: Mapping[Any, Mapping[str, float]], key: Patcher, name: str) -> tuple[float, ...]:
        """The logarithms of stock, stock again and a patcher, where all three have it."""
        figures = [one[each] for each in (STOCK, AGAIN, key)]
        names = self.names if name == ALL else {name: name}
        if not names or not all(each.get(inner, 0) > 0 for inner in names for each in figures):
            return ()
        kinds: dict[str, list[str]] = {}
        for inner, kind in names.items():
            kinds.setdefault(kind, []).append(inner)
        return tuple(fmean(fmean(log(each[inner]) for inner in some) for some in kinds.values()) for each in figures)
