"""Stock and patched side by side: what each pass gives on both, where an error begins, and what both save."""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from patcher.compat.attributes import TORCH_ATTRIBUTES
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import GradientCheckpointingLayer
from patcher.errors import InvalidPatcherError, did_you_mean
from patcher.expressions import search
from patcher.layouts.carried import CARRIED
from patcher.loading.record import record_of
from patcher.patterns import compress
from patcher.verification.layers import LayerErrors, layer_errors
from patcher.verification.passes import (
    GRADIENT,
    Difference,
    Pass,
    difference,
    differences,
)

#: Gradients go through the network twice: so many times the tolerance of outputs.
GRADIENTS = 10.0


@dataclass(frozen=True)
class Stage:
    """One thing that was checked.

    Attributes:
        name: what was checked; `verify` lists the names.
        passed: whether it holds; also where nothing could be checked, and `message` says why.
        figures: (what, value) of what was measured.
        tolerance: the largest value of the first figure that passes, None where it must be equal.
        message: what is wrong, and where; or why nothing was checked.
        checked: whether anything was.
        layers: how far each layer is from stock's, where the outputs were compared: on the first input that is wrong.
        seconds: the time that it took.
    """

    name: str
    passed: bool
    figures: tuple[tuple[str, float], ...] = ()
    tolerance: float | None = None
    message: str = ""
    checked: bool = True
    layers: LayerErrors | None = None
    seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {**vars(self), "figures": dict(self.figures)}


class UncheckedError(Exception):
    """Why a stage could not be checked."""


def error_text(error: BaseException) -> str:
    """An error as one line of a report."""
    return f"{type(error).__name__}: {error}"


def requested(what: str, names: Iterable[str] | str, known: Iterable[str]) -> tuple[str, ...]:
    """Those of the known names that are requested, in their order: one, or several.

    Raises:
        InvalidPatcherError: one isn't known.
    """
    wanted = {names} if isinstance(names, str) else {*names}
    for name in sorted(wanted.difference(known)):
        hint = did_you_mean(name, known, f"they are {', '.join(known)}.")
        raise InvalidPatcherError(f"{what}s={name!r}: there is no such {what}; {hint}")
    return tuple(name for name in known if name in wanted)


class Reference(NamedTuple):
    """A run, and what the stock model gives, with all of its layers or with a few of those that are alike."""

    run: Pass
    expected: dict[str, torch.Tensor]
    few: bool = False


