"""What `patcher.verify` checks, one stage after another."""

from __future__ import annotations

import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from patcher.compat.modeling_code import unrebound
from patcher.compat.models import implementation
from patcher.construction.in_force import unpatched
from patcher.loading.new_weights import new_weights
from patcher.loading.record import record_of
from patcher.loading.saving import saved_state_dict
from patcher.patterns import compress
from patcher.spec.patcher import Patcher
from patcher.verification.comparing import Pair, Reference, Stage, UncheckedError, error_text, requested
from patcher.verification.inputs import NoInputsError, chosen_passes, processed, processor_of
from patcher.verification.layers import layer_errors
from patcher.verification.modules import HALVES, eager, learned, precision_stage, training_stage
from patcher.verification.passes import Pass, differences, fitted, noting_calls
from patcher.verification.sides import Side, fit_threads
from patcher.verification.texts import (
    CHUNKS,
    FEW,
    STEPS,
    parts_of,
    reactions,
    recording,
    text_passes,
    token_rows,
    windows_of,
)

#: How far outputs may be apart, in units of the largest magnitude of stock's (of 1 where that is smaller); `verify`
#: says why. Half-precision types round each result of a layer but sum in float32.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: Eager attention against sdpa is an equally good way to compute the same: twice that is allowed as well.
FLOORS = 2.0
#: A window that is longer is made this long for a stage of its own, so that short texts are past it.
WINDOW = 16
#: How many tokens are generated.
NEW_TOKENS = 5


class Inputs(NamedTuple):
    """What both models are run on.

    Attributes:
        runs: all, by name.
        chosen: of them those that reach the layers that texts don't: images, sounds, parts of the model by themselves.
        references: what stock gives, with all of its layers, for the simplest texts and for the chosen.
    """

    runs: dict[str, Pass]
    chosen: list[Pass]
    references: list[Reference]

    def named(self, *names: str) -> list[Pass]:
        """The passes of these names, else those that reach what others don't."""
        return [self.runs[name] for name in names if name in self.runs] or self.chosen


