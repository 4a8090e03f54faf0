"""A benchmark under way: what models are made to do, and rounds in which stock and patchers take turns."""

from __future__ import annotations

import ctypes
import gc
import operator
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from patcher.compat.models import cache_argument
from patcher.errors import InvalidPatcherError, PatchConflictError
from patcher.spec.patcher import Patcher
from patcher.verification.checks import TOLERANCES
from patcher.verification.comparing import error_text
from patcher.verification.gains import LEAST, Gain, decided, gain
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
_SHORTEST, _TIMES = 0.008, 20
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
        return [reduce(operator.or_, patchers)] if patchers else []
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
    """What is done with one batch: of `MEASURES` one that runs the model.

    Attributes:
        kind: which of them.
        arguments: those of the forward.
        name: what reports call it.
        times: how often it is done, each time.
    """

    kind: str
    arguments: Mapping[str, Any]
    name: str
    times: int = 1

    def run(self, model: Any) -> float:
        """The seconds that it takes."""
        taken, cache = parameters_of(model), cache_argument(model)
        seconds = 0.0
        for _ in range(self.times):
            arguments = fitted(self.arguments, model)
            with torch.no_grad():
                if self.kind == "training":
                    uncached = {"use_cache": False} if "use_cache" in taken else {}
                    call = partial(_train, model, arguments | uncached)
                elif self.kind == "forward":
                    call = partial(model, **arguments)
                else:
                    last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
                    call = partial(model, **arguments, use_cache=True, **last)
                    if self.kind == "decode":
                        call = partial(_decode, model, arguments, {str(cache): getattr(call(), str(cache))})
                seconds += timed(device_of(model), call)[0]
        return seconds / self.times


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


def works_of(model: Any, batches: Sequence[Mapping[str, Any]], parts: Sequence[str], are_given: bool) -> list[Work]:
    """What stock can be made to do: decoders go on from a prompt, others are only run.

    Args:
        model: stock.
        batches: arguments of the forward.
        parts: what is measured.
        are_given: whether somebody asks for these batches; of others one is enough for a step of training.

    Raises:
        InvalidPatcherError: batches that are given, and stock can't be run on one.
    """
    works: list[Work] = []
    wanted = {*parts, *(["forward"] if "prefill" in parts else [])}
    for number, arguments in enumerate(batches, 1):
        ids = arguments.get("input_ids")
        counts = [len(each) for each in arguments.values() if isinstance(each, torch.Tensor) and each.dim()]
        title = f"{' x '.join(map(str, ids.shape))} tokens" if ids is not None else f"a batch of {(counts or [1])[0]}"
        decodes = ids is not None and model.can_generate() and not model.config.is_encoder_decoder
        is_decoder = decodes and cache_argument(model) is not None
        names = {"prefill": title, "decode": f"{STEPS} after {title}"} if is_decoder else {"forward": title}
        names |= {"training": title} if are_given or number == len(batches) else {}
        for kind, what in names.items():
            work = Work(kind, arguments, f"{'training step' if kind == 'training' else kind}, {what}")
            try:
                taken = work.run(model) if kind in wanted else 0.0
            except Exception as error:
                if are_given and kind != "training":
                    raise InvalidPatcherError(
                        f"stock can't be run on inputs={list(arguments)}: {error_text(error)}"
                    ) from error
            else:
                times = min(_TIMES, max(1, round(_SHORTEST / max(taken, 1e-6))))
                works += [replace(work, times=times)] if kind in wanted else []
    return works