class Pair:
    """The stock model and the patched one, loaded in the same way.

    Attributes:
        name: what the patched one is called.
        stacks: the stacks of layers of both, each with the numbers of those that represent all.
        refusal: what stock has raised, of what it was tried on.
        failing: the first run of the last comparison that is wrong.
    """

    def __init__(self, stock: Any, ours: Any, name: str = "the patched model") -> None:
        self.stock, self.ours, self.name = stock, ours, name
        self.stacks = list(_stacks_of(stock, ours))
        self.refusal = ""
        self.failing: Reference | None = None

    @contextmanager
    def layers(self, few: bool) -> Iterator[None]:
        """Within, both models have only some of the layers that are alike, if few is true."""
        before = [(stack, stack._modules, numbers) for stack, numbers in self.stacks] if few else []
        try:
            for stack, modules, numbers in before:
                # Under their own names: code that finds modules by paths works, and code that needs all raises.
                items = list(modules.items())
                stack._modules = OrderedDict(items[number] for number in sorted(numbers))
            yield
        finally:
            for stack, modules, _ in before:
                stack._modules = modules

    def references(self, runs: Iterable[Pass], *, few: bool = True) -> Iterator[Reference]:
        """What stock gives for those that it runs: with a few layers, or with all where it can't with a few."""
        for run in runs:
            for some in (True, False) if few and self.stacks else (False,):
                try:
                    with self.layers(some), torch.no_grad():
                        found = Reference(run, run.results(self.stock), some)
                except Exception as error:  # whatever a model raises for what it isn't made for
                    self.refusal = error_text(error)
                else:
                    yield found
                    break

    def compare(self, stage: str, references: Iterable[Reference], tolerance: float, prefix: str = "") -> Stage:
        """Run the patched model on all that stock was run on. What is wrong with a few layers is looked at with all
        of them, which decides.

        Args:
            stage: what is checked.
            prefix: what to say before the name of a run.

        Raises:
            UncheckedError: stock runs nothing of it.
        """
        gaps: list[Difference] = []
        agreement: list[torch.Tensor] = []
        wrong: list[str] = []
        message, layers, tensors = "", None, 0
        self.failing = None
        for each in references:
            reference = each if not each.few or self.stacks else next(self.references([each.run]), each)
            gap, text, mine = self.beside(reference, tolerance)
            if text and reference.few and not wrong:
                reference = next(self.references([each.run], few=False), reference)
                gap, text, mine = self.beside(reference, tolerance)
                if not text:  # the few don't represent all
                    self.stacks.clear()
            gaps.append(gap)
            if reference.run.learns:
                tensors = len(reference.expected)
            else:
                agreement += _agreement(mine, reference.expected)
            if text and not wrong:
                self.failing = reference
                if gap.scale and gap.where:  # outputs, not gradients
                    run = replace(reference.run, learns=False)
                    layers = layer_errors(self.ours, self.stock, run.results, prefix + run.name, tolerance)
                    text += f"; {self.blame(layers.begins)}"
                message = f"on {prefix}{reference.run.name} {text}"
            wrong += [reference.run.name] if text else []
        if not gaps:
            raise UncheckedError(f"stock raises {self.refusal}")
        if wrong[1:]:
            shown = ", ".join(wrong[1:4]) + (", ..." if len(wrong) > 4 else "")
            message += f"; {len(wrong) - 1} of the {len(gaps) - 1} other inputs differ too: {shown}"
        worst = max(gaps, key=lambda gap: gap.share)
        figures = [("max abs", worst.absolute), ("max relative", worst.relative)]
        if agreement:
            figures.append(("argmax agreement", float(torch.stack(agreement).mean())))
        figures.append(("tensors", float(tensors)) if tensors else ("inputs", float(len(gaps))))
        allowed = tolerance * (GRADIENTS if tensors else max(1.0, worst.scale))
        return Stage(stage, not message, tuple(figures), allowed, message, layers=layers)

    def beside(self, reference: Reference, tolerance: float) -> tuple[Difference, str, dict[str, torch.Tensor]]:
        """How far the patched model is from stock, what is wrong with it, and what it gives."""
        run, expected, few = reference
        try:
            with self.layers(few):
                mine = run.results(self.ours)
        except Exception as error:  # stock went through it
            return Difference(math.inf, math.inf, 0.0), f"{self.name} raises {error_text(error)}", {}
        (outputs, learned), (theirs, to_learn) = map(_parted, (mine, expected))
        gap = differences(outputs, theirs)
        if not gap.within(tolerance):
            return gap, f"they differ by {gap.absolute:.3g}, in {gap.where}" if gap.scale else gap.where, mine
        if not run.learns:
            return gap, "", mine
        gaps = {key: difference([learned[key]] if key in learned else [], [one]) for key, one in to_learn.items()}
        # What is small beside the median of the largest gradient of each tensor is rounding.
        typical = statistics.median_high([gap.scale for gap in gaps.values()])
        allowed = GRADIENTS * tolerance
        wrong = [key for key, gap in gaps.items() if not gap.absolute <= allowed * (max(gap.scale, typical) or 1.0)]
        return max(gaps.values()), f"they differ for {', '.join(compress(wrong))}" if wrong else "", mine

    def compare_weights(
        self, name: str, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
    ) -> Stage:
        """What both save, byte for byte."""
        record = record_of(self.ours)
        declared = [text for patcher in (record.patchers if record else ()) for text in patcher.new_weights]
        new = {key for key in found.keys() - expected.keys() if any(search(text, key) for text in declared)}
        differing = [key for key in expected.keys() & found.keys() if not _equal_bytes(expected[key], found[key])]
        wrong = [f"{key} is missing" for key in compress(expected.keys() - found.keys())]
        wrong += [f"{key} is not in the original" for key in compress(found.keys() - expected.keys() - new)]
        wrong += [f"{key} differs" for key in compress(sorted(differing))]
        figures = [("tensors", float(len(expected))), ("equal byte for byte", float(len(expected) - len(differing)))]
        figures += [("new", float(len(new)))] if new else []
        return Stage(name, not wrong, tuple(figures), message="; ".join(wrong))

    def blame(self, path: str | None) -> str:
        """The module in which the error begins, for a message."""
        if path is None:
            return "it doesn't begin in a module that both have"
        mine, theirs = type(self.ours.get_submodule(path)), type(self.stock.get_submodule(path))
        is_another = mine.__qualname__ != theirs.__qualname__  # a class of a generated file is called as that of stock
        kind = f"{mine.__qualname__} in place of {theirs.__qualname__}" if is_another else mine.__qualname__
        if mine is not theirs and unrebound(mine) is theirs:
            kind = f"{mine.__qualname__}, which calls replaced functions"
        return f"it begins in {path or 'the model itself'} ({kind})"


