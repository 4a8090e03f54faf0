"""Building replacements on the meta device, and giving them the values that no checkpoint holds.

The semantics are those of accelerate's meta-device init: parameters are on meta, buffers are real. accelerate gets
there by rebinding `nn.Module.register_parameter` for the whole process; here torch's registration hook, which looks at
a context variable, does it for one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from patcher.compat.models import DisableTorchFunction, inherit_loading_attributes
from patcher.errors import PatchConstructionError, PatcherError

_CURRENT: ContextVar[MetaInit | None] = ContextVar("patcher_meta_init", default=None)

#: On a parameter of a replacement: the how-manieth it was that the replacement registered.
_INDEX = "_patcher_index"
_TWIN = "_patcher_twin"


def parameter_index(parameter: torch.Tensor) -> int | None:
    """The place of a parameter in the order in which its replacement registered them."""
    return getattr(parameter, _INDEX, None)


def forget_index(parameter: torch.Tensor) -> None:
    """Take the mark away."""
    parameter.__dict__.pop(_INDEX, None)


class MetaInit:
    """Where the parameters of a replacement go while it is built.

    They are numbered in the order in which they are registered. Where the model is built on meta they go there; with
    `wanted`, all but the wanted ones do.
    """

    def __init__(self, wanted: Iterable[int] | None = None, *, buffers_too: bool = False) -> None:
        self.wanted = frozenset(wanted or ())
        self._to_meta = wanted is not None
        self.kept: dict[int, nn.Parameter] = {}
        self._count = 0
        self._buffers_too = buffers_too

    @staticmethod
    def current(*, buffers_too: bool = False) -> MetaInit:
        """The one under way, or a new one, which may leave buffers on meta as well where the model is built there."""
        return _CURRENT.get() or MetaInit(buffers_too=buffers_too)

    def construct(
        self, module: nn.Module, original: type[nn.Module], replacement: type[nn.Module], args: Any, kwargs: Any
    ) -> None:
        """Turn `module`, a bare object of `original`, into an initialised object of `replacement`.

        Raises:
            PatchConstructionError: `replacement` raised, or its objects have another layout in memory.
        """
        try:
            with self._in_force():
                _initialise(module, original, replacement, args, kwargs)
        except PatcherError:
            raise
        except Exception as error:
            arguments = [_short(value) for value in args] + [f"{key}={_short(kwargs[key])}" for key in kwargs]
            raise PatchConstructionError(
                f"{replacement.__qualname__} could not be built in place of {original.__qualname__}"
                f"{_where(error.__traceback__)}: {type(error).__name__}: {error}\n"
                f"It was called as {replacement.__qualname__}({', '.join(arguments)}). A replacement is built from "
                f"the very arguments of {original.__qualname__}.__init__: take them all, or accept **kwargs."
            ) from error

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        if _CURRENT.get() is not None:  # inside of another replacement, which has seen to it
            yield
            return
        # On the stock path everything is built under `torch.device("meta")`: there buffers must be made real.
        self._to_meta = self._to_meta or torch.empty(0).device.type == "meta"
        token = _CURRENT.set(self)
        try:
            with torch.device("cpu") if self._to_meta and not self._buffers_too else nullcontext():
                yield
        finally:
            _CURRENT.reset(token)

    def register(self, parameter: nn.Parameter) -> nn.Parameter | None:
        twin: nn.Parameter | None = getattr(parameter, _TWIN, None)
        if twin is not None:
            return twin
        if parameter.device.type == "meta" or getattr(parameter, _INDEX, None) is not None:
            return None  # registered before, under another name
        index = self._count
        self._count += 1
        if not self._to_meta or index in self.wanted:
            setattr(parameter, _INDEX, index)
            if index in self.wanted:
                self.kept[index] = parameter
            return None
        # The device that is put in force is a mode that every look at a tensor would pass through.
        with DisableTorchFunction() if type(parameter) is nn.Parameter else nullcontext():
            twin = like(parameter, parameter.data.to("meta"))
        setattr(twin, _INDEX, index)
        setattr(parameter, _TWIN, twin)
        return twin


def like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """The parameter with other data: its type, its attributes, and whether it is trained."""
    attributes = {key: value for key, value in parameter.__dict__.items() if key not in (_TWIN, _INDEX)}
    if type(parameter) is nn.Parameter:
        twin = nn.Parameter(data, requires_grad=parameter.requires_grad)
        twin.__dict__.update(attributes)
        return twin
    return type(parameter)(data, requires_grad=parameter.requires_grad, **attributes)


def _initialise(
    module: nn.Module, original: type[nn.Module], replacement: type[nn.Module], args: Any, kwargs: Any
) -> None:
    if type(replacement).__call__ is not type.__call__:
        # The metaclass has a say in how objects come into being: let it, then be what it made.
        if issubclass(replacement, PreTrainedModel):
            raise TypeError(
                f"{type(replacement).__name__}, the metaclass of a model, has a __call__ of its own: the model is "
                "known before that has returned. Move what it does into __init__."
            )
        _become(module, replacement(*args, **kwargs))
        return
    if replacement.__new__ is original.__new__:
        module.__class__ = replacement
    else:
        _become(module, replacement.__new__(replacement, *args, **kwargs))
        if not isinstance(module, replacement):
            return  # as Python has it: what is made of another class is not initialised
    inherit_loading_attributes(module, original)
    module.__init__(*args, **kwargs)  # type: ignore[misc]


def _become(module: nn.Module, other: nn.Module) -> None:
    """Be another object in all but identity: whoever builds `module` holds on to it."""
    attributes = module.__dict__
    module.__class__ = type(other)
    object.__setattr__(module, "__dict__", other.__dict__)
    for name, value in attributes.items():  # what is known about `module`
        module.__dict__.setdefault(name, value)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, bool | int | float | str | None) else f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def _where(traceback: TracebackType | None) -> str:
    """The line of modeling code that asked for the object: the frame outside of this package."""
    frame = traceback.tb_frame if traceback is not None else None
    package = str(Path(__file__).parent.parent)
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    if frame is None:
        return ""
    owner = frame.f_locals.get("self")
    inside = f" of {type(owner).__name__}" if isinstance(owner, nn.Module) else ""
    return f", in {frame.f_code.co_name}{inside} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


_handle: Any = None


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    meta_init = _CURRENT.get()
    return None if meta_init is None or parameter is None else meta_init.register(parameter)


def watch_parameters() -> None:
    """Put torch's registration hook in place; for threads that build no replacement it does nothing."""
    global _handle
    _handle = register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]


def unwatch_parameters() -> None:
    """Take the hook away."""
    global _handle
    _handle.remove()
    _handle = None
