"""A benchmark in progress: the work of models, and rounds in which stock and patchers take turns."""

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
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from patcher.compat.models import cache_argument
from patcher.errors import InvalidPatcherError, PatchConflictError, UnmatchedPatchError
from patcher.spec.patcher import Patcher
from patcher.verification.checks import TOLERANCES
from patcher.verification.comparing import error_text
from patcher.verification.gains import LEAST, Gain, decided, gain
from patcher.verification.inputs import chosen_passes, processed, processor_of
from patcher.verification.members import members_of, only
from patcher.verification.passes import device_of, difference, fitted, floating_tensors, parameters_of
from patcher.verification.sides import Side
from patcher.verification.texts import batch, text_config_of, token_rows
from patcher.verification.verify import verify

#: The measures, in this order.
MEASURES = ("load", "memory", "prefill", "decode", "forward", "training")
STOCK, AGAIN = "stock", "stock again"
#: The mean of prompts, decoding and training.
ALL = "all that is run"
#: The batch sizes, and the number of tokens after a prompt.
BATCHES, STEPS = (1, 8), 4
#: The lengths of a prompt, of which the longest is taken that the time allows.
_LENGTHS = (512, 256, 128, 64, 32, 16)
#: The names by which configs say how many positions a model has.
_LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
#: Shorter work (in seconds) is repeated, at most this many times.
_SHORTEST, _TIMES = 0.008, 20
#: The number of rounds for which lengths are chosen, the largest number of rounds, and the largest share of loads.
_PLANNED, _MOST, _LOADING = 12, 40, 0.5
#: The tolerance of the outputs of measured models, in tolerances of their dtype.
_APART = 2.0


# --- which patchers


def measured_members(patcher: Patcher) -> list[Patcher]:
    """Return a patcher for each key and each fusion; a patcher with conversions is one member."""
    members = members_of(patcher)
    conversions = patcher.extra_weight_conversions or patcher.filtered_weight_conversion_patterns
    if len(members) < 2 or conversions or patcher.new_weights or patcher.dropped_weights:
        return [patcher]
    return [only(patcher, [member]) for member in members]


def joined(patchers: Sequence[Patcher]) -> list[Patcher]:
    """Return one patcher with all of them, or none if they contradict each other."""
    with suppress(PatchConflictError):
        return [reduce(operator.or_, patchers)] if patchers else []
    return []


def unique(patchers: Iterable[Patcher]) -> list[Patcher]:
    """Drop patchers with the same effect as an earlier one."""
    result: dict[Patcher, Patcher] = {}
    for patcher in patchers:
        result.setdefault(patcher.replace(name="", alternatives=()), patcher)
    return list(result.values())


# --- the work of a model


