"""Stock and patched side by side: the comparison, its messages, and the stages of a verification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from patcher.compat.modeling_code import unrebound
from patcher.errors import InvalidPatcherError
from patcher.expressions import search
from patcher.loading.record import record_of
from patcher.patterns import compress, did_you_mean
from patcher.verification.layer_errors import LayerErrors, layer_errors
from patcher.verification.numerics import Difference, differences, noting_calls
from patcher.verification.passes import Pass, Reference


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
        seconds: the time that it took.
        layers: how far each layer is from stock's, where the outputs were compared: on the first input that is wrong.
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


def requested(what: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Those of the known names that are requested, in their order.

    Raises:
        InvalidPatcherError: one isn't known.
    """
    wanted = set(names)
    for name in sorted(wanted.difference(known)):
        hint = did_you_mean(name, known, f"they are {', '.join(known)}.")
        raise InvalidPatcherError(f"{what}s={name!r}: there is no such {what}; {hint}")
    return tuple(name for name in known if name in wanted)


@dataclass
class Comparison:
    """The differences of several runs of two models."""

    tolerance: float
    gaps: list[Difference] = field(default_factory=list)
    agreement: list[torch.Tensor] = field(default_factory=list)
    message: str = ""
    failing: Reference | None = None  # the run that the message is about
    others: list[str] = field(default_factory=list)  # the other runs that are wrong
    layers: LayerErrors | None = None  # of that run

    def add(self, other: Comparison) -> None:
        """Add the results of another comparison."""
        self.gaps += other.gaps
        self.agreement += other.agreement
        if not self.message:
            self.message, self.others, self.layers = other.message, other.others, other.layers
            self.failing = other.failing
        elif other.failing:
            self.others += [other.failing.run.name, *other.others]

    def stage(self, name: str) -> Stage:
        worst = max(self.gaps, key=lambda gap: gap.share, default=Difference(0.0, 0.0, 0.0))
        figures = [("max abs", worst.absolute), ("max relative", worst.relative)]
        if self.agreement:
            figures.append(("argmax agreement", float(torch.stack(self.agreement).mean())))
        figures.append(("inputs", float(len(self.gaps))))
        message = self.message
        if self.others:
            shown = ", ".join(self.others[:3]) + (", ..." if len(self.others) > 3 else "")
            message += f"; {len(self.others)} of the {len(self.gaps) - 1} other inputs differ too: {shown}"
        allowed = self.tolerance * max(1.0, worst.scale)
        return Stage(name, not message, tuple(figures), allowed, message, layers=self.layers)


@dataclass
class Pair:
    """The stock model and the patched one, loaded in the same way."""

    stock: Any
    ours: Any
    name: str = "the patched model"  # what ours is called

    def compare(
        self,
        references: Iterable[Reference],
        tolerance: float,
        *,
        reached: set[str] | None = None,
        prefix: str = "",
    ) -> Comparison:
        """Run the patched model on all that stock was run on.

        Args:
            reached: gets the paths of the modules that are called.
            prefix: what to say before the name of a run.
        """
        found = Comparison(tolerance)
        with nullcontext() if reached is None else noting_calls(self.ours, reached):
            for reference in references:
                run, expected = reference
                try:
                    mine = run.results(self.ours)
                except Exception as error:  # stock went through it
                    gap, message = Difference(math.inf, math.inf, 0.0), f"{self.name} raises {error_text(error)}"
                else:
                    gap, message = differences(mine, expected), ""
                    found.agreement += _agreement(mine, expected)
                found.gaps.append(gap)
                if gap.within(tolerance) and not message:
                    continue
                if found.message:
                    found.others.append(run.name)
                else:
                    found.failing = reference
                    if not message and math.isinf(gap.absolute) and not gap.scale and gap.where:
                        message = gap.where
                    elif not message:
                        found.layers = self.by_layer(run, tolerance, prefix=prefix)
                        begins = self.blame(found.layers.begins)
                        message = f"they differ by {gap.absolute:.3g}, in {gap.where}; {begins}"
                    found.message = f"on {prefix}{run.name} {message}"
        return found

    def by_layer(self, run: Pass, tolerance: float, *, prefix: str = "", right: bool = False) -> LayerErrors:
        """How far each layer is from stock's.

        Args:
            right: the outputs are the same, so nothing begins.
        """
        return layer_errors(self.ours, self.stock, run.results, prefix + run.name, tolerance, right=right)

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


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _agreement(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """How often the largest of the first output is at the same place."""
    one, other = (next(iter(each.values()), torch.empty(0)) for each in (mine, expected))
    if one.shape != other.shape or other.dim() < 2 or not other.numel():
        return []
    return [(one.argmax(-1) == other.argmax(-1)).float().mean()]
