"""One run of a model with everything that it returns, and how far two results are apart."""

from __future__ import annotations

import inspect
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from transformers import Cache

from patcher.compat.models import named_parameters
from patcher.loading.saving import saved_state_dict
from patcher.patterns import parents
from patcher.source.reading import signature_of

#: In the results of a pass, the prefix of the names of gradients, and the suffix of those of the arguments after it.
GRADIENT, AFTER = "the gradient of ", " after the call"


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed torch, numpy and `random`, and restore their states at the end."""
    python, array = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices):
            # `torch.manual_seed` formats a stack for devices that aren't there.
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


@dataclass(frozen=True, eq=False)
class Pass:
    """One run of a model, or of a model inside of it.

    Attributes:
        method: the method that is called.
        arguments: its keyword arguments.
        path: the path of the inner model.
        title: its name in reports, where method and arguments aren't enough.
        counted: (batch, length), True for tokens that aren't padding; None if all positions are compared.
        calls: run these one after another instead, on a model that may keep state between calls.
        cache: the argument by which each of these calls passes its cache to the next, "" for none.
        learns: whether the gradients of all parameters are results too.
    """

    method: str
    arguments: dict[str, Any]
    path: str = ""
    title: str = ""
    counted: torch.Tensor | None = None
    calls: tuple[Pass, ...] = ()
    cache: str = ""
    learns: bool = False

    @property
    def name(self) -> str:
        """Its name in reports."""
        method = "" if self.method == "forward" else f"{self.method} "
        names = (name for name in self.arguments if name != "use_cache")
        return self.title or f"{self.path or 'the model'}: {method}{', '.join(names)}"

    def of(self, model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
        """Return all floating-point outputs, without padding."""
        return [value for name, value in self.results(model, seed).items() if not name.endswith(AFTER)]

    def results(self, model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return outputs by name, and the arguments after the call, which shows models that write into them."""
        results: dict[str, torch.Tensor] = {}
        cache: Any = None
        with state_restored(model), torch.enable_grad() if self.learns else nullcontext():
            for index, run in enumerate(self.calls or (self,), 1):
                prefix = f"call {index} ({run.name}), " if self.calls else ""
                arguments = fitted(run.arguments, model)
                cached = {self.cache: cache} if self.cache else {}
                part: Any = model.get_submodule(run.path)
                with seeded(seed):
                    outputs = (part if run.method == "forward" else getattr(part, run.method))(**arguments, **cached)
                cache = getattr(outputs, self.cache, None)
                for name, output in named_tensors(outputs):
                    if run.counted is not None and output.shape[:2] == run.counted.shape:
                        output = output[run.counted.to(output.device)]
                    results[prefix + name] = output
                for name, value in arguments.items():
                    if isinstance(value, torch.Tensor):
                        results[f"{prefix}{name}{AFTER}"] = value
            return results | _gradients(model, results) if self.learns else results