@dataclass(eq=False)
class Run:
    """One comparison: what is compared and how, and what has been found so far."""

    theirs: Side  # stock, or what is taken as the reference
    mine: Side
    dtype: torch.dtype
    seed: int
    scratch: Path  # an empty folder, for what is saved and offloaded
    step: Callable[[str], None]  # called with the name of each step
    quick: bool = False
    allowed: float | None = None  # in place of the tolerance of the type
    stock: Any = None
    pair: Pair = field(init=False)  # both models, when they are loaded
    patched: set[str] = field(default_factory=set)  # the paths of the modules that were replaced or fused
    by_class: list[str] = field(default_factory=list)  # of these one for each pair of classes
    calling: int = 0  # how many modules call replaced functions
    floor: float | None = None
    labelled: list[Pass] = field(default_factory=list)  # one that gives a loss, if there is any
    failing: Reference | None = None  # the first of `outputs` that is wrong

    def stages(self, names: Iterable[str]) -> Iterator[Stage]:
        """Load both, then check one thing after another."""
        before = time.perf_counter()
        self.step("load")
        self.stock = self._load(self.theirs)
        fit_threads(self.stock)
        are_wrong = False
        for name in names:
            if name != "load":
                self.step(name)
            if are_wrong and name in _REPEATING:
                stage = Stage(name, True, message="not checked: the outputs are wrong already", checked=False)
            else:
                stage = self.stage(name)
            now = time.perf_counter()
            yield replace(stage, seconds=now - before)
            before = now
            are_wrong |= name == "outputs" and not stage.passed
            if name == "load" and not stage.passed:
                return

    def stage(self, name: str) -> Stage:
        """What one of the stages finds."""
        try:
            with torch.no_grad():
                return STAGES[name](self)
        except NoInputsError as error:  # what wasn't compared is not the same
            text = "stock runs on none of the inputs that were tried"
            return Stage(name, False, message=f"{text}; the first error: {error}")
        except UncheckedError as error:
            return Stage(name, True, message=f"not checked: {error}", checked=False)
        except Exception as error:  # stock went through it, or it would have been left out
            return Stage(name, False, message=error_text(error))

    def fails(self, mine: Side, name: str) -> bool:
        """Whether a stage that has failed fails with another model as well: `outputs` on the input on which it has."""
        run = copy.copy(self)
        run.mine, run.scratch = mine, Path(tempfile.mkdtemp(dir=self.scratch))
        loaded = run.stage("load").passed
        if name == "load" or not loaded:  # nothing that could be compared
            return name == "load" and not loaded
        if name == "reload":
            run.stage("save")
        if name != "outputs" or self.failing is None:
            return not run.stage(name).passed
        with torch.no_grad():
            return bool(run.pair.beside(self.failing, self.tolerance)[1])

    @property
    def tolerance(self) -> float:
        """How far outputs may be apart."""
        return max(TOLERANCES[self.dtype], FLOORS * (self.floor or 0.0)) if self.allowed is None else self.allowed

    # --- models and inputs

    def _load(self, side: Side, **more: Any) -> Any:
        return side.load(self.scratch, self.seed, **{"dtype": self.dtype, **more})

    def _pair(self, values: Mapping[str, Any] | None = None, **more: Any) -> Pair:
        """Both with other options, or other values in the config by their paths; what stock raises leaves a stage
        unchecked."""
        sides = [self.theirs, self.mine]
        if values:
            config = more["config"] = copy.deepcopy(self.stock.config)
            parts = dict(parts_of(config))
            for path, value in values.items():
                head, dot, name = path.rpartition(".")
                setattr(parts[head + dot], name, value)
            # What an option has put into the config would be taken for an argument of the model beside a config.
            kept = [{key: each for key, each in side.options.items() if not hasattr(config, key)} for side in sides]
            sides = [replace(side, options=options) for side, options in zip(sides, kept, strict=True)]
        try:
            stock = self._load(sides[0], **more)
        except Exception as error:
            raise UncheckedError(f"stock raises {error_text(error)}") from None
        return Pair(stock, self._load(sides[1], **more), self.mine.name)

    @cached_property
    def inputs(self) -> Inputs:
        stock, reached = self.stock, set[str]()
        processor = processor_of(self.theirs.folder, self.theirs.options)
        texts = {one.name: one for one in text_passes(stock, token_rows(stock, processor, self.seed))}
        with noting_calls(stock, reached):
            simple = [texts.pop(name) for name in FEW if name in texts]
            references = list(self.pair.references(simple, few=False))
        chosen = chosen_passes(stock, processed(stock, processor), reached)
        runs = {one.run.name: one.run for one in references} | (texts if references else {})
        others = list(self.pair.references(chosen, few=False))
        chosen = [one.run for one in others]
        return Inputs(runs | {one.name: one for one in chosen}, chosen, references + others)

    # --- stages

    def load(self) -> Stage:
        """The patched one: stock could be loaded."""
        ours = self._load(self.mine)
        self.pair = Pair(self.stock, ours, self.mine.name)
        record = record_of(ours)
        modules = {item.path: (item.original, item.replacement) for item in (record.modules if record else ())}
        self.patched = set(modules)
        self.by_class = list({classes: path for path, classes in reversed(modules.items())}.values())
        self.calling = sum(unrebound(type(module)) is not type(module) for module in ours.modules())
        figures = {"modules replaced": len(modules), "modules that call replaced functions": self.calling}
        return Stage("load", True, tuple((what, float(count)) for what, count in figures.items() if count))

    def outputs(self) -> Stage:
        runs, chosen, references = self.inputs
        self.floor = self._stock_against_stock()
        texts = [run for name, run in runs.items() if name not in FEW and run not in chosen]
        reached: set[str] = set()
        in_order = chain(  # failures on simple inputs are reported first
            (one for one in references if one.run not in chosen),
            self.pair.references(run for run in texts if run.name != CHUNKS and not self.quick),
            self.pair.references((run for run in texts if run.name == CHUNKS), few=self.quick),
            (one for one in references if one.run in chosen),
        )
        with noting_calls(self.pair.ours, reached):
            stage = self.pair.compare("outputs", in_order, self.tolerance)
        self.failing = self.pair.failing
        missed = sorted(self.patched - reached)
        if missed and stage.passed:  # what wasn't compared is not the same
            text = f"no input that was tried reaches {', '.join(compress(missed))}, so it wasn't compared"
            return replace(stage, passed=False, message=text)
        for run in self.inputs.named("a short row")[:1] if stage.passed and not self.quick else ():
            layers = layer_errors(self.pair.ours, self.stock, run.results, run.name, self.tolerance, right=True)
            stage = replace(stage, layers=layers)
        return stage

    def _stock_against_stock(self) -> float | None:
        """Relative to the magnitude of the outputs, as tolerances are."""
        if "attn_implementation" in self.theirs.options or self.allowed is not None:
            return None
        runs, chosen, references = self.inputs
        long = [runs["a long row"]] if "a long row" in runs and (self.dtype in HALVES or not self.quick) else []
        gaps: list[float] = []
        try:
            texts = [one for one in references if one.run not in chosen] + list(self.pair.references(long))
            with eager(self.stock, "attn") as is_other:
                for run, expected, few in texts if is_other else ():
                    with self.pair.layers(few):
                        gaps.append(differences(run.results(self.stock), expected).share)
        except Exception:  # stock takes other inputs under eager attention
            return None
        return max(gaps, default=None)

    def arguments(self) -> Stage:
        bases = self.inputs.named("a batch of 2")[:1]
        images = [one for one in self.inputs.chosen if not one.path and one.method == "forward"]
        bases += [one for one in images if one not in bases][:1]
        found = {one.run.name: one for base in bases for one in reactions(self.pair, base)}
        self.labelled = [one.run for one in found.values() if "labels" in one.run.arguments][:1]
        if not found:
            raise UncheckedError("stock reacts to no other argument")
        return self.pair.compare("arguments", found.values(), self.tolerance)

    def recorded(self) -> Stage:
        """Under eager attention, which alone gives attentions."""
        pair, prefix = self.pair, ""
        if "attn_implementation" not in self.theirs.options and implementation(pair.stock, "attn") == "sdpa":
            with suppress(UncheckedError):  # a model in memory, or one without eager attention
                # Loaded anew: some look at it once, when they are constructed or first run.
                pair, prefix = self._pair(attn_implementation="eager"), "eager attention, "
        others = [one.name for one in self.inputs.chosen]
        bases = [base for base in self.inputs.named("a short row", *others) if base.method == "forward"]
        recorded = [each for base in bases for each in recording(pair.stock, base)]
        plain = self.inputs.named("a short row", "a padded batch", CHUNKS, *others)
        runs = dict.fromkeys([*plain, *recorded])
        return pair.compare("recorded", pair.references(runs), self.tolerance, prefix)

    def windows(self) -> Stage:
        windows = {name: WINDOW for name, size in windows_of(self.stock.config).items() if size > WINDOW}
        if not windows:
            raise UncheckedError(f"the config has no window of more than {WINDOW} tokens")
        pair = self._pair(windows)
        runs = self.inputs.named("a row of 128 tokens", "a padded batch", STEPS, CHUNKS)
        changed = ", ".join(f"{name}={size}" for name, size in windows.items())
        return pair.compare("windows", pair.references(runs, few=False), self.tolerance, f"{changed}, ")

    def precision(self) -> Stage:
        names = ("a row of 128 tokens", "a padded batch", *(one.name for one in self.inputs.chosen))
        passes = self.inputs.named(*names)
        return precision_stage(self.pair, lambda half: self._pair(dtype=half), self.by_class, passes, self.dtype)

    def generation(self) -> Stage:
        """Both go on with the tokens that stock prefers: where two are equally likely, either is right."""
        stock = self.stock
        texts = [one for one in self.inputs.named("a padded batch", "a short row") if "input_ids" in one.arguments]
        if not texts or not stock.can_generate():
            raise UncheckedError("the model generates nothing from text")
        given = fitted({name: texts[0].arguments.get(name) for name in ("input_ids", "attention_mask")}, stock)
        options: dict[str, Any] = {
            "max_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "eos_token_id": None,
            "disable_compile": True,
        }
        try:
            tokens = stock.generate(**given, **options).tolist()
        except Exception as error:
            raise UncheckedError(f"stock raises {error_text(error)}") from None
        options |= {"prefix_allowed_tokens_fn": lambda row, ids: [tokens[row][len(ids)]]}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        run = Pass("generate", given | options, title=f"{NEW_TOKENS} tokens after {texts[0].name}")
        return self.pair.compare("generation", self.pair.references([run], few=False), self.tolerance)

    def gradients(self) -> Stage:
        runs = self.inputs.named("a short row")[:1]
        return self.pair.compare("gradients", learned(self.pair, runs), self.tolerance)

    def training(self) -> Stage:
        names = ("a padded batch", "a batch of 5", "a row of 128 tokens", *(one.name for one in self.inputs.chosen))
        passes = self.inputs.named(*names)[:4] + self.labelled
        return training_stage(self.pair, self._pair, passes, self.by_class, self.tolerance)

    def save(self) -> Stage:
        """Byte for byte; only weights that the patcher declares as new may be in one and not in the other."""
        stock, ours = self.scratch / "stock", self.scratch / "patched"
        try:
            self.stock.save_pretrained(stock)
        except Exception as error:
            raise UncheckedError(f"stock can't be saved: {error_text(error)}") from None
        self.pair.ours.save_pretrained(ours)
        files = [sorted(folder.iterdir()) for folder in (stock, ours)]
        tensors = [
            {key: tensor for path in some if path.suffix == ".safetensors" for key, tensor in load_file(path).items()}
            for some in files
        ]
        stage = self.pair.compare_weights("save", *tensors)
        # But for the code that a class brings with it: `register_for_auto_class`.
        names = [", ".join(path.name for path in some if path.suffix != ".py") for some in files]
        if stage.passed and len(stage.figures) == 2 and names[0] != names[1]:
            return replace(stage, passed=False, message=f"the files are {names[1]}, not {names[0]}")
        return stage

    def weights(self) -> Stage:
        """The same of what either would save, without a file."""
        models = (self.stock, self.pair.ours)
        if any(parameter.is_meta for model in models for parameter in model.parameters()):
            raise UncheckedError("weights that are offloaded are compared as files only")
        return self.pair.compare_weights("weights", *(saved_state_dict(each, each.state_dict()) for each in models))

    def reload(self) -> Stage:
        if not (self.scratch / "patched").exists():
            raise UncheckedError("nothing was saved")
        # Not where the original files were, nor how they were quantized.
        kept = ("attn_implementation", "device_map", "offload_folder")
        options = {name: self.theirs.options[name] for name in kept if name in self.theirs.options}
        # What a patcher has added stock ignores, and a load that doesn't say so refuses.
        new = [f"^{re.escape(name)}$" for name in new_weights(self.pair.ours)]
        patcher = Patcher(dropped_weights=new) if new else None
        side = Side(self.theirs.cls or type(self.stock), self.scratch / "patched", options, patcher)
        pair = Pair(self.stock, unpatched(partial(self._load, side)), "stock")
        # One text is enough: weights that are other weights show in any.
        _, chosen, references = self.inputs
        few = [one for one in references if one.run.name == FEW[0] or one.run in chosen]
        stage = pair.compare("reload", few or references, TOLERANCES[self.dtype])
        text = f"stock computes something else with what was saved: {stage.message}"
        return stage if stage.passed else replace(stage, message=text)


#: The stages, in their order.
STAGES: dict[str, Callable[[Run], Stage]] = {
    "load": Run.load,
    "outputs": Run.outputs,
    "arguments": Run.arguments,
    "recorded": Run.recorded,
    "windows": Run.windows,
    "precision": Run.precision,
    "generation": Run.generation,
    "gradients": Run.gradients,
    "training": Run.training,
    "weights": Run.weights,
    "save": Run.save,
    "reload": Run.reload,
}
#: Those that fail whenever the outputs are wrong.
_REPEATING = ("arguments", "recorded", "generation", "gradients", "training")
#: Those of `quick=True`; the last of them compares what another one compares as files.
QUICK = ("load", "outputs", "weights")


def stages_of(names: Iterable[str] | None, quick: bool) -> tuple[str, ...]:
    """The stages to run, in their order.

    Raises:
        InvalidPatcherError: there is no such stage.
    """
    if names is not None:
        return ("load", *(name for name in requested("stage", names, STAGES) if name != "load"))
    return QUICK if quick else tuple(name for name in STAGES if name != "weights")
