"""One run of a model, and what it gives: the same on every model that it is run on."""

from __future__ import annotations

import inspect
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from patcher.compat.models import named_parameters
from patcher.loading.saving import saved_state_dict
from patcher.verification.numerics import named_tensors

#: What the names of gradients begin with in the results of a pass.
GRADIENT = "the gradient of "


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Within, torch, numpy and `random` draw what the seed gives; afterwards they go on as if nothing was drawn."""
    python, array = random.getstate(), numpy.random.get_state()
    alive: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count() if alive else 0)
    try:
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(
                seed
            )  # `torch.manual_seed` formats a stack for devices that aren't there
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
        after = " after the call"
        return [value for name, value in self.results(model, seed).items() if not name.endswith(after)]

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
                    found[call + name] = _counted(output, one.counted)
                for name, value in arguments.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{call}{name} after the call"] = value
            return found | _gradients(model, found) if self.learns else found


def _counted(output: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None or output.shape[:2] != mask.shape:
        return output
    return output[mask.to(output.device)]


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
    kinds = (dict, OrderedDict)
    before = [
        (module, dict(vars(module)), [(each, dict(each)) for each in vars(module).values() if type(each) in kinds])
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            for changed, content in [*contents, (vars(module), attributes)]:
                changed.clear()
                changed.update(content)


def fitted(arguments: dict[str, Any], model: nn.Module) -> dict[str, Any]:
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
