"""The stock and the patched model side by side: outputs, gradients, where an error begins, and saved weights."""

from __future__ import annotations

import inspect
import math
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GradientCheckpointingLayer, PretrainedConfig

from patcher.compat.attributes import TORCH_ATTRIBUTES
from patcher.compat.modeling_code import unrebound
from patcher.errors import InvalidPatcherError, did_you_mean
from patcher.fusions.methods import functions_of
from patcher.layouts.carried import CARRIED
from patcher.loading.new_weights import new_weights
from patcher.patterns import compress, parents
from patcher.verification.layers import LayerErrors, layer_errors
from patcher.verification.passes import GRADIENT, Difference, Pass, difference, differences

#: The tolerance of gradients, in tolerances of outputs: they go through the network twice.
GRADIENTS = 10.0


@dataclass(frozen=True)
class Stage:
    """One stage of a verification.

    Attributes:
        name: one of the names that `verify` lists.
        passed: whether nothing differs; also where nothing could be checked, then `message` says why.
        figures: (name, value) of what was measured.
        tolerance: the largest value of the first figure that passes, None where values must be equal.
        message: what differs and where, or why nothing was checked.
        checked: whether anything was checked.
        layers: the error of each layer, on the first input that differs, where outputs were compared.
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
        """Return all of it for JSON."""
        return {**vars(self), "figures": dict(self.figures)}


class UncheckedError(Exception):
    """Why a stage could not be checked."""


def error_text(error: BaseException) -> str:
    """Return an error as one line of a report."""
    return f"{type(error).__name__}: {error}"


def requested(what: str, names: Iterable[str] | str, known: Iterable[str]) -> tuple[str, ...]:
    """Return one or several requested names in the order of the known ones.

    Raises:
        InvalidPatcherError: a name isn't known.
    """
    chosen = {names} if isinstance(names, str) else {*names}
    for name in sorted(chosen.difference(known)):
        hint = did_you_mean(name, known, f"they are {', '.join(known)}.")
        raise InvalidPatcherError(f"{what} {name!r}: there is no such {what}; {hint}")
    return tuple(name for name in known if name in chosen)


class Reference(NamedTuple):
    """A run, and its results on the stock model with all layers, or with a few of those that are alike."""

    run: Pass
    expected: dict[str, torch.Tensor]
    few: bool = False


class Pair:
    """The stock and the patched model, loaded in the same way.

    Attributes:
        name: the name of the patched one in messages.
        stacks: the stacks of layers of both, each with the indices of representative layers.
        refusal: the last error of the stock model.
        failing: the first run of the last comparison that differs.
    """

    def __init__(self, stock: Any, ours: Any, name: str = "the patched model", reference: str = "stock") -> None:
        self.stock, self.ours, self.name, self.reference = stock, ours, name, reference
        self.stacks = list(_stacks_of(stock, ours))
        self.refusal = ""
        self.failing: Reference | None = None

    @contextmanager
    def layers(self, few: bool) -> Iterator[None]:
        """Reduce both models to their representative layers, if `few` is true."""
        before = [(stack, stack._modules, indices) for stack, indices in self.stacks] if few else []
        try:
            for stack, modules, indices in before:
                # Under their own names: code that finds modules by paths works, and code that needs all raises.
                items = list(modules.items())
                stack._modules = OrderedDict(items[index] for index in sorted(indices))
            yield
        finally:
            for stack, modules, _ in before:
                stack._modules = modules

    def references(self, runs: Iterable[Pass], *, few: bool = True) -> Iterator[Reference]:
        """Run the stock model with a few layers, or with all where it raises; skip runs that it refuses."""
        for run in runs:
            for some in (True, False) if few and self.stacks else (False,):
                try:
                    with self.layers(some), torch.no_grad():
                        reference = Reference(run, run.results(self.stock), some)
                except Exception as error:  # whatever a model raises for unsuitable inputs
                    self.refusal = error_text(error)
                else:
                    yield reference
                    break

    def compare(self, stage: str, references: Iterable[Reference], tolerance: float, prefix: str = "") -> Stage:
        """Run the patched model on all references. A difference with a few layers is decided with all of them.

        Args:
            stage: the name of the stage.
            prefix: of the names of runs.

        Raises:
            UncheckedError: there are no references.
        """
        gaps: list[Difference] = []
        agreement: list[torch.Tensor] = []
        wrong: list[str] = []
        message, layers, tensors = "", None, 0
        self.failing = None
        for reference in references:
            gap, text, results = self.beside(reference, tolerance)
            if text and reference.few and not wrong:
                reference = next(self.references([reference.run], few=False), reference)
                gap, text, results = self.beside(reference, tolerance)
                if not text:  # the few don't represent all
                    self.stacks.clear()
            gaps.append(gap)
            if reference.run.learns:
                tensors = len(reference.expected)
            else:
                agreement += _agreement(results, reference.expected)
            if text and not wrong:
                self.failing = reference
                if gap.scale and gap.where:  # outputs, not gradients
                    run = replace(reference.run, learns=False)
                    layers = layer_errors(self.ours, self.stock, run.results, prefix + run.name, tolerance)
                    text += f"; {self.blame(layers.begins)}"
                message = f"on {prefix}{reference.run.name} {text}"
            wrong += [reference.run.name] if text else []
        if not gaps:
            raise UncheckedError(f"{self.reference} raises {self.refusal}")
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
        """Run the patched model. Return the difference, a message if it is too large, and the results."""
        run, expected, few = reference
        try:
            with self.layers(few):
                results = run.results(self.ours)
        except Exception as error:  # the stock model didn't raise
            return Difference(math.inf, math.inf, 0.0), f"{self.name} raises {error_text(error)}", {}
        (outputs, gradients), (expected_outputs, expected_gradients) = map(_without_gradients, (results, expected))
        gap = differences(outputs, expected_outputs)
        if not gap.within(tolerance):
            return gap, f"they differ by {gap.absolute:.3g}, in {gap.where}" if gap.scale else gap.where, results
        if not run.learns:
            return gap, "", results
        gaps = {
            name: difference([gradients[name]] if name in gradients else [], [gradient])
            for name, gradient in expected_gradients.items()
        }
        # What is small beside the median of the largest gradient of each tensor is rounding.
        typical = statistics.median_high([gap.scale for gap in gaps.values()])
        allowed = GRADIENTS * tolerance
        wrong = [name for name, gap in gaps.items() if not gap.absolute <= allowed * (max(gap.scale, typical) or 1.0)]
        message = f"they differ for {', '.join(compress(wrong))}" if wrong else ""
        return max(gaps.values())._replace(where=""), message, results

    def compare_weights(
        self, stage: str, expected: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
    ) -> Stage:
        """Compare what both save, byte for byte."""
        new = {*new_weights(self.ours)} - expected.keys()
        differing = [key for key in expected.keys() & saved.keys() if not _equal_bytes(expected[key], saved[key])]
        wrong = [f"{key} is missing" for key in compress(expected.keys() - saved.keys())]
        wrong += [f"{key} is not in the original" for key in compress(saved.keys() - expected.keys() - new)]
        wrong += [f"{key} differs" for key in compress(sorted(differing))]
        figures = [("tensors", float(len(expected))), ("equal byte for byte", float(len(expected) - len(differing)))]
        figures += [("new", float(len(new)))] if new else []
        return Stage(stage, not wrong, tuple(figures), message="; ".join(wrong))

    def blame(self, path: str | None) -> str:
        """Return the part of a message that names the module in which an error begins."""
        if path is None:
            return "it doesn't begin in a module that both have"
        mine, theirs = type(self.ours.get_submodule(path)), type(self.stock.get_submodule(path))
        is_another = mine.__qualname__ != theirs.__qualname__  # a generated file uses the names of the original
        kind = f"{mine.__qualname__} in place of {theirs.__qualname__}" if is_another else mine.__qualname__
        if mine is not theirs and unrebound(mine) is theirs:
            kind = f"{mine.__qualname__}, which calls replaced functions"
        return f"it begins in {path or 'the model itself'} ({kind})"


def _without_gradients(
    results: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return outputs, and gradients by the names of their parameters."""
    gradients = {name[len(GRADIENT) :]: value for name, value in results.items() if name.startswith(GRADIENT)}
    return {name: value for name, value in results.items() if not name.startswith(GRADIENT)}, gradients


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _agreement(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return how often the argmax of the first output is the same."""
    one, other = (next(iter(values.values()), torch.empty(0)) for values in (results, expected))
    if one.shape != other.shape or other.dim() < 2 or not other.numel():
        return []
    return [(one.argmax(-1) == other.argmax(-1)).float().mean()]


# --- modules that run other code


def differing_modules(stock: nn.Module, ours: nn.Module) -> Iterator[str]:
    """Yield the paths at which the modules of two models run other code, or have other parameters or children."""
    theirs = dict(stock.named_modules())
    results: dict[tuple[type, type], bool] = {}
    for path, module in ours.named_modules():
        if (other := theirs.get(path)) is None:
            continue  # of a module that has other children
        classes = type(other), type(module)
        names = [(*part._modules, *part._parameters) for part in (other, module)]
        if classes not in results:
            results[classes] = classes[0] is not classes[1] and _code_of(classes[0]) != _code_of(classes[1])
        if results[classes] or names[0] != names[1] or vars(module).get("forward") is not vars(other).get("forward"):
            yield path


def _code_of(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the code of the methods of a class, and of the functions that these use by a global name."""
    result: dict[str, Any] = {}
    for name, function in functions_of(cls).items():
        used = [function.__globals__.get(used_name) for used_name in function.__code__.co_names]
        unwrapped = [inspect.unwrap(item) for item in used if isinstance(item, FunctionType)]
        functions = [function, *(item for item in unwrapped if isinstance(item, FunctionType))]
        result[name] = [_operations(item.__code__) for item in functions]
    return result


def _operations(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object does. Not by `dis`: its generators crash CPython 3.11.2 under a profile function."""
    constants = [_operations(item) if isinstance(item, CodeType) else (type(item), item) for item in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


# --- representative layers


def _stacks_of(stock: nn.Module, ours: nn.Module) -> Iterator[tuple[nn.Module, set[int]]]:
    """Yield the stacks of layers of both models, with the indices of representative layers.

    These are the first two of each kind, the one in the middle and the last: code that depends on the index of a layer
    mostly compares it with a bound, or asks whether it is even.
    """
    theirs = dict(stock.named_modules())
    for path, stack in ours.named_modules():
        other = theirs.get(path)
        if not (isinstance(stack, nn.ModuleList) and isinstance(other, nn.ModuleList)) or len(stack) != len(other):
            continue
        if any(type(theirs.get(parent)) is not type(ours.get_submodule(parent)) for parent in parents(path)):
            continue  # a replacement may call the layers differently
        if not all(isinstance(layer, GradientCheckpointingLayer) for layer in other):
            continue  # not known to be called one after another
        kinds: dict[str, list[int]] = {}
        for index, layers in enumerate(zip(stack, other, strict=True)):
            kinds.setdefault("".join(_description(layer, index) for layer in layers), []).append(index)
        indices = {kind[place] for kind in kinds.values() for place in (0, min(1, len(kind) - 1), len(kind) // 2, -1)}
        if len(indices) < len(stack):
            yield from [(stack, indices), (other, indices)]


def _description(layer: nn.Module, index: int) -> str:
    """Describe all that a layer computes with, except its index and the values of its weights."""
    parts: list[Any] = []
    for path, module in layer.named_modules():
        parts += [path, type(module), id(type(module))]
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            parts += [] if tensor is None else [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)]
        for name, value in sorted(vars(module).items()):
            if name == CARRIED or "state_dict" in name or name in ("_parameters", "_buffers", "_modules"):
                continue  # how weights are read, not what is computed
            if type(value) is int and value == index and ("layer" in name or "idx" in name or "number" in name):
                continue
            if name in TORCH_ATTRIBUTES and isinstance(value, dict):  # hooks
                value = list(value.values())
            parts += [name, id(value) if isinstance(value, PretrainedConfig | torch.Tensor) else value]
    return repr(parts)
