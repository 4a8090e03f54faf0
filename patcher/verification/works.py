"""What a benchmark has a model do, and how long each part of it takes."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patcher.compat.models import cache_argument
from patcher.errors import InvalidPatcherError
from patcher.verification.comparing import requested
from patcher.verification.inputs import chosen_passes, processed, processor_of
from patcher.verification.numerics import floating_tensors
from patcher.verification.passes import device_of, fitted, parameters_of
from patcher.verification.sides import Side
from patcher.verification.texts import batch, token_rows

#: What is measured, in this order, and of what it is a figure.
MEASURES = {"load": "s", "memory": "bytes", "prefill": "s", "decode": "s", "forward": "s", "training": "s"}
#: How many rows come at once, and how many tokens follow a prompt.
BATCHES, STEPS = (1, 8), 4
#: How many tokens a prompt may have: as many as the time allows.
_LENGTHS = (512, 256, 128, 64, 32, 16)
#: Seconds: what takes less is run several times, up to so many.
_SHORTEST, _TIMES = 0.02, 20


class Clock:
    """The seconds of what is run, by name: of events where the model is on a GPU of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with torch.cuda.device(self.device):
                start.record()
                yield
                end.record()
            end.synchronize()
            taken = start.elapsed_time(end) / 1000
        else:
            started = time.perf_counter()
            yield
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            taken = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + taken


@dataclass(frozen=True)
class Work:
    """One batch, and what is done with it.

    Attributes:
        arguments: those of the forward.
        title: what the batch is called.
        parts: of `MEASURES` those that are done.
        cache: what the model calls the cache that it takes.
        times: how often, each time.
    """

    arguments: Mapping[str, Any]
    title: str
    parts: Sequence[str]
    cache: str = ""
    times: int = 1

    def name(self, part: str) -> str:
        """What is measured, as it is called."""
        if part == "decode":
            return f"decode, {self.title.replace(' x ', f' x {STEPS} after ')}"
        return f"{'training step' if part == 'training' else part}, {self.title}"

    @property
    def names(self) -> dict[str, str]:
        """What is measured -> of what kind it is."""
        return {self.name(part): part for part in self.parts}

    def run(self, model: Any) -> dict[str, float]:
        """The seconds of each part, by its name."""
        clock = Clock(device_of(model))
        for _ in range(self.times):
            arguments = fitted(dict(self.arguments), model)
            if "prefill" in self.parts or "decode" in self.parts:
                self._answer(model, arguments, clock)
            elif "forward" in self.parts:
                with torch.no_grad(), clock.measuring(self.name("forward")):
                    model(**arguments)
            if "training" in self.parts:
                self._train(model, arguments, clock)
        return {name: clock.seconds[name] / self.times for name in self.names}

    def _answer(self, model: Any, arguments: dict[str, Any], clock: Clock) -> None:
        last = {"logits_to_keep": 1} if "logits_to_keep" in parameters_of(model) else {}
        with torch.no_grad():
            with clock.measuring(self.name("prefill")):
                memory = getattr(model(**arguments, use_cache=True, **last), self.cache)
            ids, mask = arguments["input_ids"][:, -1:], arguments.get("attention_mask")
            with clock.measuring(self.name("decode")):
                for _ in range(STEPS):
                    if mask is not None:
                        mask = torch.cat([mask, mask[:, -1:]], 1)
                    masked = {} if mask is None else {"attention_mask": mask}
                    model(input_ids=ids, **{self.cache: memory}, use_cache=True, **masked)

    def _train(self, model: Any, arguments: dict[str, Any], clock: Clock) -> None:
        uncached = {"use_cache": False} if "use_cache" in parameters_of(model) else {}
        model.train()
        try:
            with torch.enable_grad(), clock.measuring(self.name("training")):
                outputs = [each for each in floating_tensors(model(**arguments, **uncached)) if each.requires_grad]
                torch.stack([each.float().square().mean() for each in outputs]).sum().backward()  # type: ignore[no-untyped-call]
        finally:
            model.eval()
            model.zero_grad(set_to_none=True)


class Loaded(NamedTuple):
    """A model that was loaded and has run once: what that took."""

    model: Any
    outputs: list[torch.Tensor]
    seconds: float
    bytes: float | None


def loaded(side: Side, scratch: Path, seed: int, arguments: Mapping[str, Any] | None) -> Loaded:
    """Load a model and run it once: weights of a file that is only mapped are read by the first run."""
    with suppress(AttributeError, OSError):  # what glibc keeps for later would not be counted
        ctypes.CDLL(None).malloc_trim(0)
    memory = _Memory()
    started = time.perf_counter()
    model = side.load(scratch, seed)
    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        if arguments is not None:
            outputs = [each.float().cpu() for each in floating_tensors(model(**fitted(dict(arguments), model)))]
        if device_of(model).type != "cpu":
            torch.accelerator.synchronize(device_of(model))
    return Loaded(model, outputs, time.perf_counter() - started, memory.peak(device_of(model)))


