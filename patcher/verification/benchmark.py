"""`patcher.benchmark`: which patchers pay on this machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import isfunction
from pathlib import Path
from typing import Any

import torch

from patcher.display.parts import Cell, Notes, Part, Table, Tone, bar
from patcher.display.shown import Displayable, pluralize
from patcher.errors import InvalidPatcherError
from patcher.integrations import install
from patcher.spec.forward_of import ForwardOf
from patcher.spec.like import Like
from patcher.spec.patcher import Patcher
from patcher.spec.validation import MAPPINGS, not_a_patcher
from patcher.verification.comparing import requested
from patcher.verification.gains import LEAST, Gain
from patcher.verification.members import members_of
from patcher.verification.passes import device_of
from patcher.verification.progress import isolated
from patcher.verification.rounds import ALL, MEASURES, STOCK, Rounds, measured_members
from patcher.verification.sides import side_of

#: So many rounds tell which of up to 36 patchers is always the fastest, see `gains`.
_ENOUGH = 6
#: The largest number of members that a label names.
_NAMED = 3


@dataclass(frozen=True)
class Measured:
    """The gains of a patcher.

    Attributes:
        patcher: the patcher.
        gains: by the name of the measure; "all that is run" is the mean of prompts, decoding and training.
    """

    patcher: Patcher
    gains: Mapping[str, Gain]

    @property
    def whole(self) -> Gain | None:
        """The mean of all that is run, None if only loads were measured."""
        return self.gains.get(ALL)

    @property
    def pays(self) -> bool:
        """Whether all that is run is faster than stock, by more than noise."""
        return self.whole is not None and self.whole.differs and self.whole.ratio < 1

    @property
    def label(self) -> str:
        """The name of the patcher, or its representation without pins, with the first of many members."""
        return _label(self.patcher)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {"patcher": repr(self.patcher), "pays": self.pays, "gains": self.gains}


@dataclass(frozen=True, repr=False)
class Benchmark(Displayable):
    """The result of `patcher.benchmark`.

    Attributes:
        model: the class of the model.
        checkpoint: the source of the weights.
        dtype: the dtype of the model.
        machine: the processor or GPU, and the number of threads.
        versions: of Python, torch, transformers and this package.
        date: the day.
        stock: the seconds or bytes of stock by the name of the measure.
        measured: the gains of each patcher, of each of their members, and of those that are faster alone together.
        left_out: (patcher, why it wasn't measured).
        rounds: the number of rounds.
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
        """The patcher to take: the fastest of those that pay, or one with fewer members that is at most a hundredth
        slower; None if no patcher pays."""
        best = self._best
        return None if best is None else best.patcher

    @property
    def _best(self) -> Measured | None:
        paying = [one for one in self.measured if one.pays]
        most = min((one.gains[ALL].ratio for one in paying), default=0.0) * (1 + LEAST)
        fastest = [one for one in paying if one.gains[ALL].ratio <= most]
        return min(fastest, key=lambda one: (len(measured_members(one.patcher)), one.gains[ALL].ratio), default=None)

    @property
    def python(self) -> str:
        """The best one as Python to paste, with the machine and the figures; "" if no patcher pays."""
        best = self._best
        if best is None:
            return ""
        groups = "; ".join(f"{name} {gain.ratio:.2f}" for name, gain in best.gains.items() if name != ALL)
        return (
            f"# {best.gains[ALL].ratio:.2f} of stock's time on {self.checkpoint} ({self.model}, {self.dtype}):\n"
            f"# {groups}\n# measured on {self.date}: {self.machine}; {self._versions}\n" + as_python(best.patcher)
        )

    @property
    def _versions(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON, with `best`; patchers are strings."""
        left_out = [{"patcher": repr(patcher), "why": why} for patcher, why in self.left_out]
        fields = Displayable.to_dict(replace(self, left_out=()))
        return fields | {"left_out": left_out, "best": None if self.best is None else repr(self.best)}

    @property
    def _too_few(self) -> str:
        if not self.rounds:
            return f"no round was finished; give it more time: seconds={max(60.0, 4 * self.seconds):.0f}"
        if not self.measured or self.rounds >= _ENOUGH:
            return ""
        longer = self.seconds * (_ENOUGH + 1) / self.rounds
        return f"{self.rounds} may not tell a gain from noise, {_ENOUGH} can: seconds={longer:.0f}"

    def _headline(self) -> str:
        best = self._best
        none = "too few rounds to tell" if self._too_few else "no patcher pays"
        what = none if best is None else f"{best.label} takes {best.gains[ALL].ratio:.2f} of the time"
        where = ", ".join(filter(None, [self.dtype, self.checkpoint]))
        return f"{self.model}: {what} ({where}, {pluralize(self.rounds, 'round')} in {self.seconds:.0f} s)"

    def _verdict(self) -> Cell:
        none = Cell("UNDECIDED", "warning") if self._too_few else Cell("NO DIFFERENCE", "dim")
        return none if self.best is None else Cell("PAYS", "good")

    def _parts(self) -> Iterator[Part]:
        yield Notes("Take", [self.python] if self.python else [], "good")
        yield Notes("Too few rounds", [self._too_few] if self._too_few else [], "warning")
        rows: list[tuple[str | Cell, ...]] = []
        again: dict[str, str] = {}
        for one in self.measured:
            label = one.label
            for name, gain in sorted(one.gains.items(), key=lambda item: item[0] != ALL):
                tone: Tone = "dim" if not gain.differs else "good" if gain.ratio < 1 else "bad"
                rows.append((label, name, bar(gain.ratio, tone), f"{gain.ratio:.2f}", Cell(gain.verdict, tone)))
                label, again[name] = "", f"{gain.again:.3f}"
        yield Table("Time, or memory, as a share of stock's", ("patcher", "measure", "", "share", ""), rows)
        values = {name: f"{value / 2**20:.0f} MiB" if name == "memory" else f"{value * 1000:.1f} ms"
                  for name, value in self.stock.items()}  # fmt: skip
        stock = [(name, value, again.get(name, "")) for name, value in values.items()]
        yield Table("Stock", ("", "stock", "stock again / stock"), stock)
        left_out = [(_label(patcher), why) for patcher, why in self.left_out]
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
    """Measure whether patchers, their members alone, and the faster ones together, pay on this machine.

    >>> import patcher
    >>> from patcher import Patcher
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> result = patcher.benchmark(config, Patcher(fusions=["qkv", "gate_up"]), seconds=8, measures=["prefill"])
    >>> [one.label for one in result.measured]  # result.best is the one to take, print(result) shows all
    ["Patcher(fusions=['qkv', 'gate_up'])", "Patcher(fusions=['qkv'])", "Patcher(fusions=['gate_up'])"]

    Stock, stock once more, and each patcher take turns, in a random order in each round. The measures are:

    - `load`, the seconds until the model is loaded and has run once, and `memory`, the peak meanwhile: of the process
      (on Linux), or of the GPU;
    - `prefill`, a prompt, and `decode`, four tokens after it, for one row and for eight, with as many tokens as there
      is time for; or `forward`, for models that don't generate text;
    - `training`: the forward and the backward pass.

    The second stock measures the noise. A difference that may be noise, or is smaller than that of stock from itself
    or than a hundredth, is "no difference"; a patch that does nothing gets another verdict at most once in twenty
    benchmarks. That takes six rounds or more: give a large model more seconds. A patcher pays if the mean of prompts,
    decoding and training is faster (each counts once, whatever the number of batches).

    Patchers are verified first, quickly, in float32; outputs of subsets must be those of stock within the tolerance
    of their dtype. All models are in memory at once.

    Args:
        model: a repo id, a folder, or a config, for which a checkpoint of random weights is saved.
        patchers: the patchers to measure. The members of one without conversions are its keys and fusions.
        seconds: the time that it may take; a round that has begun is finished, within twice the time.
        inputs: arguments of the forward, such as the output of a tokenizer, or a list of such.
        measures: the names of the measures above, by default all.
        verify: whether to verify first.
        model_class: the class of the model, or an Auto class; by default the one that the config names.
        seed: of inputs, random weights and the order.
        progress: show a bar with the time left; by default on a terminal or in a notebook.
        options: more keyword arguments of `from_pretrained`, such as `dtype`. With a CUDA GPU, `device_map` is "cuda"
            by default.

    Raises:
        InvalidPatcherError: no patchers, not a model that can be measured, or inputs that stock doesn't run.
    """
    if not patchers:
        raise InvalidPatcherError(
            "benchmark(model, *patchers) found no patcher; write benchmark(model, Patcher(fusions=['qkv']))"
        )
    for value in patchers:
        if not isinstance(value, Patcher):
            raise not_a_patcher("benchmark(model, {})", value)
    limit: Any = seconds
    if not isinstance(limit, int | float) or not limit > 0:
        raise InvalidPatcherError(f"seconds={limit!r} is not a positive number; write benchmark(..., seconds=60).")
    install()
    parts = requested("measure", MEASURES if measures is None else measures, MEASURES)
    started = time.perf_counter()
    if torch.cuda.is_available():
        options = {"device_map": "cuda"} | options
    with isolated("measuring", seed, [""], progress) as (scratch, step):
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
            | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "patcher")},
            date=datetime.date.today().isoformat(),
            stock=run.of_stock(),
            measured=tuple(Measured(key, gains) for key, gains in run.gains().items()),
            left_out=tuple((patcher, why) for patcher, why in run.left_out.items() if why),
            rounds=len(run.rounds),
            seconds=run.elapsed,
        )


def _label(patcher: Patcher) -> str:
    """Return the name of a patcher, or its representation without pins, with the first of many members."""
    patcher = patcher.replace(fingerprints={}, transformers="")
    members = members_of(patcher)
    if patcher.name or len(members) <= _NAMED:
        return patcher.name or repr(patcher)
    return f"{members[0]!r} and {len(members) - 1} more"


def _machine(model: Any) -> str:
    """Return the name of the processor or GPU."""
    device = torch.device("cpu") if model is None else device_of(model)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    return f"{name}, {pluralize(torch.get_num_threads(), 'thread')}"


def as_python(patcher: Patcher) -> str:
    """Return the lines that create a patcher.

    >>> print(as_python(Patcher(fusions="qkv")))
    from patcher import Patcher
    patcher = Patcher(fusions=['qkv'])
    """
    text = repr(patcher)
    names: dict[str, set[str]] = {"patcher": {text.split("(")[0].split(".")[0]}}
    keys: list[Any] = [key for field in MAPPINGS for key in getattr(patcher, field)]
    values: list[Any] = [value for field in MAPPINGS for value in getattr(patcher, field).values()]
    values += [fusion for fusion in patcher.fusions if not isinstance(fusion, str)]
    for conversion in patcher.extra_weight_conversions:
        values += [conversion, *getattr(conversion, "operations", ())]
    for value in [*keys, *values] if text.startswith("Patcher(") else ():
        if isinstance(value, ForwardOf | Like):
            names["patcher"].add("like" if isinstance(value, Like) else "forward_of")
            value = getattr(value, "layer", None)
        if value is None or isinstance(value, str):
            continue
        kind = value if isinstance(value, type) or isfunction(value) else type(value)
        names.setdefault(kind.__module__, set()).add(kind.__qualname__.partition(".")[0])
    lines = [f"from {home} import {', '.join(sorted(some))}" for home, some in names.items() if home != "__main__"]
    if "<" in text:
        lines.append("# Not importable: what is in <>")
    return "\n".join([*lines, f"patcher = {text}"])
