"""What `patcher.verify` checks, one stage after another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from patcher.compat.models import attention_implementation, named_parameters
from patcher.construction.in_force import unpatched
from patcher.loading.record import record_of
from patcher.loading.saving import original_state_dict
from patcher.patterns import compress
from patcher.spec.patcher import Patcher
from patcher.verification.inputs import NoInputsError, Pass, seeded
from patcher.verification.numerics import PRECISION, Difference, difference, first_difference, noting_calls, precisions
from patcher.verification.probes import passes_for, processor_of

#: How far outputs may be apart, in units of the largest magnitude of stock's (of 1 where that is smaller); `verify`
#: says why. Half-precision types round each result of a layer but sum in float32.
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


@dataclass
class Run:
    """One verification under way: how it is asked for, then what it found by the way."""

    cls: Any  # of the model
    folder: Any
    patcher: Patcher
    dtype: torch.dtype
    seed: int
    options: Mapping[str, Any]
    scratch: Path  # an empty folder, for what is saved
    step: Callable[[str], None]  # is told what is being done
    replaced: int = 0
    floor: float | None = None

    def stages(self) -> Iterator[Stage]:
        """Load both, then check one thing after another."""
        self.step("loading stock")
        self.stock = self._stock()
        self.step("loading patched")
        try:
            self.ours = self._load(self.folder, patcher=self.patcher, **self.options)
        except Exception as error:  # stock could be loaded: it is the patcher
            yield Stage("load", False, message=_said(error))
            return
        self.patched, self.by_class = patched_modules(self.ours)
        self.replaced = len(self.patched)
        yield Stage("load", True, (("modules replaced", float(self.replaced)),))
        self.step("inputs")
        checks: dict[str, Callable[[], Stage]] = {"save": self._save}
        try:
            self.passes = passes_for(self.stock, processor_of(self.folder, self.options), self.seed)
        except NoInputsError as error:  # what wasn't compared is not the same
            yield Stage("outputs", False, message=f"stock runs on nothing that was tried, the first says: {error}")
        else:
            checks = {"outputs": self._outputs, "precision": self._precision, "generation": self._generation}
            checks |= {"gradients": self._gradients, "save": self._save, "reload": self._reload}
        for name, check in checks.items():
            self.step(name)
            try:
                with torch.set_grad_enabled(name == "gradients"):
                    stage = check()
            except _UncheckedError as error:
                stage = Stage(name, True, message=f"not checked: {error}", checked=False)
            except Exception as error:  # stock went through it, or it would have been left out
                stage = Stage(name, False, message=_said(error))
            yield stage

    def _load(self, folder: Any, **options: Any) -> Any:
        with seeded(self.seed):  # of weights that the checkpoint doesn't have
            return self.cls.from_pretrained(folder, **{"dtype": self.dtype, **options}).eval()

    def _stock(self, **more: Any) -> Any:
        return unpatched(lambda: self._load(self.folder, **{**self.options, **more}))

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.dtype], FLOORS * (self.floor or 0.0))

    def _outputs(self) -> Stage:
        self.reference = {one.name: one.of(self.stock) for one in self.passes}
        self.floor = self._stock_against_stock()
        gaps: list[Difference] = []
        agreement, reached = [], set[str]()
        for one in self.passes:
            expected = self.reference[one.name]
            try:
                with noting_calls(self.ours, reached):
                    found = one.of(self.ours)
            except Exception as error:
                return Stage("outputs", False, message=f"on {one.name} the patched model raises {_said(error)}")
            gaps.append(difference(found, expected))
            if expected and found and found[0].shape == expected[0].shape and expected[0].dim() > 1:
                agreement.append((found[0].argmax(-1) == expected[0].argmax(-1)).float().mean())
        worst = max(gaps, key=lambda gap: gap.share)
        figures = [("max abs", worst.absolute), ("max relative", worst.relative)]
        if agreement:
            figures.append(("argmax agreement", float(torch.stack(agreement).mean())))
        allowed = self.tolerance * max(1.0, worst.scale)
        wrong = next((each for each, gap in enumerate(gaps) if not gap.within(self.tolerance)), None)
        message = ""
        if wrong is not None:
            one = self.passes[wrong]
            begins = first_difference(self.ours, self.stock, one.of, self.tolerance)
            message = f"on {one.name} they differ by {gaps[wrong].absolute:.3g}; {self._blame(begins)}"
        elif missed := sorted(self.patched - reached):  # what wasn't compared is not the same
            message = f"no input that was tried reaches {', '.join(compress(missed))}, so it wasn't compared"
        return Stage("outputs", not message, tuple(figures), allowed, message)

    def _blame(self, path: str | None) -> str:
        if path is None:
            return "in no module that both have does it begin"
        mine, theirs = type(self.ours.get_submodule(path)), type(self.stock.get_submodule(path))
        kind = mine.__qualname__ if mine is theirs else f"{mine.__qualname__} in place of {theirs.__qualname__}"
        return f"it begins in {path or 'the model itself'} ({kind})"

    def _stock_against_stock(self) -> float | None:
        """Relative to the magnitude of the outputs, as tolerances are."""
        if "attn_implementation" in self.options or attention_implementation(self.stock) != "sdpa":
            return None
        try:
            return max(gap.share for gap in self._gaps(self._stock(attn_implementation="eager")))
        except Exception:  # stock has no eager attention, or it takes other inputs
            return None

    def _gaps(self, model: Any) -> list[Difference]:
        return [difference(one.of(model), self.reference[one.name]) for one in self.passes]

    def _precision(self) -> Stage:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise _UncheckedError(f"{self.dtype} loses nothing by an upcast that is left out")
        if not self.by_class:
            raise _UncheckedError("nothing is replaced")

        compared = list(
            precisions(self.ours, self.stock, self.by_class, lambda model: [one.of(model) for one in self.passes])
        )
        for path, operations, ratio in compared:
            if operations and ratio > PRECISION:
                text = f"{self._blame(path)}: {', '.join(operations)} in {self.dtype}, which stock doesn't"
                return Stage("precision", False, (("error / stock's", ratio),), PRECISION, text)
        figures = (("modules compared with float64", float(len(compared))), ("of", float(len(self.by_class))))
        return Stage("precision", True, figures)

    def _generation(self) -> Stage:
        texts = (one for one in self.passes if "input_ids" in one.arguments and not one.path)
        if (text := next(texts, None)) is None or not self.stock.can_generate():
            raise _UncheckedError("the model generates nothing from text")
        ids = text.arguments["input_ids"].to(self.stock.device)
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_scores": True}
        options |= {"return_dict_in_generate": True, "eos_token_id": None, "disable_compile": True}
        try:
            expected = self.stock.generate(input_ids=ids, **options)
        except Exception as error:
            raise _UncheckedError(f"stock raises {_said(error)}") from None
        found = self.ours.generate(input_ids=ids, **options)
        tokens = [sequence.sequences[0][-len(sequence.scores) :].tolist() for sequence in (expected, found)]
        length = min(map(len, tokens))
        same = next((place for place in range(length) if tokens[0][place] != tokens[1][place]), length)
        figures = (("tokens equal", float(same)), ("of", float(len(expected.scores))))
        if same == len(expected.scores) == len(found.scores):
            return Stage("generation", True, figures)
        best = expected.scores[min(same, length - 1)][0].float().topk(2).values
        margin, noise = float(best[0] - best[1]), 2 * self.tolerance * max(1.0, float(best[0].abs()))
        if same < length and margin <= noise:
            return Stage("generation", True, figures, message=f"then two tokens are equally likely (by {margin:.1g})")
        message = f"token {same + 1} of {len(expected.scores)} is another, which stock prefers by {margin:.3g}"
        return Stage("generation", False, figures, message=message)

    def _gradients(self) -> Stage:
        whole = next((one for one in self.passes if not one.steps), None)
        if whole is None or any(not parameter.is_floating_point() for parameter in self.stock.parameters()):
            raise _UncheckedError("the weights are no floating-point numbers")
        try:
            expected = self._gradients_of(self.stock, whole)
        except Exception as error:
            raise _UncheckedError(f"stock can't be trained: {_said(error)}") from None
        found = self._gradients_of(self.ours, whole)
        allowed = GRADIENTS * self.tolerance
        gaps = {key: difference([found[key]] if key in found else [], [one]) for key, one in expected.items()}
        # What is small beside the median of the largest gradient of each tensor is rounding.
        typical = statistics.median_high([gap.scale for gap in gaps.values()] or [1.0])
        wrong = [key for key, gap in gaps.items() if gap.absolute > allowed * max(gap.scale, typical)]
        worst = max(gaps.values(), default=Difference(0.0, 0.0, 0.0))
        figures = (("max abs", worst.absolute), ("tensors", float(len(expected))))
        text = f"they differ for {', '.join(compress(wrong))}" if wrong else ""
        return Stage("gradients", not wrong, figures, allowed, text)

    def _gradients_of(self, model: Any, one: Pass) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(self.seed)
        loss = torch.zeros(())
        for output in one.of(model):
            if output.requires_grad:
                weights = torch.randn(output.shape, generator=generator).to(output.device)
                loss = loss + (output.float() * weights).mean().cpu()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in named_parameters(model)
        }
        model.zero_grad(set_to_none=True)
        return original_state_dict(model, gradients)

    def _save(self) -> Stage:
        try:
            self.stock.save_pretrained(self.scratch / "stock")
        except Exception as error:
            raise _UncheckedError(f"stock can't be saved: {_said(error)}") from None
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
            raise _UncheckedError("nothing was saved")
        # Where the files were, and how they became quantized, is behind us.
        options = {name: self.options[name] for name in ("attn_implementation", "device_map") if name in self.options}
        again = unpatched(lambda: self._load(self.scratch / "patched", **options))
        gaps = self._gaps(again)
        worst = max(gaps)
        allowed = TOLERANCES[self.dtype]
        passed = all(gap.within(allowed) for gap in gaps)
        text = "" if passed else f"stock computes something else with what was saved, by {worst.absolute:.3g}"
        return Stage("reload", passed, (("max abs", worst.absolute),), allowed * max(1.0, worst.scale), text)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _UncheckedError(Exception):
    """Why a stage could not be checked."""


def patched_modules(model: Any) -> tuple[set[str], list[str]]:
    """The paths of the modules that were replaced or fused, and of these one for each pair of classes."""
    record = record_of(model)
    if record is None:
        return set(), []
    modules = {item.path: (item.original, item.replacement) for item in record.replaced} | dict(record.fused)
    first = {pair: path for path, pair in reversed(modules.items())}
    return set(modules), list(first.values())


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