def _parted(values: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, and gradients under the names of what they are of."""
    gradients = {name[len(GRADIENT) :]: value for name, value in values.items() if name.startswith(GRADIENT)}
    return {name: value for name, value in values.items() if not name.startswith(GRADIENT)}, gradients


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _agreement(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """How often the largest of the first output is at the same place."""
    one, other = (next(iter(each.values()), torch.empty(0)) for each in (mine, expected))
    if one.shape != other.shape or other.dim() < 2 or not other.numel():
        return []
    return [(one.argmax(-1) == other.argmax(-1)).float().mean()]


# --- which layers are alike, so that a few represent all


def _stacks_of(stock: nn.Module, ours: nn.Module) -> Iterator[tuple[nn.Module, set[int]]]:
    """The stacks of layers of both models, each with the numbers of those that represent all.

    Of each kind the first two, the one in the middle and the last: what depends on the number of a layer is mostly
    a bound on it, or whether it is even.
    """
    theirs = dict(stock.named_modules())
    for path, stack in ours.named_modules():
        other = theirs.get(path)
        if not (isinstance(stack, nn.ModuleList) and isinstance(other, nn.ModuleList)) or len(stack) != len(other):
            continue
        around = [path[:place] for place, letter in enumerate(path) if letter == "."]
        if any(type(theirs.get(each)) is not type(ours.get_submodule(each)) for each in ["", *around]):
            continue  # a replacement may go through the layers in another way
        if not all(isinstance(layer, GradientCheckpointingLayer) for layer in other):
            continue  # not known to be run one after another
        kinds: dict[str, list[int]] = {}
        for number, layers in enumerate(zip(stack, other, strict=True)):
            kinds.setdefault("".join(_description(layer, number) for layer in layers), []).append(number)
        numbers = {kind[place] for kind in kinds.values() for place in (0, min(1, len(kind) - 1), len(kind) // 2, -1)}
        if len(numbers) < len(stack):
            yield from [(stack, numbers), (other, numbers)]


def _description(layer: nn.Module, number: int) -> str:
    """All that a layer computes with, but for its own number and the values of its weights."""
    found: list[Any] = []
    for path, module in layer.named_modules():
        found += [path, type(module), id(type(module))]
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            found += [] if tensor is None else [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)]
        for name, value in sorted(vars(module).items()):
            if name == CARRIED or "state_dict" in name or name in ("_parameters", "_buffers", "_modules"):
                continue  # how weights are read, not what is computed
            if type(value) is int and value == number and ("layer" in name or "idx" in name or "number" in name):
                continue
            if name in TORCH_ATTRIBUTES and isinstance(value, dict):  # hooks
                value = list(value.values())
            found += [name, id(value) if isinstance(value, PretrainedConfig | torch.Tensor) else value]
    return repr(found)
