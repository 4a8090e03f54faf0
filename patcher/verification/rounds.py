"""A benchmark under way: what models are made to do, and rounds in which stock and patchers take turns."""

from __future__ import annotations

import ctypes
import functools
import gc
import operator
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from patcher.compat.models import cache_argument
from patcher.errors import InvalidPatcherError, PatchConflictError
from patcher.spec.patcher import Patcher
from patcher.verification.checks import TOLERANCES
from patcher.verification.comparing import error_text
from patcher.verification.gains import Gain, decided, gain
from patcher.verification.inputs import chosen_passes, processed, processor_of
from patcher.verification.members import members_of, only
from patcher.verification.passes import device_of, difference, fitted, floating_tensors, parameters_of
from patcher.verification.sides import Side
from patcher.verification.texts import batch, token_rows
from patcher.verification.verify import verify

#: What is measured, in this order.
MEASURES = ("load", "memory", "prefill", "decode", "forward", "training")
STOCK, AGAIN = "stock", "stock again"
#: The mean of prompts, decoding and training.
ALL = "all that is run"
#: Of more members not every subset is measured.
FEW = 3
#: How many rows come at once, and how many tokens follow a prompt.
BATCHES, STEPS = (1, 8), 4
#: How many tokens a prompt may have: as many as the time allows.
_LENGTHS = (512, 256, 128, 64, 32, 16)
#: Seconds: what takes less is run several times, up to so many.
_SHORTEST, _TIMES = 0.02, 20
#: So many rounds are to fit into the time, and more are not needed; loads take no more than this part of it.
_WANTED, _ENOUGH, _LOADING = 12, 40, 0.5
#: A model that is made anew computes what stock does within so many tolerances of its type.
_APART = 2.0


# --- which patchers


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
    subsets = [some for size in sizes for some in combinations(members, size)]
    return unique([*patchers, *(each for some in subsets for each in joined(some))])


def joined(patchers: Sequence[Patcher]) -> list[Patcher]:
    """All in one; none where they contradict one another, or there are none."""
    with suppress(PatchConflictError):
        return [functools.reduce(operator.or_, patchers)] if patchers else []
    return []


def unique(patchers: Iterable[Patcher]) -> list[Patcher]:
    """Without those that do what one before them does."""
    found: dict[Patcher, Patcher] = {}
    for each in patchers:
        found.setdefault(each.replace(name="", alternatives=()), each)
    return list(found.values())


# --- what a model is made to do


