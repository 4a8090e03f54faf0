"""What `patcher.verify` checks, one stage after another."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from patcher.compat.models import implementation
from patcher.construction.in_force import unpatched
from patcher.loading.record import record_of
from patcher.patterns import compress
from patcher.spec.patcher import Patcher
from patcher.verification.arguments import asking_for, flags, reactions
from patcher.verification.comparing import Comparison, Pair, Stage, UncheckedError, said
from patcher.verification.generation import generation_stage
from patcher.verification.inputs import NoInputsError, chosen_passes
from patcher.verification.layers import on_few_layers
from patcher.verification.modules import load_in_half, precision_stage
from patcher.verification.numerics import differences, noting_calls
from patcher.verification.passes import OnStock, Pass, Reference, Row, seeded, tried
from patcher.verification.processors import processed, processor_of
from patcher.verification.saved import save_stage
from patcher.verification.texts import CHUNKS, FEW, STEPS, parts_of, text_passes, token_rows, windows_of
from patcher.verification.training import gradient_stage, training_stage

#: How far outputs may be apart, in units of the largest magnitude of stock's (of 1 where that is smaller); `verify`
#: says why. Half-precision types round each result of a layer but sum in float32.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: Eager attention against sdpa is an equally good way to compute the same: twice that is allowed as well.
FLOORS = 2.0
#: A window that is longer is made this long for a stage of its own, so that short texts are past it.
WINDOW = 16
#: The stages, and how much of the time each takes: percents of most models, decoders and encoders, small and large.
STAGES = {
    "load": 3,
    "outputs": 30,
    "arguments": 7,
    "recorded": 5,
    "windows": 2,
    "precision": 18,
    "generation": 4,
    "gradients": 6,
    "training": 19,
    "save": 5,
    "reload": 1,
}


@dataclass
class Run:
    """One verification under way: how it is asked for, then what it found by the way."""

    cls: Any  # of the model
    folder: Any
    patcher: Patcher
    dtype: torch.dtype
    seed: int
    options: Mapping[str, Any]
    scratch: Path  # an empty folder, for what is saved and offloaded
    step: Callable[[str], None]  # is told what is being done
    replaced: int = 0
    floor: float | None = None
    runs: dict[str, Pass | Row] = field(default_factory=dict)  # those of outputs, by name
    references: list[Reference] = field(default_factory=list)  # those of them that are run on further models
    chosen: list[str] = field(default_factory=list)  # those of them that reach what texts don't
    labelled: list[Pass] = field(default_factory=list)  # one that gives a loss, if there is any
    eager: Any = None  # stock with eager attention, until it was used

    def stages(self) -> Iterator[Stage]:
        """Load both, then check one thing after another."""
        self.step("load")
        stock = self._stock()
        try:
            ours = self._ours()
        except Exception as error:  # stock could be loaded: it is the patcher
            yield Stage("load", False, message=said(error))
            return
        self.pair = Pair(stock, ours)
        self.patched, self.by_class = patched_modules(ours)
        self.replaced = len(self.patched)
        yield Stage("load", True, (("modules replaced", float(self.replaced)),))
        for name in list(STAGES)[1:]:
            if name not in ("outputs", "save") and not self.runs:
                continue  # it needs inputs
            self.step(name)
            check: Callable[[], Stage] = getattr(self, f"_{name}")
            try:
                with torch.no_grad():
                    stage = check()
            except NoInputsError as error:  # what wasn't compared is not the same
                message = f"stock runs on nothing that was tried, the first says: {error}"
                stage = Stage(name, False, message=message)
            except UncheckedError as error:
                stage = Stage(name, True, message=f"not checked: {error}", checked=False)
            except Exception as error:  # stock went through it, or it would have been left out
                stage = Stage(name, False, message=said(error))
            yield stage

    # --- loads

    def _load(self, folder: Any, **options: Any) -> Any:
        if options.get("offload_folder") is not None:  # of each model its own: names of files are those of weights
            options["offload_folder"] = tempfile.mkdtemp(prefix="offload-", dir=self.scratch)
        with seeded(self.seed):  # of weights that the checkpoint doesn't have
            return self.cls.from_pretrained(folder, **{"dtype": self.dtype, **options}).eval()

    def _stock(self, **more: Any) -> Any:
        return unpatched(lambda: self._load(self.folder, **{**self.options, **more}))

    def _ours(self, **more: Any) -> Any:
        return self._load(self.folder, patcher=self.patcher, **{**self.options, **more})

    def _pair(self, **more: Any) -> Pair:
        """Both with other options; what stock raises leaves a stage unchecked."""
        try:
            stock = self._stock(**more)
        except Exception as error:
            raise UncheckedError(f"stock raises {said(error)}") from None
        return Pair(stock, self._ours(**more))

    def _pair_with(self, values: Mapping[str, Any]) -> Pair:
        """Both with other values in the config, by their paths."""
        config = copy.deepcopy(self.pair.stock.config)
        parts = dict(parts_of(config))
        for path, value in values.items():
            head, dot, name = path.rpartition(".")
            setattr(parts[head + dot], name, value)
        # What an option has put into the config would be taken for an argument of the model beside a config.
        options = {name: value for name, value in self.options.items() if not hasattr(config, name)}
        return replace(self, options=options)._pair(config=config)

    # --- stages

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.dtype], FLOORS * (self.floor or 0.0))

    def _passes(self, *names: str) -> list[Pass]:
        """The passes of these names, else those that reach what others don't."""
        passes = {name: run for name, run in self.runs.items() if isinstance(run, Pass)}
        return [passes[name] for name in names if name in passes] or [one for one in passes.values() if not one.chunks]

    def _outputs(self) -> Stage:
        stock = self.pair.stock
        processor = processor_of(self.folder, self.options)
        self.rows = token_rows(stock, processor, self.seed)
        reached: set[str] = set()
        reached_in_stock: set[str] = set()

        def noted(run: OnStock, runs: Sequence[Pass | Row]) -> list[Reference]:
            with noting_calls(stock, reached_in_stock):
                found = list(run(runs))
            self.runs |= {one.run.name: one.run for one in found}
            return found

        on_all = partial(tried, stock=stock)
        texts = list(text_passes(stock, self.rows))
        self.references = noted(on_all, [one for one in texts if one.name in FEW])
        self.floor = self._stock_against_stock()
        compared = self.pair.compare(self.references, self.tolerance, reached=reached)
        chunks = noted(on_all, [one for one in texts if one.name == CHUNKS])
        rest = [one for one in texts if one.name not in self.runs]

        def of_the_rest(on_stock: OnStock) -> Comparison:
            return self.pair.compare(noted(on_stock, rest), self.tolerance, reached=reached)

        compared.add(on_few_layers(self.pair, self._passes("a short row", CHUNKS), of_the_rest))
        others = noted(on_all, chosen_passes(stock, processed(stock, processor), reached_in_stock))
        self.chosen = [one.run.name for one in others]
        self.references += others
        # Last, though it was run before: what is said of simple inputs is said first.
        compared.add(self.pair.compare([*chunks, *others], self.tolerance, reached=reached))
        missed = sorted(self.patched - reached)
        if missed and not compared.message:  # what wasn't compared is not the same
            compared.message = f"no input that was tried reaches {', '.join(compress(missed))}, so it wasn't compared"
        for run in () if compared.message else self._passes("a short row")[:1]:
            compared.layers = self.pair.by_layer(run, self.tolerance, right=True)
        return compared.stage("outputs")

    def _stock_against_stock(self) -> float | None:
        """Relative to the magnitude of the outputs, as tolerances are."""
        if "attn_implementation" in self.options or implementation(self.pair.stock, "attn") != "sdpa":
            return None
        try:
            self.eager = self._stock(attn_implementation="eager")
            gaps = [differences(one.run.results(self.eager), one.expected) for one in self.references]
            return max(gap.share for gap in gaps)
        except Exception:  # stock has no eager attention, or it takes other inputs
            self.eager = None
            return None

    def _arguments(self) -> Stage:
        bases = self._passes("a batch of 2")[:1]
        images = self._passes(*self.chosen) if self.chosen else []
        bases += [one for one in images if not one.path and one.method == "forward" and one not in bases][:1]

        def reacting(on_stock: OnStock) -> Comparison:
            found = {one.run.name: one for base in bases for one in reactions(self.pair.stock, base, on_stock)}
            self.labelled = [one.run for one in found.values() if set(one.run.arguments) & {"labels"}][:1]
            if not found:
                raise UncheckedError("stock reacts to no other argument")
            return self.pair.compare(found.values(), self.tolerance)

        return on_few_layers(self.pair, bases, reacting).stage("arguments")

    def _recorded(self) -> Stage:
        """Under eager attention, which alone gives attentions."""
        pair, self.eager = self.pair, self.eager
        if self.eager is not None:
            pair = Pair(self.eager, self._ours(attn_implementation="eager"))
        bases = self._passes("a short row", *self.chosen)
        asked = [each for base in bases if base.method == "forward" for each in asking_for(base, flags(pair.stock))]
        plain = self._passes("a short row", "a padded batch", CHUNKS, *self.chosen)
        runs = dict.fromkeys([*plain, *asked])
        prefix = "eager attention, " if pair is not self.pair else ""
        self.eager = None

        def with_all(on_stock: OnStock) -> Comparison:
            return pair.compare(on_stock(runs), self.tolerance, prefix=prefix)

        return on_few_layers(pair, plain, with_all).stage("recorded")

    def _windows(self) -> Stage:
        windows = {name: WINDOW for name, size in windows_of(self.pair.stock.config).items() if size > WINDOW}
        if not windows:
            raise UncheckedError(f"the config has no window of more than {WINDOW} tokens")
        pair = self._pair_with(windows)
        names = ("a row of 128 tokens", "a padded batch", STEPS, CHUNKS)
        references = list(tried(self._passes(*names), pair.stock))
        changed = ", ".join(f"{name}={size}" for name, size in windows.items())
        return pair.compare(references, self.tolerance, prefix=f"{changed}, ").stage("windows")

    def _precision(self) -> Stage:
        passes = self._passes("a row of 128 tokens", "a padded batch", *self.chosen)

        def load(dtype: torch.dtype) -> Pair:
            return load_in_half(partial(self._stock, dtype=dtype), partial(self._ours, dtype=dtype))

        return precision_stage(self.pair, load, self.by_class, passes, self.dtype)

    def _generation(self) -> Stage:
        texts = [one for one in self._passes("a padded batch", "a short row") if "input_ids" in one.arguments]
        return generation_stage(self.pair, texts[:1], self.tolerance)

    def _gradients(self) -> Stage:
        return gradient_stage(self.pair, self._passes("a short row")[:1], self.tolerance, self.seed)

    def _training(self) -> Stage:
        passes = self._passes("a padded batch", "a batch of 5", "a row of 128 tokens", *self.chosen)[:4]
        return training_stage(
            self.pair, self._pair_with, passes + self.labelled, self.by_class, self.tolerance, self.seed
        )

    def _save(self) -> Stage:
        return save_stage(self.pair, self.scratch)

    def _reload(self) -> Stage:
        if not (self.scratch / "patched").exists():
            raise UncheckedError("nothing was saved")
        # Where the files were, and how they became quantized, is behind us.
        kept = ("attn_implementation", "device_map", "offload_folder")
        options = {name: self.options[name] for name in kept if name in self.options}
        again = unpatched(lambda: self._load(self.scratch / "patched", **options))
        # One text is enough: weights that are other weights show in any.
        few = [one for one in self.references if one.run.name == FEW[0] or one.run.name in self.chosen]
        gaps = [differences(one.run.results(again), one.expected) for one in few or self.references]
        worst = max(gaps, key=lambda gap: gap.share)
        allowed = TOLERANCES[self.dtype]
        text = (
            ""
            if worst.within(allowed)
            else f"stock computes something else with what was saved, by {worst.absolute:.3g}"
        )
        return Stage("reload", not text, (("max abs", worst.absolute),), allowed * max(1.0, worst.scale), text)


def patched_modules(model: Any) -> tuple[set[str], list[str]]:
    """The paths of the modules that were replaced or fused, and of these one for each pair of classes."""
    record = record_of(model)
    if record is None:
        return set(), []
    modules = {item.path: (item.original, item.replacement) for item in record.replaced} | dict(record.fused)
    first = {pair: path for path, pair in reversed(modules.items())}
    return set(modules), list(first.values())
