"""Is the patched model the stock model? `patcher.verify(model, patcher)`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from patcher.comparing import Difference, difference, first_difference, imprecise
from patcher.errors import InvalidPatcherError, PatcherError, VerificationError
from patcher.loading import install
from patcher.matching import compress
from patcher.model_classes import config_of, model_class_of
from patcher.patcher import Patcher
from patcher.probes import Probe, probes_for, token_rows
from patcher.record import record_of
from patcher.saving import original_state_dict
from patcher.tables import Shown, Table

__all__ = ["Stage", "Verification", "verify"]

#: How far outputs may be apart, in units of the largest magnitude of stock's (of 1 where that is smaller): some
#: hundred roundings of float32, which sums of a few thousand products in another order make; and about four of the
#: half-precision types, whose layers round each result but sum in float32.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: Eager attention against sdpa is an equally good way to compute the same: twice that is allowed as well.
FLOORS = 2.0
#: Gradients go through the network twice.
GRADIENTS = 10.0
NEW_TOKENS = 12


@dataclass(frozen=True)
class Stage:
    """One thing that was checked.

    Attributes:
        name: load, outputs, precision, generation, gradients, save, reload.
        passed: whether it holds; also where nothing could be checked, and `message` says why.
        figures: (what, value) of what was measured.
        tolerance: the largest value of the first figure that passes, None where equality is asked for.
        message: what is wrong, and where; or why nothing was checked.
        checked: whether anything was.
    """

    name: str
    passed: bool
    figures: tuple[tuple[str, float], ...] = ()
    tolerance: float | None = None
    message: str = ""
    checked: bool = True


@dataclass(frozen=True)
class Verification(Shown):
    """What `patcher.verify` found.

    Attributes:
        model: the class of the model.
        checkpoint: where the weights came from.
        patcher: the patcher.
        dtype: what was computed in.
        replaced: how many modules were replaced or fused.
        floor: the largest difference of stock against stock, eager attention against sdpa; None where it has one only.
        stages: what was checked, in this order.
        seconds: the time that it took.
    """

    model: str
    checkpoint: str
    patcher: str
    dtype: str
    replaced: int = 0
    floor: float | None = None
    stages: tuple[Stage, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return bool(self.stages) and all(stage.passed for stage in self.stages)

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong, one text for each stage that failed."""
        return tuple(f"{stage.name}: {stage.message}" for stage in self.stages if not stage.passed)

    def raise_on_failure(self) -> None:
        """Raise if something is wrong.

        Raises:
            VerificationError: with what is wrong at each stage.
        """
        if not self.passed:
            raise VerificationError(
                f"{self.model} under {self.patcher} is not what it is without:\n  " + "\n  ".join(self.failures)
            )

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, for JSON; `passed` and `failures` besides."""
        stages = [{**vars(stage), "figures": dict(stage.figures)} for stage in self.stages]
        answer = {"passed": self.passed, "failures": list(self.failures)}
        return {name: value for name, value in vars(self).items() if name != "stages"} | {"stages": stages} | answer

    def _headline(self) -> str:
        verdict = "the same as stock" if self.passed else "NOT the same as stock"
        count = f"{self.replaced} module{'' if self.replaced == 1 else 's'} replaced"
        return f"{self.model}: {count}, {verdict} ({self.dtype}, {self.checkpoint}, {self.seconds:.1f} s)"

    def _tables(self) -> Iterator[Table]:
        rows: list[tuple[str, ...]] = []
        for stage in self.stages:
            figures = ", ".join(f"{name} {value:.3g}" for name, value in stage.figures)
            limit = "" if stage.tolerance is None else f"{stage.tolerance:.1e}"
            state = ("passed" if stage.checked else "-") if stage.passed else "FAILED"
            rows.append((stage.name, state, figures, limit, stage.message))
        yield Table("Stages", ("stage", "", "measured", "allowed", ""), rows)


def verify(
    model: Any,
    patcher: Patcher,
    *,
    model_class: Any = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Verification:
    """Load a model stock and patched, and compare what they compute, what they learn and what they save.

    ```python
    verification = patcher.verify("HuggingFaceTB/SmolLM2-135M", Patcher(fusions=["qkv", "gate_up"]))
    print(verification)
    verification.raise_on_failure()
    ```

    Both run on the same inputs: rows of English by the model's own tokenizer (random ids where it has none), short,
    long, as a padded batch, and token by token with a cache; images and sounds for what they reach. Tolerances are
    relative to the magnitude of stock's outputs: 1e-5 in float32, 3e-2 in bfloat16, 4e-3 in float16, or twice the
    difference between stock's own eager attention and sdpa if that is more. Half-precision tolerances are too wide to
    see an upcast that was lost; so replaced modules are then also compared one by one with a float64 computation.
    Gradients are compared after they are brought to the original layout, with ten times the tolerance; saved files
    byte for byte with what stock saves; and the saved checkpoint is loaded by stock again.

    Args:
        model: a repo id, a folder, or a config: then a small random checkpoint of it is made, so give a small config.
        patcher: what to verify.
        model_class: the class of model, or an Auto class; by default what the config names.
        dtype: what to compute in.
        seed: of random ids and weights.
        progress: show the stages as they go; by default where stderr is a terminal, or in a notebook.
        options: more keyword arguments of `from_pretrained`.

    Raises:
        InvalidPatcherError: no patcher, or no model that could be verified.
        OSError: there is no such repo or folder.
    """
    if not isinstance(patcher, Patcher):
        raise InvalidPatcherError(
            f"verify takes a model and a Patcher, found {patcher!r}; write verify(model, patcher)."
        )
    if dtype not in TOLERANCES:
        raise InvalidPatcherError(f"dtype={dtype} can't be compared; write one of {', '.join(map(str, TOLERANCES))}.")
    install()
    started = time.perf_counter()
    config = config_of(model, options)
    cls = model_class_of(config, model_class, model, options)
    with tempfile.TemporaryDirectory() as name, _steps(progress) as step:
        folder, checkpoint = model, str(model)
        if isinstance(model, PretrainedConfig):
            step("a random checkpoint")
            folder, checkpoint = _random_checkpoint(cls, config, Path(name) / "random", seed), "random weights"
        run = _Run(cls, folder, patcher, dtype, seed, options, Path(name), step)
        stages = tuple(run.stages())
    return Verification(
        model=cls.__name__,
        checkpoint=checkpoint,
        patcher=repr(patcher),
        dtype=str(dtype).removeprefix("torch."),
        replaced=run.replaced,
        floor=run.floor,
        stages=stages,
        seconds=time.perf_counter() - started,
    )


class _Run:
    """One verification under way."""

    def __init__(
        self,
        cls: type[PreTrainedModel],
        folder: Any,
        patcher: Patcher,
        dtype: torch.dtype,
        seed: int,
        options: Mapping[str, Any],
        scratch: Path,
        step: Callable[[str], None],
    ) -> None:
        self.cls, self.folder, self.patcher, self.dtype, self.seed = cls, folder, patcher, dtype, seed
        self.options, self.scratch, self.step = dict(options), scratch, step
        self.replaced = 0
        self.floor: float | None = None
        self.stock: Any = None
        self.ours: Any = None
        self.probes: list[Probe] = []
        self.reference: dict[str, list[torch.Tensor]] = {}

    def stages(self) -> Iterator[Stage]:
        self.step("loading stock")
        self.stock = self._load()
        self.step("loading patched")
        try:
            self.ours = self._load(patcher=self.patcher)
        except PatcherError as error:
            yield Stage("load", False, message=f"{type(error).__name__}: {error}")
            return
        record = record_of(self.ours)
        self.replaced = len({item.path for item in record.replaced} | set(record.fused)) if record else 0
        yield Stage("load", True, (("modules replaced", float(self.replaced)),))
        self.step("inputs")
        self.probes = probes_for(self.stock, token_rows(self.folder, self.stock, self.options, self.seed))
        for name, check in (
            ("outputs", self._outputs),
            ("precision", self._precision),
            ("generation", self._generation),
            ("gradients", self._gradients),
            ("save", self._save),
            ("reload", self._reload),
        ):
            self.step(name)
            try:
                yield check()
            except PatcherError as error:
                yield Stage(name, False, message=str(error))

    def _load(self, **more: Any) -> Any:
        loaded: Any = self.cls
        model = loaded.from_pretrained(self.folder, **{"dtype": self.dtype, **self.options, **more})
        return model.eval()

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.dtype], FLOORS * (self.floor or 0.0))

    # --- outputs ---------------------------------------------------------------------------------------------------

    def _outputs(self) -> Stage:
        with torch.no_grad():
            self.reference = {probe.name: probe.outputs_of(self.stock) for probe in self.probes}
        self.floor = self._stock_against_stock()
        worst, agreement, wrong = Difference(0.0, 0.0, 0.0), [], None
        for probe in self.probes:
            expected = self.reference[probe.name]
            try:
                with torch.no_grad():
                    found = probe.outputs_of(self.ours)
            except Exception as error:
                text = f"on {probe.name} the patched model raises {type(error).__name__}: {error}"
                return Stage("outputs", False, message=text)
            gap = difference(found, expected)
            if expected and found and found[0].shape == expected[0].shape and expected[0].dim() > 1:
                agreement.append((found[0].argmax(-1) == expected[0].argmax(-1)).float().mean())
            if gap.absolute / max(1.0, gap.scale) >= worst.absolute / max(1.0, worst.scale):
                worst = gap
            if wrong is None and not gap.within(self.tolerance):
                wrong = probe, gap
        figures = [("max abs", worst.absolute), ("max relative", worst.relative)]
        if agreement:
            figures.append(("argmax agreement", float(torch.stack(agreement).mean())))
        allowed = self.tolerance * max(1.0, worst.scale)
        message = ""
        if wrong is not None:
            probe, gap = wrong
            begins = first_difference(self.ours, self.stock, probe.outputs_of, self.tolerance)
            message = f"on {probe.name} they differ by {gap.absolute:.3g}; {self._blame(begins)}"
        return Stage("outputs", wrong is None, tuple(figures), allowed, message)

    def _blame(self, path: str | None) -> str:
        if path is None:
            return "in no module that both have does it begin"
        mine, theirs = type(self.ours.get_submodule(path)), type(self.stock.get_submodule(path))
        kind = mine.__qualname__ if mine is theirs else f"{mine.__qualname__} in place of {theirs.__qualname__}"
        return f"it begins in {path or 'the model itself'} ({kind})"

    def _stock_against_stock(self) -> float | None:
        """Relative to the magnitude of the outputs, as tolerances are."""
        if "attn_implementation" in self.options or self.stock.config._attn_implementation != "sdpa":
            return None
        try:
            eager = self._load(attn_implementation="eager")
            with torch.no_grad():
                gaps = [difference(probe.outputs_of(eager), self.reference[probe.name]) for probe in self.probes]
        except Exception:  # stock has no eager attention, or it takes other inputs
            return None
        return max(gap.absolute / max(1.0, gap.scale) for gap in gaps)

    def _precision(self) -> Stage:
        if self.dtype not in (torch.bfloat16, torch.float16):
            return _unchecked("precision", f"{self.dtype} loses nothing by an upcast that is left out")
        record = record_of(self.ours)
        by_class: dict[tuple[type, type], str] = {}
        for item in record.replaced if record else ():
            by_class.setdefault((item.original, item.replacement), item.path)
        for path, (original, fused) in (record.fused if record else {}).items():
            by_class.setdefault((original, fused), path)
        if not by_class:
            return _unchecked("precision", "nothing is replaced")
        lost = imprecise(self.ours, self.stock, by_class.values(), self.probes[0].outputs_of)
        if lost is None:
            return Stage("precision", True, (("modules compared with float64", float(len(by_class))),))
        path, operations, ratio = lost
        text = f"{', '.join(operations)} in {str(self.dtype).removeprefix('torch.')}, which stock does in float32"
        return Stage("precision", False, (("error / stock's", ratio),), 1.2, f"{self._blame(path)}: {text}")

    # --- generation and gradients ----------------------------------------------------------------------------------

    def _generation(self) -> Stage:
        probe = next(
            (probe for probe in self.probes if "input_ids" in probe.run.arguments and not probe.run.path), None
        )
        if probe is None or not self.stock.can_generate():
            return _unchecked("generation", "the model generates nothing from text")
        ids = probe.run.arguments["input_ids"]
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_scores": True}
        options |= {"return_dict_in_generate": True, "eos_token_id": None, "disable_compile": True}
        with torch.no_grad():
            try:
                expected = self.stock.generate(input_ids=ids, **options)
            except Exception as error:
                return _unchecked("generation", f"stock raises {type(error).__name__}: {error}")
            try:
                found = self.ours.generate(input_ids=ids, **options)
            except Exception as error:
                return Stage("generation", False, message=f"the patched model raises {type(error).__name__}: {error}")
        length = min(len(expected.scores), len(found.scores))
        tokens = [sequence.sequences[0][-len(sequence.scores) :].tolist() for sequence in (expected, found)]
        same = next((place for place in range(length) if tokens[0][place] != tokens[1][place]), length)
        figures = (("tokens equal", float(same)), ("of", float(len(expected.scores))))
        if same == len(expected.scores) == len(found.scores):
            return Stage("generation", True, figures)
        best = expected.scores[min(same, length - 1)][0].float().topk(2).values
        margin, noise = float(best[0] - best[1]), 2 * self.tolerance * max(1.0, float(best[0].abs()))
        if same < length and margin <= noise:
            return Stage("generation", True, figures, message=f"then two tokens are equally likely (by {margin:.1g})")
        text = f"token {same + 1} of {len(expected.scores)} is another, which stock prefers by {margin:.3g}"
        return Stage("generation", False, figures, message=text)

    def _gradients(self) -> Stage:
        probe = next((probe for probe in self.probes if not probe.steps), None)
        if probe is None or any(not parameter.is_floating_point() for parameter in self.stock.parameters()):
            return _unchecked("gradients", "the weights are no floating-point numbers")
        try:
            expected = self._gradients_of(self.stock, probe)
        except Exception as error:
            return _unchecked("gradients", f"stock can't be trained: {type(error).__name__}: {error}")
        try:
            found = self._gradients_of(self.ours, probe)
        except PatcherError:
            raise
        except Exception as error:
            return Stage("gradients", False, message=f"the patched model raises {type(error).__name__}: {error}")
        allowed = GRADIENTS * self.tolerance
        gaps = {
            key: difference([found[key]] if key in found else [], [gradient]) for key, gradient in expected.items()
        }
        wrong = [key for key, gap in gaps.items() if gap.absolute > allowed * max(gap.scale, self._typical(expected))]
        worst = max(gaps.values(), default=Difference(0.0, 0.0, 0.0))
        figures = (("max abs", worst.absolute), ("tensors", float(len(expected))))
        text = f"they differ for {', '.join(compress(wrong))}" if wrong else ""
        return Stage("gradients", not wrong, figures, allowed, text)

    @staticmethod
    def _typical(gradients: Mapping[str, torch.Tensor]) -> float:
        """What is small beside this is rounding: the median of the largest gradient of each tensor."""
        largest = sorted(float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel())
        return largest[len(largest) // 2] if largest else 1.0

    def _gradients_of(self, model: Any, probe: Probe) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(self.seed)
        loss = torch.zeros(())
        for output in probe.outputs_of(model):
            if output.requires_grad:
                loss = loss + (output.float() * torch.randn(output.shape, generator=generator)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        model.zero_grad(set_to_none=True)
        return original_state_dict(model, gradients)

    # --- files -----------------------------------------------------------------------------------------------------

    def _save(self) -> Stage:
        try:
            self.stock.save_pretrained(self.scratch / "stock")
        except Exception as error:
            return _unchecked("save", f"stock can't be saved: {type(error).__name__}: {error}")
        self.ours.save_pretrained(self.scratch / "patched")
        expected, found = _saved(self.scratch / "stock"), _saved(self.scratch / "patched")
        wrong = [f"{key} is missing" for key in compress(expected.keys() - found.keys())]
        wrong += [f"{key} is not in the original" for key in compress(found.keys() - expected.keys())]
        differing = [key for key in expected.keys() & found.keys() if not _equal_bytes(expected[key], found[key])]
        wrong += [f"{key} differs" for key in compress(sorted(differing))]
        names = [sorted(path.name for path in (self.scratch / one).iterdir()) for one in ("stock", "patched")]
        if not wrong and names[0] != names[1]:
            wrong.append(f"the files are {', '.join(names[1])} in place of {', '.join(names[0])}")
        figures = (("tensors", float(len(expected))), ("equal byte for byte", float(len(expected) - len(differing))))
        return Stage("save", not wrong, figures, message="; ".join(wrong))

    def _reload(self) -> Stage:
        if not (self.scratch / "patched").exists():
            return _unchecked("reload", "nothing was saved")
        loaded: Any = self.cls
        more = {name: value for name, value in self.options.items() if name in ("attn_implementation", "device_map")}
        again = loaded.from_pretrained(self.scratch / "patched", dtype=self.dtype, **more).eval()
        with torch.no_grad():
            gaps = [difference(probe.outputs_of(again), self.reference[probe.name]) for probe in self.probes]
        worst = max(gaps)
        allowed = TOLERANCES[self.dtype]
        passed = all(gap.within(allowed) for gap in gaps)
        text = "" if passed else f"stock computes something else with what was saved, by {worst.absolute:.3g}"
        return Stage("reload", passed, (("max abs", worst.absolute),), allowed * max(1.0, worst.scale), text)


def _unchecked(name: str, why: str) -> Stage:
    return Stage(name, True, message=f"not checked: {why}", checked=False)


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - not a dict
    return tensors


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def _random_checkpoint(cls: type[PreTrainedModel], config: PretrainedConfig, folder: Path, seed: int) -> Path:
    """Every parameter gets values of its own: with the zeros and ones of an initialisation much would go unseen."""
    make: Any = cls._from_config
    model = make(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
                noise = torch.randn(parameter.shape, generator=generator) * size
                parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(folder)
    return folder


@contextmanager
def _steps(shown: bool | None) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    shown = (console.is_terminal or console.is_jupyter) if shown is None else shown
    columns = (SpinnerColumn(), TextColumn("verifying: {task.description}"), TimeElapsedColumn())
    bars: Any = transformers_logging
    were = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # those of the loads
    try:
        with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
            task = progress.add_task("", total=None)

            def step(what: str) -> None:
                if shown and not (console.is_terminal or console.is_jupyter):  # a log: line by line
                    console.print(f"verifying: {what}")
                progress.update(task, description=what)

            yield step
    finally:
        if were:
            bars.enable_progress_bar()
