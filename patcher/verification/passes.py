"""One run of a model and what it gives, the same on every model that it is run on; and how far that is from others."""

from __future__ import annotations

import inspect
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from transformers import Cache

from patcher.compat.models import named_parameters
from patcher.loading.saving import saved_state_dict

#: What the names of gradients begin with in the results of a pass, and end with those of arguments after it.
GRADIENT, AFTER = "the gradient of ", " after the call"


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Within, torch, numpy and `random` draw what the seed gives; afterwards they go on as if nothing was drawn."""
    python, array = random.getstate(), numpy.random.get_state()
    alive: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count() if alive else 0)
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
        method: what is called.
        arguments: its keyword arguments.
        path: of the model inside.
        title: what to call it, where method and arguments don't say it.
        counted: (batch, length), True where there is a token; None where all positions of the outputs count.
        calls: in place of it, these one after another, on a model that may keep something of each for the next.
        cache: what the model calls the cache that each of these hands to the next, "" if there is none.
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
        """What reports call it."""
        method = "" if self.method == "forward" else f"{self.method} "
        names = (name for name in self.arguments if name != "use_cache")
        return self.title or f"{self.path or 'the model'}: {method}{', '.join(names)}"

    def of(self, model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
        """All floating-point tensors that the run gives; of what is padding, none."""
        return [value for name, value in self.results(model, seed).items() if not name.endswith(AFTER)]

    def results(self, model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
        """The outputs by name, and the arguments as they are after the run: a model that writes into them shows it."""
        found: dict[str, torch.Tensor] = {}
        memory: Any = None
        with without_memory(model), torch.enable_grad() if self.learns else nullcontext():
            for number, one in enumerate(self.calls or (self,), 1):
                call = f"call {number} ({one.name}), " if self.calls else ""
                arguments = fitted(one.arguments, model)
                cached = {self.cache: memory} if self.cache else {}
                part: Any = model.get_submodule(one.path)
                with seeded(seed):
                    given = (part if one.method == "forward" else getattr(part, one.method))(**arguments, **cached)
                memory = getattr(given, self.cache, None)
                for name, output in named_tensors(given):
                    if one.counted is not None and output.shape[:2] == one.counted.shape:
                        output = output[one.counted.to(output.device)]
                    found[call + name] = output
                for name, value in arguments.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{call}{name}{AFTER}"] = value
            return found | _gradients(model, found) if self.learns else found


def _gradients(model: Any, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of weighted sums of the outputs, in the layout of the checkpoint; the outputs are detached."""
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
def without_memory(model: nn.Module) -> Iterator[None]:
    """Some models keep what they computed of one call for the next: afterwards they have what they had before."""
    # Dicts in place and one level deep: hooks that a call installs go together with the flag that says they are there.
    held: list[dict[str, Any]] = [vars(module) for module in model.modules()]
    held += [value for each in held for value in each.values() if type(value) in (dict, OrderedDict)]
    before = [(each, dict(each)) for each in held]
    try:
        yield
    finally:
        for changed, content in before:
            changed.clear()
            changed.update(content)


def fitted(arguments: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A copy, for models that write into what they are given: on the device of the model's weights, and of their type
    where a model is in half precision."""
    weight = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    device = device_of(model)
    return {
        name: value.clone().to(device, weight.dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }


def device_of(model: nn.Module) -> torch.device:
    """Where its inputs go: where its first weight is that isn't offloaded."""
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))


def parameters_of(model: Any, method: str = "forward") -> dict[str, inspect.Parameter]:
    """The parameters of a method by name, `self` left out."""
    return dict(inspect.signature(getattr(model, method)).parameters)


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False) -> Iterator[None]:
    """Within, each hook is called after its module, with the module, its arguments and its output, or before it."""
    if before:
        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    else:
        handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def noting_calls(model: nn.Module, reached: set[str]) -> Iterator[None]:
    """Add the paths of the modules that are called, and of those that they are in, under each of their names."""

    def note(path: str, *_: object) -> None:
        if path not in reached:
            reached.update(accumulate(path.split("."), "{}.{}".format), [""])

    modules = model.named_modules(remove_duplicate=False)
    with hooked((module, partial(note, path)) for path, module in modules):
        yield


# --- tensors, and how far they are from others


def floating_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in nested dicts, lists and tuples, such as the output of a model."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The same by name, `hidden_states.0` for one; of a cache how many tokens it holds."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield name or "the output", value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Cache):
        with suppress(Exception):  # not every cache counts tokens
            yield f"the tokens in {name}", torch.tensor(float(value.get_seq_length()))


class Difference(NamedTuple):
    """How far tensors are from others: the one that is furthest, as the largest over its elements."""

    absolute: float
    relative: float
    scale: float  # the largest magnitude in the reference
    where: str = ""  # which tensor it is, or what is another thing altogether

    @property
    def share(self) -> float:
        """Of the reference's magnitude, or of 1 where that is smaller."""
        return self.absolute / max(1.0, self.scale)

    def within(self, tolerance: float) -> bool:
        """Whether it is no more than `tolerance` of the reference's magnitude, or of 1 where that is smaller."""
        return self.share <= tolerance  # false for nan


def difference(ours: Iterable[torch.Tensor], reference: Iterable[torch.Tensor]) -> Difference:
    """The difference of two lists of tensors; infinite where their number, a shape or a type isn't the same.

    >>> difference([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 2.0])]).absolute
    0.5
    """
    return differences(*({str(number): each for number, each in enumerate(some)} for some in (ours, reference)))


def differences(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> Difference:
    """The same for tensors by name.

    >>> differences({"logits": torch.tensor([1.0, 2.5])}, {"logits": torch.tensor([1.0, 2.0])})
    Difference(absolute=0.5, relative=0.25, scale=2.0, where='logits')

    A value that isn't finite is equal to the same value at the same place only: it is what stock has there.
    """
    worst: Difference | None = None
    for name in {**reference, **ours}:  # in the order of stock
        mine, theirs = ours.get(name), reference.get(name)
        if mine is None or theirs is None:
            return Difference(math.inf, math.inf, 0.0, f"{name} is {'missing' if mine is None else 'not in stock'}")
        kinds = [f"{each.dtype} of the shape {tuple(each.shape)}" for each in (mine, theirs)]
        if kinds[0] != kinds[1]:
            return Difference(math.inf, math.inf, 0.0, f"{name} is {kinds[0]} where stock has {kinds[1]}")
        found = _difference(mine, theirs)._replace(where=name)
        worst = found if worst is None or found.share > worst.share else worst
    return worst or Difference(0.0, 0.0, 0.0)


def _difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    if not one.numel():
        return Difference(0.0, 0.0, 0.0)
    one, other = (each.detach() if each.dtype is torch.float32 else each.detach().double() for each in (one, other))
    one = one.to(other.device, other.dtype)
    absolute, scale = (max(abs(float(bound)) for bound in torch.aminmax(each)) for each in (one - other, other))
    if not math.isfinite(absolute + scale):
        same = (one == other) | (one.isnan() & other.isnan())
        gap = torch.where(same, 0.0, (one - other).abs())
        finite = other[other.isfinite()]
        absolute = math.inf if gap.isnan().any() else float(gap.max())
        scale = float(finite.abs().max()) if finite.numel() else 0.0
    return Difference(absolute, absolute / scale if scale else math.inf if absolute else 0.0, scale)
