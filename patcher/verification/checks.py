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
from typing import Any

import torch
from safetensors.torch import load_file

from patcher.compat.modeling_code import unrebound
from patcher.compat.models import implementation, named_modules
from patcher.construction.in_force import unpatched
from patcher.loading.new_weights import new_weights
from patcher.loading.record import record_of
from patcher.loading.saving import saved_state_dict
from patcher.patterns import compress
from patcher.spec.patcher import Patcher
from patcher.verification.comparing import (
    Pair,
    Reference,
    Stage,
    UncheckedError,
    differing_modules,
    error_text,
)
from patcher.verification.inputs import NoInputsError, chosen_passes, processed, processor_of
from patcher.verification.modules import HALVES, eager, learned, precision_stage, training_stage
from patcher.verification.passes import Pass, differences, fitted, recording_calls
from patcher.verification.sides import Side, fit_threads
from patcher.verification.texts import (
    CHUNKS,
    FEW,
    STEPS,
    largest,
    parts_of,
    reactions,
    recording,
    text_passes,
    token_rows,
    windows_of,
)

#: The tolerances of outputs, relative to their largest magnitude (or to 1 if that is smaller); `verify` says why.
#: Half-precision types round each result of a layer but sum in float32.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: Twice the difference of eager attention and sdpa, which are equally right, is allowed as well.
FLOORS = 2.0
#: The stage `windows` shortens longer windows to this, so that short texts exceed it.
WINDOW = 16
#: How many tokens are generated.
NEW_TOKENS = 5


#: The stages in their order, which are methods of `Run`; those of `quick=True`; those that fail with wrong outputs.
STAGES = (
    *("load", "outputs", "arguments", "recorded", "windows", "precision", "generation", "gradients", "training"),
    *("weights", "save", "reload"),
)
QUICK = ("load", "outputs", "weights")
_REPEATING = ("arguments", "recorded", "generation", "gradients", "training")


