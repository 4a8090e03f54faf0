"""What a benchmark has a model do, and how long each part of it takes."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from patcher.compat.models import cache_argument
from patcher.errors import InvalidPatcherError
from patcher.verification.comparing import error_text
from patcher.verification.inputs import chosen_passes, processed, processor_of
from patcher.verification.numerics import floating_tensors
from patcher.verification.passes import device_of, fitted, parameters_of
from patcher.verification.sides import Side
from patcher.verification.texts import batch, token_rows

#: What is measured, in this order.
MEASURES = ("load", "memory", "prefill", "decode", "forward", "training")
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
        parts: of `MEASURES` those that are done -> what reports call them.
        cache: what the model calls the cache that it takes.
        times: how often, each time.
    """

    arguments: Mapping[str, Any]
    title: str
    parts: Mapping[str, str]
    cache: str = ""
    times: int = 1

    def run(self, model: Any) -> dict[str, float]:
        """The seconds of each part, by what reports call it."""
        clock = Clock(device_of(model))
        taken = parameters_of(model)
        for _ in range(self.times):
            arguments = fitted(dict(self.arguments), model)
            with torch.no_grad():
                if self.parts.keys() & {"prefill", "decode"}:
                    last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
                    with clock.measuring("prefill"):
                        memory = getattr(model(**arguments, use_cache=True, **last), self.cache)
                    with clock.measuring("decode"):
                        self._go_on(model, arguments, memory)
                elif "forward" in self.parts:
                    with clock.measuring("forward"):
                        model(**arguments)
            if "training" in self.parts:
                uncached = {"use_cache": False} if "use_cache" in taken else {}
                self._train(model, arguments | uncached, clock)
        return {name: clock.seconds[part] / self.times for part, name in self.parts.items()}

    def _go_on(self, model: Any, arguments: dict[str, Any], memory: Any) -> None:
        ids, mask = arguments["input_ids"][:, -1:], arguments.get("attention_mask")
        for _ in range(STEPS):
            mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
            masked = {} if mask is None else {"attention_mask": mask}
            model(input_ids=ids, **{self.cache: memory}, use_cache=True, **masked)

    def _train(self, model: Any, arguments: dict[str, Any], clock: Clock) -> None:
        model.train()
        try:
            with torch.enable_grad(), clock.measuring("training"):
                outputs = [each for each in floating_tensors(model(**arguments)) if each.requires_grad]
                torch.stack([each.float().square().mean() for each in outputs]).sum().backward()  # type: ignore[no-untyped-call]
        finally:
            model.eval()
            model.zero_grad(set_to_none=True)


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


def works_of(model: Any, side: Side, inputs: Any, parts: Sequence[str], seconds: float, seed: int) -> list[Work]:
    """What stock can be run on, in about so many seconds each round.

    Args:
        model: stock.
        inputs: arguments of the forward, or several; by default texts, or what the model takes in their place.
        parts: what is measured.

    Raises:
        InvalidPatcherError: inputs that stock doesn't run.
    """
    is_given = inputs is not None
    batches = _given(inputs) if is_given else _texts(model, side, seconds, seed)
    works = [_work(model, each, parts) for each in batches]
    if not is_given:  # a step of training takes the longest
        works[:-1] = [_without_training(work) for work in works[:-1]]
    chosen = [_runnable(model, work, is_given) for work in works]
    if not is_given and len(chosen) > 1 and sum(taken for _, taken in chosen) > 2 * seconds:
        chosen = [_runnable(model, _work(model, batches[0], parts), is_given)]
    is_run = any(part not in ("load", "memory") for part in parts)
    return [work for work, _ in chosen if work.parts or not is_run]  # a load alone runs it once too


def _work(model: Any, arguments: dict[str, Any], parts: Sequence[str]) -> Work:
    """All that can be done with a batch: decoders go on from a prompt, others are only run."""
    cache, ids = cache_argument(model), arguments.get("input_ids")
    counts = [len(each) for each in arguments.values() if isinstance(each, torch.Tensor) and each.dim()]
    title = f"a batch of {counts[0]}" if counts else "the inputs"
    title = title if ids is None else f"{' x '.join(map(str, ids.shape))} tokens"
    decodes = model.can_generate() and cache is not None and not model.config.is_encoder_decoder
    names = {"prefill": f"prefill, {title}", "decode": f"decode, {title.replace(' x ', f' x {STEPS} after ')}"}
    if not decodes or ids is None:
        names = {"forward": f"forward, {title}"}
        parts = ["forward" if part == "prefill" and decodes else part for part in parts]
    names |= {"training": f"training step, {title}"}
    return Work(arguments, title, {part: names[part] for part in parts if part in names}, cache or "")


def _without_training(work: Work) -> Work:
    return replace(work, parts={part: name for part, name in work.parts.items() if part != "training"})


def _runnable(model: Any, work: Work, is_given: bool) -> tuple[Work, float]:
    """Of its parts those that stock runs, several times where they are short; and the seconds that they take."""
    try:
        taken = sum(work.run(model).values())
    except Exception as error:
        if "training" in work.parts:
            return _runnable(model, _without_training(work), is_given)
        if is_given:
            raise InvalidPatcherError(
                f"stock can't be run on inputs={list(work.arguments)}: {error_text(error)}"
            ) from error
        return replace(work, parts={}), 0.0
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
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = limit - STEPS if isinstance(limit, int) and limit > STEPS else _LENGTHS[0]

        def of(length: int, count: int) -> dict[str, Any]:
            ids = batch(rows, [min(length, longest)] * count)
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
    return [one.arguments for one in passes if not one.path and one.method == "forward"][:1]
