"""`patcher.forward_of(Layer)`: the class that is replaced, with the forward of a layer without an `__init__`.

So are layers of the `kernels` package written: `forward` reads what the module has that it is put on.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.layouts.carried import RECIPE, reduce_by_recipe

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
        """The class that is built in place of one: a subclass of it, of its name."""
        return _made(original, self.layer)


def forward_of(layer: Any) -> ForwardOf:
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
        layer: a class of modules with a `forward`, and nothing else that it could need: no `__init__`, no other
            methods, no `super()`; or what loads one, as a `LayerRepository` of `kernels` does.

    Raises:
        InvalidPatcherError: the layer is something else, for which a replacement class has to be written.
    """
    layer = layer if isinstance(layer, type) or not hasattr(layer, "load") else layer.load()
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise InvalidPatcherError(f"forward_of takes a class of modules, found {layer!r}; write forward_of(Layer).")
    own = {member for cls in layer.__mro__[: layer.__mro__.index(nn.Module)] for member in vars(cls)}
    more = sorted(each for each in own - {*FLAGS, "forward"} if each == "__init__" or not each.startswith("__"))
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
    """What reports call the class of a replacement."""
    made, *of = vars(cls).get(RECIPE, (None,))
    return repr(ForwardOf(of[1])) if made is _made else cls.__qualname__


#: (original, layer) -> the class that was made of them, as long as it is used
_classes: weakref.WeakValueDictionary[tuple[type, type], type[nn.Module]] = weakref.WeakValueDictionary()


class _Absent:
    """An attribute that a base has and the class itself doesn't: which kernel the original would choose."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError("kernel_layer_name: the forward was chosen by patcher.forward_of")


def _made(original: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    if (made := _classes.get((original, layer))) is not None:
        return made
    new, old = (inspect.signature(cls.forward) for cls in (layer, original))
    if [each.kind for each in new.parameters.values()] != [each.kind for each in old.parameters.values()]:
        raise PatchConstructionError(
            f"{layer.__qualname__}.forward{new} can't be called as {original.__qualname__}.forward{old}, in whose "
            "place it is to run. Give it the parameters of that one."
        )
    needed = [name for name in dict.fromkeys(_read(cast(Any, layer.forward))) if not hasattr(nn.Module, name)]

    @functools.wraps(original.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original.__init__(self, *args, **kwargs)
        missing = [name for name in needed if name != "training" and not hasattr(self, name)]
        if missing:
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
    _classes[original, layer] = made = metaclass(original.__name__, (original,), body)
    return cast("type[nn.Module]", made)


def _read(function: types.FunctionType) -> Iterator[str]:
    """The attributes of its first parameter that a method reads; what it gets by `getattr` is its own affair."""
    code, before = function.__code__, None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before == code.co_varnames[0]:
            yield instruction.argval
        loaded = instruction.argval if "LOAD_FAST" in instruction.opname else None
        before = loaded[-1] if isinstance(loaded, tuple) else loaded  # from Python 3.13 on some load two


def _guarded(layer: type[nn.Module], who: str) -> Any:
    """The forward of a layer, that refuses what the layer says it can't."""
    forward: Any = layer.forward
    has_backward, can_compile = (getattr(layer, flag, True) for flag in FLAGS)
    if has_backward and can_compile:
        return forward
    no_backward = (
        f"{who} has no backward pass (has_backward = False): it can't train. Call model.eval(), or load the model "
        "without it."
    )

    def refuse_to_compile() -> None:
        raise RuntimeError(f"{who} can't be compiled (can_torch_compile = False): don't compile the model.")

    # What it makes of a function runs while a forward is traced.
    while_traced = cast(Any, torch.compiler.assume_constant_result)(refuse_to_compile)

    @functools.wraps(forward)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not can_compile and torch.compiler.is_compiling():
            while_traced()
        if has_backward or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if self.training:
            raise RuntimeError(no_backward)
        inputs = [each for each in (*args, *kwargs.values(), *self.parameters()) if isinstance(each, torch.Tensor)]
        return cast(Any, _WithoutBackward).apply(no_backward, lambda: forward(self, *args, **kwargs), *inputs)

    return guarded


class _WithoutBackward(torch.autograd.Function):
    """What is computed without a graph, in a graph: going back through it is an error, not a missing gradient."""

    @staticmethod
    def forward(ctx: Any, message: str, compute: Any, *inputs: torch.Tensor) -> Any:
        ctx.message = message
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(ctx.message)
