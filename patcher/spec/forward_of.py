"""`patcher.forward_of(Layer)`: the class that is replaced, with the forward of a layer without an `__init__`.

That is how layers of the `kernels` package are written: a class whose `forward` reads the parameters and attributes of
whatever module it is put on.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.layouts.carried import RECIPE

#: What a layer says of itself, beside its forward.
FLAGS = ("has_backward", "can_torch_compile")


@dataclass(frozen=True, repr=False)
class ForwardOf:
    """A value of a `class_mapping` or `module_mapping`; made by `patcher.forward_of`."""

    layer: type[nn.Module]

    def __repr__(self) -> str:
        return f"forward_of({self.layer.__qualname__})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", repr(self))  # what messages call it, as they do a class

    def on(self, original: type[nn.Module]) -> type[nn.Module]:
        """The class that is built in place of one: a subclass of it, of its name.

        Raises:
            PatchConstructionError: the forward can't be called as that of the original.
        """
        return _made(original, self.layer)


class Loads(Protocol):
    """A repository of the `kernels` package."""

    def load(self) -> type[nn.Module]: ...


def forward_of(layer: type[nn.Module] | Loads) -> ForwardOf:
    """A replacement that is the original class, with the forward of a layer.

    >>> import torch
    >>> from patcher import Patcher, forward_of
    >>> class FastNorm(torch.nn.Module):
    ...     def forward(self, hidden_states):
    ...         return torch.nn.functional.rms_norm(
    ...             hidden_states, self.weight.shape, self.weight, self.variance_epsilon
    ...         )
    >>> Patcher({"LlamaRMSNorm": forward_of(FastNorm)})
    Patcher(class_mapping={'LlamaRMSNorm': forward_of(FastNorm)})

    Everything else stays the original's: how it is constructed, its parameters and buffers, its other methods. What
    the forward reads of `self` and the original doesn't have is an error when the model is built. A layer that says
    `has_backward = False` refuses training, one that says `can_torch_compile = False` refuses `torch.compile`.

    Args:
        layer: a layer, or what loads one, such as `kernels.LayerRepository` or `kernels.LocalLayerRepository`. That
            is a class of modules with a `forward`, and with nothing else that the forward could need: no `__init__`,
            no other methods, no `super()`. For what doesn't fit write a replacement class.

    Raises:
        InvalidPatcherError: the layer is something else.
    """
    layer = layer if isinstance(layer, type) or not hasattr(layer, "load") else layer.load()
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise InvalidPatcherError(f"forward_of takes a class of modules, found {layer!r}; write forward_of(Layer).")
    own = layer.__mro__[: layer.__mro__.index(nn.Module)]
    members = {member for cls in own for member in vars(cls)} - {*FLAGS} - {"forward"}
    members = {member for member in members if not (member.startswith("__") and member.endswith("__"))}
    if layer.forward is nn.Module.forward:
        reason = "has no forward"
    elif layer.__init__ is not nn.Module.__init__:
        reason = "has an __init__ of its own, which would not run"
    elif members:
        reason = f"has {', '.join(sorted(members))} besides its forward, which the original would not have"
    elif not isinstance(layer.forward, types.FunctionType) or "__class__" in layer.forward.__code__.co_freevars:
        reason = "has a forward that is not a plain function without super(), which has another meaning there"
    else:
        return ForwardOf(layer)
    raise InvalidPatcherError(
        f"forward_of: {layer.__qualname__} {reason}; give the class itself as the replacement, derived from what it "
        "replaces."
    )


class _Made(type):
    """The class of classes with another forward: they are pickled by how they are made."""


copyreg.pickle(_Made, lambda cls: (vars(cls)[RECIPE][0], vars(cls)[RECIPE][1:]))


def shown_name(cls: type[nn.Module]) -> str:
    """What reports call the class of a replacement."""
    return repr(ForwardOf(vars(cls)[RECIPE][2])) if isinstance(cls, _Made) else cls.__qualname__


#: (original, layer) -> the class that was made of them, as long as it is used
_classes: weakref.WeakValueDictionary[tuple[type, type], type[nn.Module]] = weakref.WeakValueDictionary()


class _Absent:
    """An attribute that a base has and the class itself doesn't: which kernel the original would choose."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError("kernel_layer_name: the forward was chosen by patcher.forward_of")