def timed(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds of a call, by events on a CUDA GPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            start.record()
            call()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    started = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Work:
    """One measure of one batch.

    Attributes:
        kind: the measure.
        arguments: those of the forward.
        name: its name in reports.
        times: how often it is repeated in each round.
    """

    kind: str
    arguments: Mapping[str, Any]
    name: str
    times: int = 1

    def run(self, model: Any) -> float:
        """Return the mean of its seconds."""
        accepted, cache = parameters_of(model), cache_argument(model)
        seconds = 0.0
        for _ in range(self.times):
            arguments = fitted(self.arguments, model)
            with torch.no_grad():
                if self.kind == "training":
                    uncached = {"use_cache": False} if "use_cache" in accepted else {}
                    call = partial(_train, model, arguments | uncached)
                elif self.kind == "forward":
                    call = partial(model, **arguments)
                else:
                    last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
                    call = partial(model, **arguments, use_cache=True, **last)
                    if self.kind == "decode":
                        call = partial(_decode, model, arguments, {str(cache): getattr(call(), str(cache))})
                seconds += timed(device_of(model), call)
        return seconds / self.times


def _decode(model: Any, arguments: dict[str, Any], cache: dict[str, Any]) -> None:
    ids, mask = arguments["input_ids"][:, -1:], arguments.get("attention_mask")
    for _ in range(STEPS):
        mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
        model(input_ids=ids, **cache, use_cache=True, **({} if mask is None else {"attention_mask": mask}))


def _train(model: Any, arguments: dict[str, Any]) -> None:
    model.train()
    try:
        with torch.enable_grad():
            outputs = [output for output in floating_tensors(model(**arguments)) if output.requires_grad]
            torch.stack([output.float().square().mean() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)


def works_of(model: Any, batches: Sequence[Mapping[str, Any]], measures: Sequence[str], are_given: bool) -> list[Work]:
    """Return the work that stock can do.

    Args:
        model: stock.
        batches: arguments of the forward.
        measures: the names of the measures.
        are_given: whether the caller chose the batches; otherwise one of them is enough for training.

    Raises:
        InvalidPatcherError: stock can't be run on a batch of the caller.
    """
    works: list[Work] = []
    chosen = {*measures, *(["forward"] if "prefill" in measures else [])}
    for number, arguments in enumerate(batches, 1):
        ids = arguments.get("input_ids")
        sizes = [len(value) for value in arguments.values() if isinstance(value, torch.Tensor) and value.dim()]
        title = f"{' x '.join(map(str, ids.shape))} tokens" if ids is not None else f"a batch of {(sizes or [1])[0]}"
        generates = ids is not None and model.can_generate() and not model.config.is_encoder_decoder
        is_decoder = generates and cache_argument(model) is not None
        names = {"prefill": title, "decode": f"{STEPS} after {title}"} if is_decoder else {"forward": title}
        names |= {"training": title} if are_given or number == len(batches) else {}
        for kind in [kind for kind in names if kind in chosen]:
            work = Work(kind, arguments, f"{'training step' if kind == 'training' else kind}, {names[kind]}")
            try:
                seconds = work.run(model)
            except Exception as error:
                if are_given and kind != "training":
                    raise InvalidPatcherError(
                        f"stock can't be run on inputs={list(arguments)}: {error_text(error)}"
                    ) from error
            else:
                times = min(_TIMES, max(1, round(_SHORTEST / max(seconds, 1e-6))))
                works.append(replace(work, times=times))
    return works


def batches_of(model: Any, side: Side, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return batches of one and of eight rows, with as many tokens as fit into a round of so many seconds; for a model
    that doesn't take texts, one suitable batch."""
    processor = processor_of(side.folder, side.options)
    if "input_ids" in parameters_of(model):
        rows = token_rows(model, processor, seed)
        limits = (getattr(text_config_of(model.config), name, None) for name in _LIMITS)
        longest = next((limit - STEPS for limit in limits if isinstance(limit, int) and limit > STEPS), _LENGTHS[0])

        def prompts(length: int, count: int) -> dict[str, Any]:
            ids = batch(rows, [min(length, longest)] * count)
            return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})

        with suppress(Exception), torch.no_grad():
            shortest = fitted(prompts(_LENGTHS[-1], 1), model)
            model(**shortest)
            # Four prompts of about as many tokens, and training, which takes three times as long as one of them.
            by_token = 7 * timed(device_of(model), lambda: model(**shortest)) / _LENGTHS[-1]
            length = next((length for length in _LENGTHS if length * by_token <= seconds), _LENGTHS[-1])
            return [prompts(max(8, length // count), count) for count in BATCHES]
    passes = chosen_passes(model, processed(model, processor))
    return [run.arguments for run in passes if not run.path and run.method == "forward"][:1]


# --- loads


def loaded(
    side: Side, scratch: Path, seed: int, arguments: Mapping[str, Any]
) -> tuple[Any, list[torch.Tensor], dict[str, float]]:
    """Load a model and run it once, since memory-mapped weights are read by the first run. Return the model, its
    outputs, and the figures of the load."""
    with suppress(AttributeError, OSError):  # memory that glibc keeps would be reused, and not counted
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak on Linux
    before = {kind: _memory(kind)[0] for kind in ("cpu", "cuda")}
    started = time.perf_counter()
    model = side.load(scratch, seed)
    device = device_of(model)
    with torch.no_grad():
        outputs = [output.float().cpu() for output in floating_tensors(model(**fitted(arguments, model)))]
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    seconds = time.perf_counter() - started
    return model, outputs, {"load": seconds, "memory": _memory(device.type)[1] - before.get(device.type, 0)}


def _memory(kind: str) -> tuple[int, int]:
    """Return the current and the peak memory of the process or the GPU in bytes, 0 if unknown."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    with suppress(OSError):
        status = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path("/proc/self/status").read_text()))
        return 1024 * int(status["VmRSS"]), 1024 * int(status["VmHWM"])
    return 0, 0


# --- rounds

#: The figures of a round: STOCK, AGAIN or a patcher -> the name of the measure -> the figure.
Figures = dict[Any, dict[str, float]]


class TimeOverError(Exception):
    """There is no time for more."""


@dataclass
class Rounds:
    """A benchmark in progress."""

    side: Side
    scratch: Path
    seed: int
    seconds: float  # the time limit
    step: Callable[..., None]
    measures: Sequence[str]
    checks: bool  # whether to leave out patchers that differ from stock
    started: float
    models: dict[Any, Any] = field(default_factory=dict)  # by STOCK, AGAIN, or the patcher
    batches: Sequence[Mapping[str, Any]] = ()
    works: list[Work] = field(default_factory=list)
    rounds: list[Figures] = field(default_factory=list)
    requested: Sequence[Patcher] = ()
    candidates: list[Patcher] = field(default_factory=list)
    left_out: dict[Patcher, str] = field(default_factory=dict)  # with the reason, if a user should know of it
    loading: float = 0.0  # seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def measure(self, patchers: Sequence[Patcher], inputs: Any) -> None:
        """Verify the patchers, then measure those that pass and the subsets of their members."""
        self.requested = patchers
        members = unique(member for patcher in patchers for member in measured_members(patcher))
        candidates = unique([*patchers, *joined(members), *members])
        options = {name: value for name, value in self.side.options.items() if name not in ("dtype", "torch_dtype")}
        options |= {"model_class": self.side.cls, "quick": True, "seed": self.seed, "progress": False}
        for patcher in patchers if self.checks else ():
            self._report("verification")
            verification = verify(self.side.folder, patcher, **options)
            if not verification.passed:
                self.left_out[patcher] = f"it differs from stock: {'; '.join(verification.failures)}"
        self._prepare(inputs, len(candidates))
        many = len(members) > 2
        self._rounds(candidates, 0.5 if many else 1.0)
        if many:  # then the members that are faster alone, together
            whole = {key: gains[ALL].ratio for key, gains in self.gains().items() if key in members and ALL in gains}
            faster = sorted((member for member in whole if whole[member] < 1 - LEAST), key=whole.__getitem__)
            self._rounds(unique([*patchers, *joined(faster), *faster[:1]]), 1.0)

    def _prepare(self, inputs: Any, count: int) -> None:
        """Choose batches and work for this number of patchers."""
        self._report("inputs")
        stock = self.side.load(self.scratch, self.seed)
        batches: list[Any] = [inputs] if isinstance(inputs, Mapping) else [] if inputs is None else list(inputs)
        for arguments in batches:
            if not isinstance(arguments, Mapping) or not arguments:
                raise InvalidPatcherError(
                    f"inputs are the arguments of a forward by name, or a list of such, found {arguments!r}; write "
                    'inputs=tokenizer(texts, return_tensors="pt").'
                )
        seconds = (self.seconds - self.elapsed) * (1 - _LOADING) / (_PLANNED * (count + 2))
        self.batches = batches or batches_of(stock, self.side, seconds, self.seed)
        self.works = works_of(stock, self.batches, self.measures, are_given=inputs is not None)
        if not self.batches or not (self.works or {*self.measures} <= {"load", "memory"}):
            raise InvalidPatcherError(
                f"{self.side.class_name} runs on none of the inputs that were tried; write "
                "benchmark(..., inputs={...}), the arguments of its forward."
            )

    def _rounds(self, candidates: Sequence[Patcher], share: float) -> None:
        """Measure these until this share of the time is over; first loads aren't counted."""
        self.candidates = unique([*self.candidates, *candidates])
        keys = [STOCK, AGAIN, *candidates]
        with suppress(TimeOverError):
            _, outputs = self._load(keys)
            allowed = _APART * TOLERANCES.get(self.models[STOCK].dtype, 1e-5)
            for key in outputs if self.checks else ():
                gap = difference(outputs[key], outputs[STOCK])
                if not gap.within(allowed):
                    self.left_out[key] = f"its outputs differ from stock's by {gap.absolute:.2g}"
            for _ in range(_MOST):
                started = self.elapsed
                self.rounds.append(self._round(keys))
                if 2 * self.elapsed - started > share * self.seconds:
                    break

    def _round(self, keys: Sequence[Any]) -> Figures:
        self._report(f"round {len(self.rounds) + 1}")
        results: Figures = {key: {} for key in keys}
        # Loaded anew, if there is time, since the speed depends on where weights are in memory.
        if not self.works or self.loading <= _LOADING * self.elapsed:
            results, _ = self._load(keys)
        for work in self.works:
            for key in self._in_turn(keys):
                try:
                    results[key][work.name] = work.run(self.models[key])
                except Exception as error:  # stock didn't raise
                    if not isinstance(key, Patcher):
                        raise
                    self.left_out[key] = f"{work.name}: {error_text(error)}"
        for figures in results.values() if self.works else ():
            kinds: dict[str, list[float]] = {}
            for work in self.works:
                kinds.setdefault(work.kind, []).append(log(figures.get(work.name, 1.0)))
            if all(work.name in figures for work in self.works):
                figures[ALL] = exp(fmean(map(fmean, kinds.values())))
        return results

    def _load(self, keys: Sequence[Any]) -> tuple[Figures, dict[Any, list[torch.Tensor]]]:
        """Load all models anew. Return the figures and the outputs of the first runs."""
        started, results, outputs = self.elapsed, Figures(), dict[Any, list[torch.Tensor]]()
        self.models.clear()
        gc.collect()
        for key in self._in_turn(keys):
            side = replace(self.side, patcher=key if isinstance(key, Patcher) else None)
            try:
                self.models[key], outputs[key], figures = loaded(side, self.scratch, self.seed, self.batches[0])
            except Exception as error:
                if side.patcher is None:
                    raise
                is_a_member = key not in self.requested and isinstance(error, UnmatchedPatchError)
                self.left_out[key] = "" if is_a_member else error_text(error)  # a member for other models
            else:
                results[key] = {name: value for name, value in figures.items() if name in self.measures and value > 0}
        self.loading += self.elapsed - started
        return results, outputs

    def _report(self, what: str) -> None:
        self.step(what, self.elapsed / self.seconds)

    def _in_turn(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Yield keys in random order; stop shortly before twice the time is over."""
        kept = [key for key in keys if key not in self.left_out]
        for key in random.sample(kept, len(kept)):  # the caller has seeded it
            if self.elapsed > 1.8 * self.seconds:
                raise TimeOverError
            yield key

    # --- results

    def of_stock(self) -> dict[str, float]:
        """Return the medians of stock."""
        names = ["load", "memory", *(work.name for work in self.works)]
        values = {name: [figures[STOCK][name] for figures in self.rounds if name in figures[STOCK]] for name in names}
        return {name: median(some) for name, some in values.items() if some}

    def gains(self) -> dict[Patcher, dict[str, Gain]]:
        """Return the gains of each patcher by measure."""
        results: dict[Patcher, dict[str, Gain]] = {}
        for names in ([ALL], self.of_stock()):  # whether a patcher pays is a comparison of its own
            gains: dict[tuple[Patcher, str], Gain] = {}
            for patcher in self.candidates:
                for name in names if patcher not in self.left_out else ():
                    triples = [
                        [figures.get(key, {}).get(name) for key in (STOCK, AGAIN, patcher)] for figures in self.rounds
                    ]
                    rows = [(log(one), log(two), log(mine)) for one, two, mine in triples if one and two and mine]
                    if rows:
                        gains[patcher, name] = gain(rows)
            for (patcher, name), one in decided(gains).items():
                results.setdefault(patcher, {})[name] = one
        return results