@dataclass(eq=False)
class Run:
    """A comparison in progress."""

    theirs: Side  # the stock model, or whatever is the reference
    mine: Side
    dtype: torch.dtype
    seed: int
    scratch: Path  # an empty folder, for saved and offloaded weights
    step: Callable[[str], None]  # called with the name of each step
    quick: bool = False
    allowed: float | None = None  # replaces the tolerance of the dtype
    stock: Any = None
    pair: Pair = field(init=False)  # set by the stage "load"
    replaced: int = 0  # the number of replaced and fused modules
    patched: set[str] = field(default_factory=set)  # the paths of these, and of others with another code
    missed: tuple[str, ...] = ()  # those that no input reached
    calling: int = 0  # the number of modules that call replaced functions
    by_class: list[str] = field(default_factory=list)  # the path of one of all these for each pair of classes
    floor: float | None = None
    labelled: list[Pass] = field(default_factory=list)  # a run with a loss, if there is one
    failing: Reference | None = None  # the first run of `outputs` that differs

    def stages(self, names: Iterable[str]) -> Iterator[Stage]:
        """Run stages one after another; after wrong outputs skip those that compute the same in another way."""
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
        """Run one stage."""
        try:
            with torch.no_grad():
                stage: Stage = getattr(self, name)()
                return stage
        except NoInputsError as error:  # what wasn't compared doesn't pass
            text = f"{self.theirs.name} runs on none of the inputs that were tried; the first error: {error}"
            return Stage(name, False, message=text)
        except UncheckedError as error:
            return Stage(name, True, message=f"not checked: {error}", checked=False)
        except Exception as error:  # the stock model didn't raise, or the stage would be unchecked
            return Stage(name, False, message=error_text(error))

    def fails(self, mine: Side, name: str) -> bool:
        """Whether a failed stage also fails with another patched model: `outputs` on the first input that differed."""
        run = copy.copy(self)
        run.mine, run.scratch = mine, Path(tempfile.mkdtemp(dir=self.scratch))
        loaded = run.stage("load").passed
        if name == "load" or not loaded:  # nothing can be compared
            return name == "load" and not loaded
        if name == "reload":
            run.stage("save")
        if name != "outputs" or self.failing is None:
            return not run.stage(name).passed
        with torch.no_grad():
            return bool(run.pair.beside(self.failing, self.tolerance)[1])

    @property
    def tolerance(self) -> float:
        """The tolerance of outputs."""
        return max(TOLERANCES[self.dtype], FLOORS * (self.floor or 0.0)) if self.allowed is None else self.allowed

    # --- models and inputs

    def _load(self, side: Side, **more: Any) -> Any:
        return side.load(self.scratch, self.seed, **{"dtype": self.dtype, **more})

    def _pair(self, values: Mapping[str, Any] | None = None, **more: Any) -> Pair:
        """Load both with other options, or other values in the config by their paths.

        Raises:
            UncheckedError: the stock model can't be loaded with them.
        """
        sides = [self.theirs, self.mine]
        if values:
            config = more["config"] = copy.deepcopy(self.stock.config)
            parts = dict(parts_of(config))
            for path, value in values.items():
                head, dot, name = path.rpartition(".")
                setattr(parts[head + dot], name, value)
            # Beside a config, options that belong in it would be taken for arguments of the model.
            sides = [
                replace(side, options={key: item for key, item in side.options.items() if not hasattr(config, key)})
                for side in sides
            ]
        try:
            stock = self._load(sides[0], **more)
        except Exception as error:
            raise UncheckedError(f"{self.theirs.name} raises {error_text(error)}") from None
        return Pair(stock, self._load(sides[1], **more), self.mine.name, self.theirs.name)

    @cached_property
    def inputs(self) -> tuple[dict[str, Pass], list[Reference], list[Reference]]:
        """All runs by name; and results with all layers, of simple texts, and of the runs that reach other layers."""
        stock, reached = self.stock, set[str]()
        processor = processor_of(self.theirs.folder, self.theirs.options)
        texts = {run.name: run for run in text_passes(stock, token_rows(stock, processor, self.seed))}
        with recording_calls(stock, reached):
            simple = list(self.pair.references([texts.pop(name) for name in FEW if name in texts], few=False))
        chosen = chosen_passes(stock, processed(stock, processor), reached if simple else ())  # else it raised later
        others = list(self.pair.references(chosen, few=False))
        return _by_name(simple) | (texts if simple else {}) | _by_name(others), simple, others

    @cached_property
    def chosen(self) -> dict[str, Pass]:
        """The runs that reach layers that texts don't reach: images, sounds, inner models by themselves."""
        return _by_name(self.inputs[2])

    def named(self, *names: str) -> list[Pass]:
        """Return the runs of these names, else the chosen ones."""
        runs, *_ = self.inputs
        return [runs[name] for name in names if name in runs] or list(self.chosen.values())

    # --- stages

    def load(self) -> Stage:
        """Load the patched model; the stock one is loaded already."""
        ours = self._load(self.mine)
        self.pair = Pair(self.stock, ours, self.mine.name, self.theirs.name)
        record = record_of(ours)
        theirs, mine = (dict(named_modules(model)) for model in (self.stock, ours))
        replaced = [item.path for item in (record.modules if record else ())]
        calling = [path for path, module in mine.items() if unrebound(type(module)) is not type(module)]
        others = list(differing_modules(self.stock, ours))
        self.replaced, self.calling, self.patched = len(replaced), len(calling), {*replaced, *others}
        paths = [path for path in reversed([*replaced, *calling, *others]) if path in theirs]
        self.by_class = list({(type(theirs[path]), type(mine[path])): path for path in paths}.values())
        figures = {"modules replaced": self.replaced, "modules that call replaced functions": self.calling}
        return Stage("load", True, tuple((what, float(count)) for what, count in figures.items() if count))

    def outputs(self) -> Stage:
        runs, simple, others = self.inputs
        self.floor = self._stock_against_stock()
        texts = [run for name, run in runs.items() if name not in FEW and name not in self.chosen]
        reached: set[str] = set()
        in_order = chain(  # failures on simple inputs are reported first
            simple,
            self.pair.references(run for run in texts if run.name != CHUNKS and not self.quick),
            self.pair.references((run for run in texts if run.name == CHUNKS), few=self.quick),
            others,
        )
        with recording_calls(self.pair.ours, reached):
            stage = self.pair.compare("outputs", in_order, self.tolerance)
        self.failing = self.pair.failing
        self.missed = tuple(compress(sorted(self._unused(reached)))) if stage.passed else ()
        if self.missed:  # what wasn't compared doesn't pass
            text = f"no input that was tried reaches {', '.join(self.missed)}, so it wasn't compared"
            return replace(stage, passed=False, message=text)
        return stage

    def _unused(self, reached: set[str]) -> set[str]:
        """Return the patched modules that aren't reached, without those that only share the weights of others."""
        weights = {
            path: {*self.pair.ours.get_submodule(path).parameters(recurse=False)} for path in reached | self.patched
        }
        used = set().union(*(weights[path] for path in reached))
        return {path for path in self.patched - reached if not weights[path] or weights[path] - used}

    def _stock_against_stock(self) -> float | None:
        """Return the difference of eager attention and sdpa, relative to the magnitude of the outputs."""
        if "attn_implementation" in self.theirs.options or self.allowed is not None:
            return None
        runs, simple, _ = self.inputs
        long = [runs["a long row"]] if "a long row" in runs and (self.dtype in HALVES or not self.quick) else []
        gaps: list[float] = []
        try:
            texts = [*simple, *self.pair.references(long)]
            with eager(self.stock, "attn") as changes:
                for run, expected, few in texts if changes else ():
                    with self.pair.layers(few):
                        gaps.append(differences(run.results(self.stock), expected).share)
        except Exception:  # the model takes other inputs under eager attention
            return None
        return max(gaps, default=None)

    def arguments(self) -> Stage:
        bases = self.named("a batch of 2")[:1]
        whole = [run for run in self.chosen.values() if not run.path and run.method == "forward"]
        bases += [run for run in whole if run not in bases][:1]
        references = {one.run.name: one for base in bases for one in reactions(self.pair, base)}
        self.labelled = [one.run for one in references.values() if "labels" in one.run.arguments][:1]
        if not references:
            raise UncheckedError("stock reacts to no other argument")
        return self.pair.compare("arguments", references.values(), self.tolerance)

    def recorded(self) -> Stage:
        """Compare under eager attention, which alone returns attentions."""
        pair, prefix = self.pair, ""
        if "attn_implementation" not in self.theirs.options and implementation(pair.stock, "attn") == "sdpa":
            with suppress(UncheckedError):  # a model in memory, or one without eager attention
                # Loaded anew: some models read it once, when they are constructed or first run.
                pair, prefix = self._pair(attn_implementation="eager"), "eager attention, "
        bases = [run for run in self.named("a short row", *self.chosen) if run.method == "forward"]
        runs = self.named("a short row", "a padded batch", CHUNKS, *self.chosen)
        runs += [recording(pair.stock, base) for base in bases]
        return pair.compare("recorded", pair.references(runs), self.tolerance, prefix)

    def windows(self) -> Stage:
        windows = {
            name: [WINDOW] * len(size) if isinstance(size, list) else WINDOW
            for name, size in windows_of(self.stock.config).items()
            if largest(size) > WINDOW
        }
        if not windows:
            raise UncheckedError(f"the config has no window of more than {WINDOW} tokens")
        pair = self._pair(windows)
        runs = self.named("a row of 128 tokens", "a padded batch", STEPS, CHUNKS)
        changed = ", ".join(f"{name}={size}" for name, size in windows.items())
        return pair.compare("windows", pair.references(runs, few=False), self.tolerance, f"{changed}, ")

    def precision(self) -> Stage:
        passes = self.named("a row of 128 tokens", "a padded batch", *self.chosen)
        load, tolerance = lambda half: self._pair(dtype=half), 10 * self.tolerance
        return precision_stage(self.pair, load, self.by_class, passes, self.dtype, tolerance)

    def generation(self) -> Stage:
        """Compare logits while both follow the tokens of the stock model, since ties may be decided either way."""
        stock = self.stock
        texts = [run for run in self.named("a padded batch", "a short row") if "input_ids" in run.arguments]
        if not texts or not stock.can_generate():
            raise UncheckedError("the model generates nothing from text")
        prompt = fitted({name: texts[0].arguments.get(name) for name in ("input_ids", "attention_mask")}, stock)
        prompt |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "disable_compile": True}
        try:
            tokens = stock.generate(**prompt).tolist()
        except Exception as error:
            raise UncheckedError(f"{self.theirs.name} raises {error_text(error)}") from None
        prompt |= {"prefix_allowed_tokens_fn": lambda row, ids: [tokens[row][len(ids)]]}
        prompt |= {"output_logits": True, "return_dict_in_generate": True}
        run = Pass("generate", prompt, title=f"{NEW_TOKENS} tokens after {texts[0].name}")
        return self.pair.compare("generation", self.pair.references([run], few=False), self.tolerance)

    def gradients(self) -> Stage:
        return self.pair.compare("gradients", learned(self.pair, self.named("a short row")[:1]), self.tolerance)

    def training(self) -> Stage:
        passes = self.named("a padded batch", "a batch of 5", "a row of 128 tokens", *self.chosen)[:4] + self.labelled
        return training_stage(self.pair, self._pair, passes, self.by_class, self.tolerance)

    def save(self) -> Stage:
        """Compare saved files byte for byte, except for declared new weights."""
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
        # Except for the code of custom classes: `register_for_auto_class`.
        names = [", ".join(path.name for path in some if path.suffix != ".py") for some in files]
        if stage.passed and len(stage.figures) == 2 and names[0] != names[1]:
            return replace(stage, passed=False, message=f"the files are {names[1]}, not {names[0]}")
        return stage

    def weights(self) -> Stage:
        """The same without writing files."""
        models = (self.stock, self.pair.ours)
        if any(parameter.is_meta for model in models for parameter in model.parameters()):
            raise UncheckedError("weights that are offloaded are compared as files only")
        return self.pair.compare_weights("weights", *(saved_state_dict(model, model.state_dict()) for model in models))

    def reload(self) -> Stage:
        if not (self.scratch / "patched").exists():
            raise UncheckedError("nothing was saved")
        # Not the options that name the original files, or quantize them.
        kept = ("attn_implementation", "device_map", "offload_folder")
        options = {name: self.theirs.options[name] for name in kept if name in self.theirs.options}
        # Transformers ignores new weights, and a load by our hook refuses them unless they are declared as dropped.
        new = [f"^{re.escape(name)}$" for name in new_weights(self.pair.ours)]
        patcher = Patcher(dropped_weights=new) if new else None
        side = Side(self.theirs.cls or type(self.stock), self.scratch / "patched", options, patcher)
        pair = Pair(self.stock, unpatched(partial(self._load, side)), "stock")
        _, simple, others = self.inputs
        # One text is enough: wrong weights change the outputs for any.
        stage = pair.compare("reload", [*simple[:1], *others], TOLERANCES[self.dtype])
        text = f"stock computes something else with what was saved: {stage.message}"
        return stage if stage.passed else replace(stage, message=text)


def _by_name(references: Iterable[Reference]) -> dict[str, Pass]:
    return {reference.run.name: reference.run for reference in references}