def batches_of(model: Any, side: Side, seconds: float, seed: int) -> list[dict[str, Any]]:
    """One row and several, with as many tokens as there is time for in a round of so many seconds; of a model that
    takes no texts what it takes."""
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
            # Four prompts of about as many tokens, and training, which takes three times as long as one of them.
            by_token = 7 * timed(device_of(model), lambda: model(**shortest))[0] / _LENGTHS[-1]
            length = next((each for each in _LENGTHS if each * by_token <= seconds), _LENGTHS[-1])
            return [of(max(8, length // rows), rows) for rows in BATCHES]
    passes = chosen_passes(model, processed(model, processor))
    return [one.arguments for one in passes if not one.path and one.method == "forward"][:1]


# --- loads


def loaded(
    side: Side, scratch: Path, seed: int, arguments: Mapping[str, Any]
) -> tuple[Any, list[torch.Tensor], dict[str, float]]:
    """Load a model and run it once: weights of a file that is only mapped are read by the first run. What it gives,
    and the seconds and bytes that it took."""
    with suppress(AttributeError, OSError):  # what glibc keeps for later would not be counted
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # of Linux: the peak is counted anew
    before = {kind: _held(kind)[0] for kind in ("cpu", "cuda")}
    started = time.perf_counter()
    model = side.load(scratch, seed)
    device = device_of(model)
    with torch.no_grad():
        outputs = [each.float().cpu() for each in floating_tensors(model(**fitted(arguments, model)))]
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    seconds = time.perf_counter() - started
    return model, outputs, {"load": seconds, "memory": _held(device.type)[1] - before.get(device.type, 0)}


def _held(kind: str) -> tuple[int, int]:
    """How many bytes the process holds, or on a GPU, and how many at most; 0 where it isn't known."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    with suppress(OSError):
        found = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path("/proc/self/status").read_text()))
        return 1024 * int(found["VmRSS"]), 1024 * int(found["VmHWM"])
    return 0, 0


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
    batches: Sequence[Mapping[str, Any]] = ()
    works: list[Work] = field(default_factory=list)
    rounds: list[Figures] = field(default_factory=list)
    candidates: list[Patcher] = field(default_factory=list)
    left_out: dict[Patcher, str] = field(default_factory=dict)
    loading: float = 0.0

    @property
    def passed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started

    def measure(self, patchers: Sequence[Patcher], inputs: Any) -> None:
        """All of it: those that aren't what stock is are left out, then rounds of the others and of their parts."""
        members = unique(member for each in patchers for member in measured_members(each))
        candidates = candidates_of(patchers, members)
        options = {name: value for name, value in self.side.options.items() if name not in ("dtype", "torch_dtype")}
        options |= {"model_class": self.side.cls, "quick": True, "seed": self.seed, "progress": False}
        for each in patchers if self.checks else ():
            self._tell("verification")
            found = verify(self.side.folder, each, **options)
            if not found.passed:
                self.left_out[each] = f"it differs from stock: {'; '.join(found.failures)}"
        self._prepare(inputs, len(candidates))
        are_all = len(members) <= FEW
        self._rounds(candidates, 1.0 if are_all else 0.5)
        if not are_all:  # those that are faster by themselves, together, beside what was given
            whole = {key: gains[ALL].ratio for key, gains in self.gains().items() if key in members and ALL in gains}
            faster = sorted((each for each in whole if whole[each] < 1 - LEAST), key=whole.__getitem__)
            self._rounds(unique([*patchers, *joined(faster), *faster[:1]]), 1.0)

    def _prepare(self, inputs: Any, count: int) -> None:
        """What stock is run on, where so many patchers are measured."""
        self._tell("inputs")
        stock = self.side.load(self.scratch, self.seed)
        given: list[Any] = [inputs] if isinstance(inputs, Mapping) else [] if inputs is None else list(inputs)
        for each in given:
            if not isinstance(each, Mapping) or not each:
                raise InvalidPatcherError(
                    f"inputs are the arguments of a forward by name, or a list of such, found {each!r}; write "
                    'inputs=tokenizer(texts, return_tensors="pt").'
                )
        seconds = (self.seconds - self.passed) * (1 - _LOADING) / (_WANTED * (count + 2))
        self.batches = given or batches_of(stock, self.side, seconds, self.seed)
        self.works = works_of(stock, self.batches, self.parts, are_given=inputs is not None)
        if not self.batches or not (self.works or {*self.parts} <= {"load", "memory"}):
            raise InvalidPatcherError(
                f"{self.side.class_name} runs on none of the inputs that were tried; write "
                "benchmark(..., inputs={...}), the arguments of its forward."
            )

    def _rounds(self, candidates: Sequence[Patcher], share: float) -> None:
        """Rounds of these, until so much of the time is over; the first loads, in which all is new, don't count."""
        self.candidates = unique([*self.candidates, *candidates])
        keys = [STOCK, AGAIN, *candidates]
        with suppress(OverError):
            _, outputs = self._load(keys)
            allowed = _APART * TOLERANCES.get(self.models[STOCK].dtype, 1e-5)
            for key in outputs if self.checks else ():
                apart = difference(outputs[key], outputs[STOCK])
                if not apart.within(allowed):
                    self.left_out[key] = f"its outputs differ from stock's by {apart.absolute:.2g}"
            for _ in range(_ENOUGH):
                started = self.passed
                self.rounds.append(self._round(keys))
                if 2 * self.passed - started > share * self.seconds:
                    break

    def _round(self, keys: Sequence[Any]) -> Figures:
        self._tell(f"round {len(self.rounds) + 1}")
        found: Figures = {key: {} for key in keys}
        # Loaded anew, so that it isn't luck where weights lie; where that takes too long, once.
        if not self.works or self.loading <= _LOADING * self.passed:
            found, _ = self._load(keys)
        for work in self.works:
            for key in self._in_turn(keys):
                try:
                    found[key][work.name] = work.run(self.models[key])
                except Exception as error:  # stock could: the patcher can't
                    if not isinstance(key, Patcher):
                        raise
                    self.left_out[key] = f"{work.name}: {error_text(error)}"
        for figures in found.values() if self.works else ():
            kinds: dict[str, list[float]] = {}
            for work in self.works:
                kinds.setdefault(work.kind, []).append(log(figures.get(work.name, 1.0)))
            if all(work.name in figures for work in self.works):
                figures[ALL] = exp(fmean(map(fmean, kinds.values())))
        return found

    def _load(self, keys: Sequence[Any]) -> tuple[Figures, dict[Any, list[torch.Tensor]]]:
        """Load all anew. What was measured, and what they give."""
        started, found, outputs = self.passed, Figures(), dict[Any, list[torch.Tensor]]()
        self.models.clear()
        gc.collect()
        for key in self._in_turn(keys):
            side = replace(self.side, patcher=key if isinstance(key, Patcher) else None)
            try:
                self.models[key], outputs[key], figures = loaded(side, self.scratch, self.seed, self.batches[0])
            except Exception as error:
                if side.patcher is None:
                    raise
                self.left_out[key] = error_text(error)
            else:
                found[key] = {name: value for name, value in figures.items() if name in self.parts and value > 0}
        self.loading += self.passed - started
        return found, outputs

    def _tell(self, what: str) -> None:
        self.step(what, self.passed / self.seconds)

    def _in_turn(self, keys: Iterable[Any]) -> Iterator[Any]:
        """In an order that is drawn, until twice the time is nearly over."""
        kept = [key for key in keys if key not in self.left_out]
        for key in random.sample(kept, len(kept)):  # seeded around all of it
            if self.passed > 1.8 * self.seconds:
                raise OverError
            yield key

    # --- what was found

    def of_stock(self) -> dict[str, float]:
        """The medians of stock."""
        names = ["load", "memory", *(work.name for work in self.works)]
        values = {name: [each[STOCK][name] for each in self.rounds if name in each[STOCK]] for name in names}
        return {name: median(listed) for name, listed in values.items() if listed}

    def gains(self) -> dict[Patcher, dict[str, Gain]]:
        """Of each patcher what was run, and all of it together."""
        gains: dict[Patcher, dict[str, Gain]] = {}
        for names in ([ALL], self.of_stock()):  # whether one pays is decided first, and for itself
            found: dict[tuple[Patcher, str], Gain] = {}
            for key in self.candidates:
                for name in names if key not in self.left_out else ():
                    three = [[each.get(one, {}).get(name) for one in (STOCK, AGAIN, key)] for each in self.rounds]
                    rows = [[log(figure) for figure in row if figure] for row in three if all(row)]
                    if rows:
                        found[key, name] = gain(rows)
            for (key, name), one in decided(found).items():
                gains.setdefault(key, {})[name] = one
        return gains
