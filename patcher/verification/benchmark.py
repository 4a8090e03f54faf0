"""Do patches pay on this machine, and which of them? `patcher.benchmark(model, *patchers)`."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import WeightTransform

from patcher.display.parts import Bar, Cell, Chart, Notes, Part, Table, Tone
from patcher.display.shown import Displayable, pluralize
from patcher.errors import InvalidPatcherError
from patcher.integrations import install
from patcher.spec.forward_of import ForwardOf
from patcher.spec.like import Like
from patcher.spec.patcher import Patcher
from patcher.spec.validation import MAPPINGS, not_a_patcher
from patcher.verification.comparing import requested
from patcher.verification.gains import LEAST, Gain, rounds_needed
from patcher.verification.passes import device_of
from patcher.verification.progress import under_way
from patcher.verification.rounds import ALL, MEASURES, STOCK, Rounds, measured_members
from patcher.verification.sides import side_of


@dataclass(frozen=True)
class Measured:
    """A patcher beside stock.

    Attributes:
        patcher: what was measured.
        gains: what was run -> what became of it; "all that is run" is the mean of prompts, decoding and training.
    """

    patcher: Patcher
    gains: Mapping[str, Gain]

    @property
    def whole(self) -> Gain | None:
        """All that is run, if more than loads is."""
        return self.gains.get(ALL)

    @property
    def pays(self) -> bool:
        """Whether it is faster than stock in all that is run, by more than noise."""
        return self.whole is not None and self.whole.differs and self.whole.ratio < 1

    @property
    def label(self) -> str:
        """The name of the patcher, or how it is made without its pins."""
        return self.patcher.name or repr(self.patcher.replace(fingerprints={}, transformers=""))

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {"patcher": repr(self.patcher), "pays": self.pays, "gains": self.gains}


@dataclass(frozen=True)
class Benchmark(Displayable):
    """What `patcher.benchmark` found.

    Attributes:
        model: the class of the model.
        checkpoint: where the weights came from.
        dtype: what was computed in.
        machine: the processor or GPU, and how many threads.
        versions: of Python, torch, transformers and this package.
        date: the day.
        stock: what was run -> seconds of stock, or bytes.
        measured: each patcher, and each subset of their members, beside stock.
        left_out: (patcher, why it wasn't measured).
        rounds: how often everything was measured.
        seconds: the time that it took.
    """

    _also = ("python",)

    model: str
    checkpoint: str
    dtype: str
    machine: str
    versions: Mapping[str, str]
    date: str
    stock: Mapping[str, float]
    measured: tuple[Measured, ...] = ()
    left_out: tuple[tuple[Patcher, str], ...] = ()
    rounds: int = 0
    seconds: float = 0.0

    @property
    def best(self) -> Patcher | None:
        """The patcher to take: of those that pay the one that is the fastest in all that is run, or one of fewer
        members that takes no more than a hundredth longer."""
        found = self._best
        return None if found is None else found.patcher

    @property
    def _best(self) -> Measured | None:
        ratios = {each.patcher: each.gains[ALL].ratio for each in self.measured if each.pays}
        most = min(ratios.values(), default=0.0) * (1 + LEAST)
        fastest = [each for each in self.measured if ratios.get(each.patcher, math.inf) <= most]
        return min(fastest, key=lambda each: (len(measured_members(each.patcher)), ratios[each.patcher]), default=None)

    @property
    def python(self) -> str:
        """The best one as Python to paste, with where it was measured; "" where there is none."""
        found = self._best
        if found is None:
            return ""
        groups = "; ".join(f"{name} {each.ratio:.2f}" for name, each in found.gains.items() if name != ALL)
        return (
            f"# {found.gains[ALL].ratio:.2f} of stock's time on {self.checkpoint} ({self.model}, {self.dtype}):\n"
            f"# {groups}\n# measured on {self.date}: {self.machine}; {self._versions}\n" + as_python(found.patcher)
        )

    @property
    def _versions(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, for JSON; patchers as they are written, and `best`."""
        left_out = [{"patcher": repr(patcher), "why": why} for patcher, why in self.left_out]
        return super().to_dict() | {"left_out": left_out, "best": None if self.best is None else repr(self.best)}

    @property
    def _too_few(self) -> str:
        needed = rounds_needed(max(1, len(self.measured)))
        if not self.rounds:
            return f"no round was finished; give it more time: seconds={max(60.0, 4 * self.seconds):.0f}"
        if not self.measured or self.rounds >= needed:
            return ""
        longer = self.seconds * (needed + 1) / self.rounds
        return f"{self.rounds} can't tell a gain from noise, {needed} can: seconds={longer:.0f}"

    def _headline(self) -> str:
        found = self._best
        none = "too few rounds to tell" if self._too_few else "no patcher pays"
        what = none if found is None else f"{found.label} takes {found.gains[ALL].ratio:.2f} of the time"
        where = ", ".join(filter(None, [self.dtype, self.checkpoint]))
        return f"{self.model}: {what} ({where}, {pluralize(self.rounds, 'round')} in {self.seconds:.0f} s)"

    def _verdict(self) -> Cell:
        none = Cell("UNDECIDED", "warning") if self._too_few else Cell("NO DIFFERENCE", "dim")
        return none if self.best is None else Cell("PAYS", "good")

    def _parts(self) -> Iterator[Part]:
        yield Notes("Take", [self.python] if self.python else [], "good")
        yield Notes("Too few rounds", [self._too_few] if self._too_few else [], "warning")
        bars: list[Bar] = []
        again: dict[str, str] = {}
        for each in self.measured:
            for name, one in sorted(each.gains.items(), key=lambda item: item[0] != ALL):
                tone: Tone = "dim" if not one.differs else "good" if one.ratio < 1 else "bad"
                inside = name != ALL and each.whole is not None
                label = each.label if name == ALL else name if inside else f"{each.label}: {name}"
                bars.append(Bar(label, one.ratio, inside, "", f"{one.ratio:.2f}  {one.verdict}", tone))
                again[name] = f"{one.again:.3f}"
        yield Chart("Time, or memory, as a share of stock's", bars, 1.0, is_share=True)
        values = {name: f"{value / 2**20:.0f} MiB" if name == "memory" else f"{value * 1000:.1f} ms"
                  for name, value in self.stock.items()}  # fmt: skip
        rows = [(name, value, again.get(name, "")) for name, value in values.items()]
        yield Table("Stock", ("", "stock", "stock again / stock"), rows)
        left_out = [(each.name or repr(each), why) for each, why in self.left_out]
        yield Table("Not measured", ("patcher", "why"), left_out)
        yield Notes("Measured", [f"{self.date}, {self.machine}", self._versions], "")


def benchmark(
    model: Any,
    *patchers: Patcher,
    seconds: float = 60.0,
    inputs: Any = None,
    measures: Iterable[str] | None = None,
    verify: bool = True,
    model_class: Any = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Benchmark:
    """Measure whether patchers pay on this machine: each of them, and each subset of their members, beside stock.

    >>> import patcher
    >>> from patcher import Patcher
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> found = patcher.benchmark(config, Patcher(fusions=["qkv", "gate_up"]), seconds=8, measures=["prefill"])
    >>> [each.label for each in found.measured]  # found.best is the one to take, print(found) shows all
    ["Patcher(fusions=['qkv', 'gate_up'])", "Patcher(fusions=['qkv'])", "Patcher(fusions=['gate_up'])"]

    Stock, stock once more, and each patcher take turns, in an order that is drawn each round. Measured are:

    - `load`, the seconds until the model is loaded and has run once, and `memory`, the most that is held meanwhile: of
      the process (on Linux), or of the GPU;
    - `prefill`, a prompt, and `decode`, four tokens after it, for one row and for eight; of what generates no text
      `forward`. As many tokens as there is time for;
    - `training`: the forward and the backward pass.

    The second stock measures the noise. What could be noise, is less than stock differs from itself, or less than a
    hundredth, is "no difference"; a patch that does nothing gets another verdict at most once in twenty benchmarks.
    That takes six rounds or more: give a large model more seconds. A patcher pays if the mean of prompts, decoding
    and training is faster (each of these counts once, whatever the number of batches).

    Before they are measured, patchers are verified, quickly, in float32; subsets of them must compute what stock does
    within the tolerance of their type. All models are in memory at once.

    Args:
        model: a repo id, a folder, or a config, of which a checkpoint of random weights is made.
        patchers: what to measure. Of one that has no conversions, each key and each fusion is a member.
        seconds: how long it may take; a round that has begun is finished, within twice the time.
        inputs: arguments of the forward, such as a tokenizer gives, or a list of such.
        measures: of the names above those to measure, by default all.
        verify: whether to verify first.
        model_class: the class of model, or an Auto class; by default what the config names.
        seed: of inputs, random weights and the order.
        progress: show a bar with what is left; by default where stderr is a terminal, or in a notebook.
        options: more keyword arguments of `from_pretrained`, `dtype` for one. Where there is a GPU of CUDA, the model
            is on it if `device_map` doesn't say otherwise.

    Raises:
        InvalidPatcherError: no patchers, no model that could be measured, or inputs that stock doesn't run.
    """
    if not patchers:
        raise InvalidPatcherError(
            "benchmark(model, *patchers) found no patcher; write benchmark(model, Patcher(fusions=['qkv']))"
        )
    for each in patchers:
        if not isinstance(each, Patcher):
            raise not_a_patcher("benchmark(model, {})", each)
    install()
    parts = requested("measure", MEASURES if measures is None else measures, MEASURES)
    started = time.perf_counter()
    if torch.cuda.is_available():
        options = {"device_map": "cuda"} | options
    with under_way("measuring", seed, [""], progress) as (scratch, step):
        side = side_of(model, options, scratch, seed, model_class)
        run = Rounds(side, scratch, seed, seconds, step, parts, verify, started)
        run.measure(patchers, inputs)
        stock = run.models.get(STOCK)
        return Benchmark(
            model=side.class_name if stock is None else type(stock).__name__,
            checkpoint=side.place,
            dtype=str(getattr(stock, "dtype", "")).removeprefix("torch."),
            machine=_machine(stock),
            versions={"Python": platform.python_version()}
            | {each: importlib.metadata.version(each) for each in ("torch", "transformers", "patcher")},
            date=datetime.date.today().isoformat(),
            stock=run.of_stock(),
            measured=tuple(Measured(key, gains) for key, gains in run.gains().items()),
            left_out=tuple(run.left_out.items()),
            rounds=len(run.rounds),
            seconds=run.passed,
        )


def _machine(model: Any) -> str:
    """What it was measured on."""
    device = torch.device("cpu") if model is None else device_of(model)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    return f"{name}, {pluralize(torch.get_num_threads(), 'thread')}"


def as_python(patcher: Patcher) -> str:
    """The lines that make a patcher.

    >>> print(as_python(Patcher(fusions="qkv")))
    from patcher import Patcher
    patcher = Patcher(fusions=['qkv'])
    """
    text = repr(patcher)
    names: dict[str, set[str]] = {"patcher": {text.split("(")[0].split(".")[0]}}
    keys: list[Any] = [key for field in MAPPINGS for key in getattr(patcher, field)]
    values: list[Any] = [value for field in MAPPINGS for value in getattr(patcher, field).values()]
    values += [each for each in patcher.fusions if not isinstance(each, str)]
    for conversion in patcher.extra_weight_conversions:
        values += [conversion, *getattr(conversion, "operations", ())]
    for value in [*keys, *values] if text.startswith("Patcher(") else ():
        if isinstance(value, ForwardOf | Like):
            names["patcher"].add("like" if isinstance(value, Like) else "forward_of")
            value = getattr(value, "layer", None)
        if value is None or isinstance(value, str):
            continue
        kind = value if isinstance(value, type) or isfunction(value) else type(value)
        home = "transformers" if hasattr(transformers, kind.__name__) and isinstance(value, WeightTransform) else ""
        names.setdefault(home or kind.__module__, set()).add(kind.__qualname__.partition(".")[0])
    lines = [f"from {home} import {', '.join(sorted(some))}" for home, some in names.items() if home != "__main__"]
    return "\n".join([*lines, f"patcher = {text}"])
