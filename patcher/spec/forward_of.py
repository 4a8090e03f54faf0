"""`patcher.forward_of(Layer)`: the original class with the forward of a layer that has no `__init__`.

Layers of the `kernels` package are such: their `forward` reads the attributes of the original module.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.layouts.carried import RECIPE, reduce_by_recipe
from patcher.source.reading import signature_of

#: Attributes of a layer beside its forward.
FLAGS = ("has_backward", "can_torch_compile")


@dataclass(frozen=True, repr=False)
class ForwardOf:
    """A value of a `class_mapping` or `module_mapping`, returned by `patcher.forward_of`."""

    layer: type[nn.Module]

    def __repr__(self) -> str:
        return f"forward_of({self.layer.__qualname__})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", repr(self))  # for messages about replacement classes

    def on(self, original: type[nn.Module]) -> type[nn.Module]:
        """Return the class that is built in place of the original: a subclass of the same name."""
        return _made(original, self.layer)


def forward_of(layer: Any) -> ForwardOf:
    """Make a replacement that is the original class with the forward of a layer.

    >>> import torch
    >>> from patcher import Patcher, forward_of
    >>> class FastNorm(torch.nn.Module):
    ...     def forward(self, hidden_states):
    ...         return torch.nn.functional.rms_norm(
    ...             hidden_states, self.weight.shape, self.weight, self.variance_epsilon
    ...         )
    >>> Patcher({"LlamaRMSNorm": forward_of(FastNorm)})
    Patcher(class_mapping={'LlamaRMSNorm': forward_of(FastNorm)})

    All else is the original's: its constructor, parameters, buffers and other methods. Building the model raises if
    the forward reads an attribute of `self` that the original lacks. With `has_backward = False` training raises, with
    `can_torch_compile = False` compiling does.

    Args:
        layer: a module class with a `forward` and nothing else, no `__init__`, other methods or `super()`; or an
            object that loads one, as a `LayerRepository` of `kernels`.

    Raises:
        InvalidPatcherError: if the layer is anything else, for which a replacement class has to be written.
    """
    layer = layer if isinstance(layer, type) or not hasattr(layer, "load") else layer.load()
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise InvalidPatcherError(f"forward_of takes a class of modules, found {layer!r}; write forward_of(Layer).")
    members = {name for cls in layer.__mro__[: layer.__mro__.index(nn.Module)] for name in vars(cls)}
    more = sorted(name for name in members - {*FLAGS, "forward"} if name == "__init__" or not name.startswith("__"))
    forward: Any = layer.forward
    is_plain = isinstance(forward, types.FunctionType) and "__class__" not in forward.__code__.co_freevars
    if more or not is_plain or forward is nn.Module.forward:
        reason = f"{', '.join(more)} besides its forward" if more else "no forward that is a function without super()"
        raise InvalidPatcherError(
            f"forward_of: {layer.__qualname__} has {reason}, and the original gets nothing but that; give the class "
            "itself as the replacement, derived from what it replaces."
        )
    return ForwardOf(layer)


def shown_name(cls: type[nn.Module]) -> str:
    """Return the name of a replacement class for reports."""
    function, *arguments = vars(cls).get(RECIPE, (None,))
    return repr(ForwardOf(arguments[1])) if function is _made else cls.__qualname__


#: (original, layer) -> the class of both, as long as it is used
_classes: weakref.WeakValueDictionary[tuple[type, type], type[nn.Module]] = weakref.WeakValueDictionary()


class _Absent:
    """Hides an attribute of a base class: the kernel that the original would choose."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError("kernel_layer_name: the forward was chosen by patcher.forward_of")


def _made(original: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:  # pickles refer to it
    if (cls := _classes.get((original, layer))) is not None:
        return cls
    new, old = (signature_of(cls.forward) for cls in (layer, original))
    if [param.kind for param in new.parameters.values()] != [param.kind for param in old.parameters.values()]:
        raise PatchConstructionError(
            f"{layer.__qualname__}.forward{new} has other parameters than {original.__qualname__}.forward{old}, in "
            "whose place it is to run. Give it the parameters of that one."
        )
    read = dict.fromkeys(_attributes_read(cast(Any, layer.forward)))
    required = [name for name in read if name != "training" and not hasattr(nn.Module, name)]

    @functools.wraps(original.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original.__init__(self, *args, **kwargs)
        if missing := [name for name in required if not hasattr(self, name)]:
            raise PatchConstructionError(
                f"{layer.__qualname__}.forward reads self.{', self.'.join(missing)}, and {original.__qualname__} has "
                f"no such attribute. Have it read what the original has, or replace the class by one of your own."
            )

    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")} | {
        "__init__": __init__,
        "__reduce_ex__": reduce_by_recipe,
        "forward": _guarded(layer, f"{layer.__qualname__}, in place of {original.__qualname__}.forward,"),
        "kernel_layer_name": _Absent(),
        RECIPE: (_made, original, layer),
    }
    metaclass: Any = type(original)
    _classes[original, layer] = cls = metaclass(original.__name__, (original,), body)
    return cast("type[nn.Module]", cls)


def _attributes_read(function: types.FunctionType) -> Iterator[str]:
    """Yield the attributes of its first parameter that a method reads, other than by `getattr`."""
    code, before = function.__code__, None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before == code.co_varnames[0]:
            yield instruction.argval
        loaded = instruction.argval if "LOAD_FAST" in instruction.opname else None
        before = loaded[-1] if isinstance(loaded, tuple) else loaded  # two from Python 3.13 on


def _guarded(layer: type[nn.Module], who: str) -> Any:
    """Return the forward of a layer, which raises for what its flags exclude."""
    forward: Any = layer.forward
    has_backward, can_compile = (getattr(layer, flag, True) for flag in FLAGS)
    if has_backward and can_compile:
        return forward
    no_backward = (
        f"{who} has no backward pass (has_backward = False): it can't train. For inference call model.eval(); for "
        "gradients load the model without it."
    )

    def refuse_to_compile() -> None:
        raise RuntimeError(f"{who} can't be compiled (can_torch_compile = False): don't compile the model.")

    # Dynamo calls such a function while it traces.
    while_traced = cast(Any, torch.compiler.assume_constant_result)(refuse_to_compile)

    @functools.wraps(forward)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not can_compile and torch.compiler.is_compiling():
            while_traced()
        if has_backward or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if self.training:
            raise RuntimeError(no_backward)
        tensors = [value for value in (*args, *kwargs.values(), *self.parameters()) if isinstance(value, torch.Tensor)]
        return cast(Any, _WithoutBackward).apply(no_backward, lambda: forward(self, *args, **kwargs), *tensors)

    return guarded


class _WithoutBackward(torch.autograd.Function):
    """Makes backward through a function that records no graph an error instead of a missing gradient."""

    @staticmethod
    def forward(ctx: Any, message: str, compute: Any, *inputs: torch.Tensor) -> Any:
        ctx.message = message
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(ctx.message)
