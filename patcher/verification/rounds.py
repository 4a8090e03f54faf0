"""Rounds in which stock, stock again and each candidate load and run, in an order that is drawn anew each time."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from patcher.errors import InvalidPatcherError
from patcher.spec.patcher import Patcher
from patcher.verification.checks import TOLERANCES
from patcher.verification.comparing import error_text
from patcher.verification.gains import Gain, decided, gain
from patcher.verification.members import unique
from patcher.verification.numerics import difference
from patcher.verification.sides import Side
from patcher.verification.verify import verify
from patcher.verification.works import Work, loaded, works_of

STOCK, AGAIN = "stock", "stock again"
#: The mean of prompts, decoding and training.
ALL = "all that is run"
#: So many rounds are to fit into the time, and more are not needed; loads take no more than this part of it.
_WANTED, _ENOUGH, _LOADING = 12, 40, 0.5
#: A model that is made anew computes what stock does within so many tolerances of its type.
_APART = 2.0

#: What was measured of each, in one round: STOCK, AGAIN or a patcher -> the name of the figure -> the figure.
Figures = dict[Any, dict[str, float]]


class OverError(Exception):
    """The time is over."""


@dataclass
class Rounds:
    """A benchmark under way: what is measured and how, then what was found."""

    side: Side
    scratch: Path
    seed: int
    seconds: float  # that it may take
    step: Callable[..., None]
    parts: Sequence[str]
    checks: bool = True  # whether what isn't the same as stock is left out
    models: dict[Any, Any] = field(default_factory=dict)  # STOCK, AGAIN, or a patcher
    works: list[Work] = field(default_factory=list)
    rounds: list[Figures] = field(default_factory=list)
    candidates: list[Patcher] = field(default_factory=list)
    failed: dict[Patcher, dict[str, str]] = field(default_factory=dict)
    left_out: dict[Patcher, str] = field(default_factory=dict)
    loading: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def passed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started

    def verify(self, patchers: Iterable[Patcher]) -> None:
        """Leave out those that aren't what stock is."""
        options = {name: value for name, value in self.side.options.items() if name not in ("dtype", "torch_dtype")}
        options |= {"model_class": self.side.cls, "quick": True, "seed": self.seed, "progress": False}
        for each in patchers:
            self._tell("verification")
            found = verify(self.side.folder, each, **options)
            if not found.passed:
                self.left_out[each] = f"it differs from stock: {'; '.join(found.failures)}"

    def prepare(self, inputs: Any, count: int) -> None:
        """What stock is run on, where so many patchers are measured."""
        self._tell("inputs")
        self.models[STOCK] = stock = self.side.load(self.scratch, self.seed)
        seconds = (self.seconds - self.passed) * (1 - _LOADING) / (_WANTED * (count + 2))
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
                started = self.passed
                self.rounds.append(self._round(candidates, self.works))
                if 2 * self.passed - started > share * self.seconds:
                    break

    def _tell(self, what: str) -> None:
        self.step(what, self.passed / self.seconds)

    def _in_turn(self, keys: Iterable[Any]) -> Iterable[Any]:
        """In an order that is drawn, until twice the time is nearly over."""
        kept = [key for key in keys if key not in self.left_out]
        for key in self.random.sample(kept, len(kept)):
            if self.passed > 1.8 * self.seconds:
                raise OverError
            yield key

    def _round(self, candidates: Sequence[Patcher], works: Sequence[Work]) -> Figures:
        self._tell(f"round {len(self.rounds) + 1}")
        keys = [STOCK, AGAIN, *candidates]
        found = self._load(keys)
        for work in works:
            for key in self._in_turn(keys):
                try:
                    found.setdefault(key, {}).update(work.run(self.models[key]))
                except Exception as error:  # stock could: the patcher can't
                    if not isinstance(key, Patcher):
                        raise
                    self.failed.setdefault(key, {})[work.title] = error_text(error)
        return found

    def _load(self, keys: Sequence[Any]) -> Figures:
        """Load all anew, so that it isn't luck where weights lie; where that takes too long, once."""
        found: Figures = {}
        is_first = any(key not in self.models for key in keys if key not in self.left_out)
        if not is_first and self.kinds and self.loading > _LOADING * self.passed:
            return found
        started, outputs = time.perf_counter(), {}
        for key in keys:
            self.models.pop(key, None)
        gc.collect()
        for key in self._in_turn(keys):
            patcher = key if isinstance(key, Patcher) else None
            side = replace(self.side, patcher=patcher)
            try:
                self.models[key], outputs[key], figures = loaded(side, self.scratch, self.seed, self.works[0])
            except Exception as error:
                if patcher is None:
                    raise
                self.left_out[patcher] = error_text(error)
            else:
                found[key] = {name: value for name, value in figures.items() if name in self.parts}
        allowed = _APART * TOLERANCES.get(self.models[STOCK].dtype, 1e-5)
        for key in outputs if is_first and self.checks else ():
            apart = difference(outputs[key], outputs[STOCK])
            if not apart.within(allowed):
                self.left_out[key] = f"its outputs differ from stock's by {apart.absolute:.2g}"
        self.loading += time.perf_counter() - started
        return found

    # --- what was found

    @property
    def kinds(self) -> dict[str, list[str]]:
        """The kinds of what was run, and the figures of each."""
        kinds: dict[str, list[str]] = {}
        for work in self.works:
            for kind, name in work.parts.items():
                kinds.setdefault(kind, []).append(name)
        return kinds

    def of_stock(self) -> dict[str, float]:
        """The medians of stock."""
        names = dict.fromkeys(["load", "memory", *(name for work in self.works for name in work.parts.values())])
        values = {name: [each[STOCK][name] for each in self.rounds if name in each[STOCK]] for name in names}
        return {name: median(listed) for name, listed in values.items() if listed}

    def gains(self) -> dict[Patcher, dict[str, Gain]]:
        """Of each patcher what was run, and all of it together."""
        gains: dict[Patcher, dict[str, Gain]] = {}
        for names in ([ALL], self.of_stock()):  # whether one pays is decided first, and for itself
            found: dict[tuple[Patcher, str], Gain] = {}
            for key in self.candidates:
                for name in names:
                    rows = [row for each in self.rounds if key in each and (row := self._row(each, key, name))]
                    if rows:
                        found[key, name] = gain(rows)
            for (key, name), one in decided(found).items():
                gains.setdefault(key, {})[name] = one
        return gains

    def _row(self, one: Mapping[Any, Mapping[str, float]], key: Patcher, name: str) -> list[float]:
        """The logarithms of stock, stock again and a patcher, where all three have it."""
        figures = [one[each] for each in (STOCK, AGAIN, key)]
        kinds = list(self.kinds.values()) if name == ALL else [[name]]
        if not kinds or not all(each.get(inner, 0) > 0 for some in kinds for inner in some for each in figures):
            return []
        return [fmean(fmean(log(each[inner]) for inner in some) for some in kinds) for each in figures]