class _Memory:
    """The most memory that is held from here on, beyond what is held now: of the GPU where the model is on one."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._on_gpu = torch.cuda.memory_allocated()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # of Linux: the peak is counted anew
        self._before = self._of_process("VmRSS")

    @staticmethod
    def _of_process(what: str) -> float | None:
        with suppress(OSError):
            found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
            return 1024.0 * int(found[1]) if found else None
        return None

    def peak(self, device: torch.device) -> float | None:
        """None where the system doesn't report it."""
        if device.type == "cuda":
            return float(torch.cuda.max_memory_allocated() - self._on_gpu)
        most = self._of_process("VmHWM") if device.type == "cpu" else None
        return None if most is None or self._before is None else most - self._before


def parts_to_measure(measures: Sequence[str] | str | None) -> tuple[str, ...]:
    """What is measured, in order.

    Raises:
        InvalidPatcherError: there is no such measure.
    """
    names = MEASURES if measures is None else [measures] if isinstance(measures, str) else measures
    return requested("measure", names, MEASURES)


def works_of(model: Any, side: Side, inputs: Any, parts: Sequence[str], seconds: float, seed: int) -> list[Work]:
    """What stock can be run on, in about so many seconds each round.

    Args:
        model: stock.
        inputs: arguments of the forward, or several; by default texts, or what the model takes in their place.
        parts: what is measured.

    Raises:
        InvalidPatcherError: inputs that stock doesn't run.
    """
    is_decoder = model.can_generate() and cache_argument(model) is not None
    is_decoder = is_decoder and not model.config.is_encoder_decoder
    kinds = [part for part in parts if part not in ("load", "memory")]
    kinds = [part for part in kinds if part not in (("forward",) if is_decoder else ("prefill", "decode"))]
    batches = _given(inputs) if inputs is not None else _texts(model, side, seconds, seed)
    last = len(batches) - 1 if inputs is None else 0
    chosen = [_runnable(model, _work(each, kinds, is_trained=place >= last), inputs is not None)
              for place, each in enumerate(batches)]  # fmt: skip
    if inputs is None and len(chosen) > 1 and sum(taken for _, taken in chosen) > 2 * seconds:
        chosen = [_runnable(model, _work(batches[0], kinds, is_trained=True), is_given=False)]
    return [work for work, _ in chosen if work.parts or not kinds]  # a load alone runs it once too


def _work(arguments: dict[str, Any], kinds: Sequence[str], *, is_trained: bool) -> Work:
    some = [kind for kind in kinds if kind != "training" or is_trained]
    if "input_ids" not in arguments:
        some = ["forward" if kind == "prefill" else kind for kind in some if kind != "decode"]
    return Work(arguments, _title(arguments), some)


def _runnable(model: Any, work: Work, is_given: bool) -> tuple[Work, float]:
    """Of its parts those that stock runs, several times where they are short; and the seconds that they take."""
    work = replace(work, cache=cache_argument(model) or "")
    try:
        taken = sum(work.run(model).values())
    except Exception as error:
        if "training" in work.parts:
            rest = [part for part in work.parts if part != "training"]
            return _runnable(model, replace(work, parts=rest), is_given)
        if is_given:
            raise InvalidPatcherError(
                f"stock can't be run on inputs={list(work.arguments)}: {type(error).__name__}: {error}"
            ) from error
        return replace(work, parts=()), 0.0
    times = min(_TIMES, max(1, round(_SHORTEST / max(taken, 1e-6))))
    return replace(work, times=times), taken * times


def _given(inputs: Any) -> list[dict[str, Any]]:
    several = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    for each in several:
        if not isinstance(each, Mapping) or not each:
            raise InvalidPatcherError(
                f"inputs are the arguments of a forward by name, or a list of such, found {each!r}; write "
                'inputs=tokenizer(texts, return_tensors="pt").'
            )
    return [dict(each) for each in several]


def _texts(model: Any, side: Side, seconds: float, seed: int) -> list[dict[str, Any]]:
    """One row and several, with as many tokens as there is time for; of a model that takes no texts what it takes."""
    processor = processor_of(side.folder, side.options)
    if "input_ids" in parameters_of(model):
        rows = token_rows(model, processor, seed)

        def of(length: int, count: int) -> dict[str, Any]:
            ids = batch(rows, [min(length, _longest(model, length))] * count)
            return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})

        with suppress(Exception), torch.no_grad():
            clock, shortest = Clock(device_of(model)), fitted(of(_LENGTHS[-1], 1), model)
            model(**shortest)
            with clock.measuring("a token"):
                model(**shortest)
            # Two prompts of about as many tokens, and training, which takes three times as long as one of them.
            by_token = clock.seconds["a token"] / _LENGTHS[-1] * 5
            length = next((each for each in _LENGTHS if each * by_token <= seconds), _LENGTHS[-1])
            return [of(length if rows == 1 else max(8, length // rows), rows) for rows in BATCHES]
    passes = chosen_passes(model, processed(model, processor))
    return [one.arguments for one in passes if not one.path and one.method == "forward" and not one.chunks][:1]


def _longest(model: Any, length: int) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit - STEPS if isinstance(limit, int) and STEPS < limit < length + STEPS else length


def _title(arguments: Mapping[str, Any]) -> str:
    if "input_ids" in arguments:
        return f"{' x '.join(map(str, arguments['input_ids'].shape))} tokens"
    counts = [len(each) for each in arguments.values() if isinstance(each, torch.Tensor) and each.dim()]
    return f"a batch of {counts[0]}" if counts else "the inputs"