def _made(original: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    if (made := _classes.get((original, layer))) is not None:
        return made
    if type(original) is not type:
        raise PatchConstructionError(
            f"{original.__qualname__} has a metaclass, {type(original).__qualname__}, so forward_of("
            f"{layer.__qualname__}) can't derive a class from it: write one."
        )
    kinds = ([each.kind for each in inspect.signature(cls.forward).parameters.values()] for cls in (layer, original))
    if len({tuple(each) for each in kinds}) > 1:
        raise PatchConstructionError(
            f"{layer.__qualname__}.forward{inspect.signature(layer.forward)} can't be called as "
            f"{original.__qualname__}.forward{inspect.signature(original.forward)}, in whose place it is to run. Give "
            "it the parameters of that one."
        )
    forward: Any = layer.forward
    needed = [name for name in dict.fromkeys(_read(forward)) if not hasattr(nn.Module, name)]

    @functools.wraps(original.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original.__init__(self, *args, **kwargs)
        missing = [name for name in needed if name != "training" and not hasattr(self, name)]
        if missing:
            raise PatchConstructionError(
                f"{layer.__qualname__}.forward reads self.{', self.'.join(missing)}, and {original.__qualname__} has "
                f"no such attribute. Have it read what the original has, or replace the class by one of your own."
            )

    cls: Any = _Made(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__init__": __init__,
            "forward": _guarded(layer, f"{layer.__qualname__}, in place of {original.__qualname__}.forward,"),
            "kernel_layer_name": _Absent(),
            RECIPE: (_made, original, layer),
        },
    )
    _classes[original, layer] = cls
    return cls  # type: ignore[no-any-return]


def _read(function: types.FunctionType) -> Iterator[str]:
    """The attributes of its first parameter that a method reads; what it gets by `getattr` is its own affair."""
    code, before = function.__code__, None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before == code.co_varnames[0]:
            yield instruction.argval
        loaded = instruction.argval if "LOAD_FAST" in instruction.opname else None
        before = loaded[-1] if isinstance(loaded, tuple) else loaded  # from Python 3.13 on some load two


def _guarded(layer: type[nn.Module], who: str) -> Callable[..., Any]:
    """The forward of a layer, that refuses what the layer says it can't."""
    forward: Callable[..., Any] = layer.forward
    has_backward = getattr(layer, "has_backward", True)
    can_compile = getattr(layer, "can_torch_compile", True)
    if has_backward and can_compile:
        return forward

    def refuse() -> None:
        raise RuntimeError(f"{who} can't be compiled (can_torch_compile = False): don't compile the model.")

    without_backward: Any = _WithoutBackward.apply
    at_compile_time: Any = torch.compiler.assume_constant_result  # what it returns runs while a forward is traced
    refuse = at_compile_time(refuse)

    @functools.wraps(forward)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not can_compile and torch.compiler.is_compiling():
            refuse()
        if has_backward or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if self.training:
            raise RuntimeError(
                f"{who} has no backward pass (has_backward = False): it can't train. Call model.eval(), or load the "
                "model without it."
            )
        with torch.no_grad():
            result = forward(self, *args, **kwargs)
        inputs = [each for each in (*args, *kwargs.values(), *self.parameters()) if isinstance(each, torch.Tensor)]
        source = next((each for each in inputs if each.requires_grad), None)
        if source is None:
            return result
        if isinstance(result, torch.Tensor):
            return without_backward(who, source, result)
        return tuple(without_backward(who, source, each) for each in result)

    return guarded


class _WithoutBackward(torch.autograd.Function):
    """What was computed without a graph, in a graph: going back through it is an error, not a missing gradient."""

    @staticmethod
    def forward(ctx: Any, who: str, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        ctx.who = who
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"{ctx.who} has no backward pass (has_backward = False): it can't train.")