def _gradients(model: Any, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a weighted sum of the outputs, in the layout of the checkpoint; detach the outputs."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    for name, output in outputs.items():
        if output.requires_grad:
            weights = torch.randn(output.shape, generator=generator).to(output.device)
            loss = loss + (output.float() * weights).mean().cpu()
        outputs[name] = output.detach()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in named_parameters(model)
    }
    model.zero_grad(set_to_none=True)
    return {f"{GRADIENT}{name}": value for name, value in saved_state_dict(model, gradients).items()}


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore at the end what modules keep from one call for the next."""
    # Dicts in place and one level deep: hooks that a call installs go together with the flag that says they are there.
    dicts: list[dict[str, Any]] = [vars(module) for module in model.modules()]
    dicts += [value for attributes in dicts for value in attributes.values() if type(value) in (dict, OrderedDict)]
    before = [dict(state) for state in dicts]
    try:
        yield
    finally:
        for state, content in zip(dicts, before, strict=True):
            state.clear()
            state.update(content)


def fitted(arguments: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Copy arguments to the device of a model's weights, and cast them where these are in half precision."""
    weight = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0))
    device = device_of(model)
    return {
        name: value.clone().to(device, weight.dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the inputs: that of the first weight that isn't offloaded."""
    return next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu"))


def parameters_of(model: Any, method: str = "forward") -> dict[str, inspect.Parameter]:
    """Return the parameters of a method by name, without `self`."""
    return dict(signature_of(getattr(model, method)).parameters)


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False) -> Iterator[None]:
    """Call hooks with the module, its arguments and its output after each call, or without output before it."""
    handles = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        if before
        else module.register_forward_hook(hook, with_kwargs=True)
        for module, hook in hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recording_calls(model: nn.Module, reached: set[str]) -> Iterator[None]:
    """Add the paths of modules that are called, and of those around them, under each of their names."""

    def record(path: str, *_: object) -> None:
        if path not in reached:
            reached.update([path], parents(path))

    with hooked((module, partial(record, path)) for path, module in model.named_modules(remove_duplicate=False)):
        yield


# --- differences


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in nested dicts, lists and tuples, such as the output of a model."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield them by name, such as `hidden_states.0`, and for a cache the number of its tokens."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield name or "the output", value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Cache):
        with suppress(Exception):  # not every cache counts tokens
            yield f"the tokens in {name}", torch.tensor(float(value.get_seq_length()))


class Difference(NamedTuple):
    """How far tensors are from a reference: the largest difference of an element."""

    absolute: float
    relative: float
    scale: float  # the largest magnitude in the reference
    where: str = ""  # the name of the tensor, or what makes the two incomparable

    @property
    def share(self) -> float:
        """The difference relative to the magnitude of the reference, or to 1 where that is smaller."""
        return self.absolute / max(1.0, self.scale)

    def within(self, tolerance: float) -> bool:
        """Whether the share is no more than the tolerance."""
        return self.share <= tolerance  # false for nan


def difference(ours: Iterable[torch.Tensor], reference: Iterable[torch.Tensor]) -> Difference:
    """Return the difference of two lists of tensors; infinite if their number, a shape or a dtype differs.

    >>> difference([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 2.0])]).absolute
    0.5
    """
    return differences(*({str(index): tensor for index, tensor in enumerate(some)} for some in (ours, reference)))


def differences(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> Difference:
    """The same for tensors by name.

    >>> differences({"logits": torch.tensor([1.0, 2.5])}, {"logits": torch.tensor([1.0, 2.0])})
    Difference(absolute=0.5, relative=0.25, scale=2.0, where='logits')

    A value that isn't finite only equals the same value at the same place.
    """
    worst: Difference | None = None
    for name in {**reference, **ours}:  # in the order of the reference
        mine, theirs = ours.get(name), reference.get(name)
        if mine is None or theirs is None:
            return Difference(math.inf, math.inf, 0.0, f"{name} is {'missing' if mine is None else 'not in stock'}")
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return Difference(math.inf, math.inf, 0.0, f"{name} is {kind_of(mine)} where stock has {kind_of(theirs)}")
        gap = _difference(mine, theirs)._replace(where=name)
        worst = gap if worst is None or gap.share > worst.share else worst
    return worst or Difference(0.0, 0.0, 0.0)


def kind_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape for a message."""
    return f"{tensor.dtype} of the shape {tuple(tensor.shape)}"


def _difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    if not one.numel():
        return Difference(0.0, 0.0, 0.0)
    one, other = (
        tensor.detach() if tensor.dtype is torch.float32 else tensor.detach().double() for tensor in (one, other)
    )
    one = one.to(other.device, other.dtype)
    absolute, scale = (max(abs(float(bound)) for bound in torch.aminmax(tensor)) for tensor in (one - other, other))
    if not math.isfinite(absolute + scale):
        gap = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
        absolute = math.inf if gap.isnan().any() else float(gap.max())
        finite = other[other.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
    return Difference(absolute, absolute / scale if scale else math.inf if absolute else 0.0, scale)