def timed(device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of a call, by events where the model is on a GPU of CUDA, and what it gives."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            start.record()
            given = call()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000, given
    started = time.perf_counter()
    given = call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started, given


@dataclass(frozen=True)
class Work:
    """One batch, and what is done with it.

    Attributes:
        arguments: those of the forward.
        names: of `MEASURES` those that are done -> what reports call them.
        times: how often, each time.
    """

    arguments: Mapping[str, Any]
    names: Mapping[str, str]
    times: int = 1

    def without(self, measure: str) -> Work:
        return replace(self, names={kind: name for kind, name in self.names.items() if kind != measure})

    def run(self, model: Any) -> dict[str, float]:
        """The seconds of each, by what reports call it."""
        taken, cache = parameters_of(model), cache_argument(model)
        seconds = dict.fromkeys(self.names, 0.0)

        def measure(kind: str, call: Callable[..., Any], **arguments: Any) -> Any:
            elapsed, given = timed(device_of(model), lambda: call(**arguments))
            seconds[kind] = seconds.get(kind, 0.0) + elapsed / self.times
            return given

        for _ in range(self.times):
            arguments = fitted(dict(self.arguments), model)
            with torch.no_grad():
                if "forward" in self.names:
                    measure("forward", model, **arguments)
                elif self.names.keys() & {"prefill", "decode"}:
                    last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
                    given = measure("prefill", model, **arguments, use_cache=True, **last)
                    memory = {str(cache): getattr(given, str(cache))}
                    measure("decode", _decode, model=model, arguments=arguments, memory=memory)
            if "training" in self.names:
                uncached = {"use_cache": False} if "use_cache" in taken else {}
                measure("training", _train, model=model, arguments=arguments | uncached)
        return {name: seconds[kind] for kind, name in self.names.items()}


def _decode(model: Any, arguments: dict[str, Any], memory: dict[str, Any]) -> None:
    ids, mask = arguments["input_ids"][:, -1:], arguments.get("attention_mask")
    for _ in range(STEPS):
        mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
        model(input_ids=ids, **memory, use_cache=True, **({} if mask is None else {"attention_mask": mask}))


def _train(model: Any, arguments: dict[str, Any]) -> None:
    model.train()
    try:
        with torch.enable_grad():
            outputs = [each for each in floating_tensors(model(**arguments)) if each.requires_grad]
            torch.stack([each.float().square().mean() for each in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)


def works_of(model: Any, side: Side, inputs: Any, parts: Sequence[str], seconds: float, seed: int) -> list[Work]:
    """What stock can be run on, in about so many seconds each round.

    Args:
        model: stock.
        inputs: arguments of the forward, or several; by default texts, or what the model takes in their place.
        parts: what is measured.

    Raises:
        InvalidPatcherError: inputs that stock doesn't run.
    """
    works = [
        _work(model, each, parts)
        for each in (_batches(model, side, seconds, seed) if inputs is None else _given(inputs))
    ]
    found: list[Work] = []
    for number, work in enumerate(works, 1):
        if inputs is None and number < len(works):  # a step of training takes the longest
            work = work.without("training")
        try:
            try:
                taken = sum(work.run(model).values())
            except Exception:
                work = work.without("training")
                taken = sum(work.run(model).values())
        except Exception as error:
            if inputs is not None:
                raise InvalidPatcherError(
                    f"stock can't be run on inputs={list(work.arguments)}: {error_text(error)}"
                ) from error
        else:
            found.append(replace(work, times=min(_TIMES, max(1, round(_SHORTEST / max(taken, 1e-6))))))
    is_run = any(part not in ("load", "memory") for part in parts)
    return [work for work in found if work.names or not is_run]  # a load alone runs it once too


def _work(model: Any, arguments: Mapping[str, Any], parts: Sequence[str]) -> Work:
    """All that can be done with a batch: decoders go on from a prompt, others are only run."""
    ids = arguments.get("input_ids")
    counts = [len(each) for each in arguments.values() if isinstance(each, torch.Tensor) and each.dim()]
    title = f"{' x '.join(map(str, ids.shape))} tokens" if ids is not None else f"a batch of {(counts or [1])[0]}"
    decodes = ids is not None and model.can_generate() and not model.config.is_encoder_decoder
    names = {"forward": f"forward, {title}"}
    if decodes and cache_argument(model) is not None:
        names = {"prefill": f"prefill, {title}", "decode": f"decode, {STEPS} after {title}"}
    names |= {"training": f"training step, {title}"}
    wanted = {*parts, *(["forward"] if "prefill" in parts else [])}
    return Work(arguments, {kind: name for kind, name in names.items() if kind in wanted})


def _given(inputs: Any) -> list[Mapping[str, Any]]:
    several = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    for each in several:
        if not isinstance(each, Mapping) or not each:
            raise InvalidPatcherError(
                f"inputs are the arguments of a forward by name, or a list of such, found {each!r}; write "
                'inputs=tokenizer(texts, return_tensors="pt").'
            )
    return several


def _batches(model: Any, side: Side, seconds: float, seed: int) -> list[dict[str, Any]]:
    """One row and several, with as many tokens as there is time for; of a model that takes no texts what it takes."""
    processor = processor_of(side.folder, side.options)
    if "input_ids" in parameters_of(model):
        rows = token_rows(model, processor, seed)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = limit - STEPS if isinstance(limit, int) and limit > STEPS else _LENGTHS[0]

        def of(length: int, count: int) -> dict[str, Any]:
            ids = batch(rows, [min(length, longest)] * count)
            return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})

        with suppress(Exception), torch.no_grad():
            shortest = fitted(of(_LENGTHS[-1], 1), model)
            model(**shortest)
            # Two prompts of about as many tokens, and training, which takes three times as long as one of them.
            by_token = 5 * timed(device_of(model), lambda: model(**shortest))[0] / _LENGTHS[-1]
            length = next((each for each in _LENGTHS if each * by_token <= seconds), _LENGTHS[-1])
            return [of(max(8, length // rows), rows) for rows in BATCHES]
    passes = chosen_passes(model, processed(model, processor))
    return [one.arguments for one in passes if not one.path and one.method == "forward"][:1]


# --- loads


def loaded(side: Side, scratch: Path, seed: int, work: Work) -> tuple[Any, list[torch.Tensor], dict[str, float]]:
    """Load a model and run it once: weights of a file that is only mapped are read by the first run. What it gives,
    and the seconds and bytes that it took."""
    with suppress(AttributeError, OSError):  # what glibc keeps for later would not be counted
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # of Linux: the peak is counted anew
    before = {kind: _held(kind) for kind in ("cpu", "cuda")}
    started = time.perf_counter()
    model = side.load(scratch, seed)
    device = device_of(model)
    with torch.no_grad():
        outputs = [each.float().cpu() for each in floating_tensors(model(**fitted(dict(work.arguments), model)))]
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    seconds, held, most = time.perf_counter() - started, before.get(device.type), _held(device.type, at_most=True)
    return model, outputs, {"load": seconds} | ({} if held is None or most is None else {"memory": most - held})


def _held(kind: str, *, at_most: bool = False) -> float | None:
    """How many bytes the process holds, or on a GPU; or how many it has at most. None where it isn't known."""
    if kind == "cuda" and torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated() if at_most else torch.cuda.memory_allocated())
    with suppress(OSError):
        name = "VmHWM" if at_most else "VmRSS"
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text()) if kind == "cpu" else None
        return 1024.0 * int(found[1]) if found else None
    return None


# --- rounds

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
    checks: bool  # whether what isn't the same as stock is left out
    started: float
    models: dict[Any, Any] = field(default_factory=dict)  # STOCK, AGAIN, or a patcher
    works: list[Work] = field(default_factory=list)
    rounds: list[Figures] = field(default_factory=list)
    candidates: list[Patcher] = field(default_factory=list)
    left_out: dict[Patcher, str] = field(default_factory=dict)
    loading: float = 0.0

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
        with suppress(OverError):
            self._round(candidates, self.works[:1], is_first=True)
            for _ in range(_ENOUGH):
                started = self.passed
                self.rounds.append(self._round(candidates, self.works))
                if 2 * self.passed - started > share * self.seconds:
                    break

    def _round(self, candidates: Sequence[Patcher], works: Sequence[Work], *, is_first: bool = False) -> Figures:
        self._tell(f"round {len(self.rounds) + 1}")
        keys = [STOCK, AGAIN, *candidates]
        found: Figures = {key: {} for key in keys}
        # Anew, so that it isn't luck where weights lie; where that takes too long, once.
        if is_first or not self.kinds or self.loading <= _LOADING * self.passed:
            self._load(keys, found, is_first)
        for work in works:
            for key in self._in_turn(keys):
                try:
                    found[key].update(work.run(self.models[key]))
                except Exception as error:  # stock could: the patcher can't
                    if not isinstance(key, Patcher):
                        raise
                    self.left_out[key] = f"{', '.join(work.names.values())}: {error_text(error)}"
        return found

    def _load(self, keys: Sequence[Any], found: Figures, is_first: bool) -> None:
        """Load all anew. The first time what computes something else than stock is left out."""
        started, outputs = self.passed, dict[Any, list[torch.Tensor]]()
        self.models.clear()
        gc.collect()
        for key in self._in_turn(keys):
            patcher = key if isinstance(key, Patcher) else None
            try:
                self.models[key], outputs[key], figures = loaded(
                    replace(self.side, patcher=patcher), self.scratch, self.seed, self.works[0]
                )
            except Exception as error:
                if patcher is None:
                    raise
                self.left_out[patcher] = error_text(error)
            else:
                found[key] |= {name: value for name, value in figures.items() if name in self.parts}
        allowed = _APART * TOLERANCES.get(self.models[STOCK].dtype, 1e-5)
        for key in outputs if is_first and self.checks else ():
            apart = difference(outputs[key], outputs[STOCK])
            if not apart.within(allowed):
                self.left_out[key] = f"its outputs differ from stock's by {apart.absolute:.2g}"
        self.loading += self.passed - started

    def _tell(self, what: str) -> None:
        self.step(what, self.passed / self.seconds)

    def _in_turn(self, keys: Iterable[Any]) -> Iterator[Any]:
        """In an order that is drawn, until twice the time is nearly over."""
        kept = [key for key in keys if key not in self.left_out]
        for key in self.random.sample(kept, len(kept)):
            if self.passed > 1.8 * self.seconds:
                raise OverError
            yield key

    # --- what was found

    @property
    def kinds(self) -> dict[str, list[str]]:
        """The kinds of what is run, and the figures of each."""
        kinds: dict[str, list[str]] = {}
        for work in self.works:
            for kind, name in work.names.items():
                kinds.setdefault(kind, []).append(name)
        return kinds

    def of_stock(self) -> dict[str, float]:
        """The medians of stock."""
        names = ["load", "memory", *(name for listed in self.kinds.values() for name in listed)]
        values = {name: [each[STOCK][name] for each in self.rounds if name in each[STOCK]] for name in names}
        return {name: median(listed) for name, listed in values.items() if listed}

    def gains(self) -> dict[Patcher, dict[str, Gain]]:
        """Of each patcher what was run, and all of it together."""
        gains: dict[Patcher, dict[str, Gain]] = {}
        for names in ([ALL], self.of_stock()):  # whether one pays is decided first, and for itself
            found: dict[tuple[Patcher, str], Gain] = {}
            for key in self.candidates:
                for name in names if key not in self.left_out else ():
                    rows = [row for each in self.rounds if key in each and (row := self._row(each, key, name))]
                    if rows:
                        found[key, name] = gain(rows)
            for (key, name), one in decided(found).items():
                gains.setdefault(key, {})[name] = one
        return gains

    def _row(self, figures: Figures, key: Patcher, name: str) -> list[float]:
        """The logarithms of stock, stock again and a patcher, where all three have it."""
        three = [figures[each] for each in (STOCK, AGAIN, key)]
        kinds = list(self.kinds.values()) if name == ALL else [[name]]
        if not kinds or not all(each.get(inner, 0) > 0 for some in kinds for inner in some for each in three):
            return []
        return [fmean(fmean(log(each[inner]) for inner in some) for some in kinds) for each in three]
