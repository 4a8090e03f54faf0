"""Building replacements on the meta device.

The semantics are those of accelerate's `init_empty_weights`: parameters are on meta, buffers are real. accelerate
rebinds `nn.Module.register_parameter` for the whole process; torch's registration hook does it here for one thread.
What `__init__` computes from a parameter has no value then, which is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from patcher.compat.attributes import attributes, tensors_in
from patcher.compat.modeling_code import is_modeling_module
from patcher.compat.models import DisableTorchFunction, named_modules, named_parameters
from patcher.construction.in_force import construction_around
from patcher.errors import PatchConstructionError


class NoValues(TorchFunctionMode):
    """Skips the initialization of meta tensors, a no-op for which torch takes a tenth of a millisecond per layer.

    >>> with torch.device("meta"), NoValues():
    ...     layer = nn.Linear(2, 3)
    """

    _SKIPPED = frozenset(
        {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._SKIPPED:
            tensor = args[0] if args else kwargs["tensor"]
            with DisableTorchFunction():  # kaiming_uniform_ of a vector has to raise
                is_skipped = tensor.is_meta and (tensor.dim() > 1 or func is not nn.init.kaiming_uniform_)
            if is_skipped:
                return tensor
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class MetaInit(NoValues):
    """Moves the parameters of a replacement to meta while it is built, if the model is built there.

    A copy of each parameter is registered, as the parameter may be used elsewhere too.

    As a function mode it raises for operations on real and meta tensors together, of which torch computes some with
    wrong results: the product of a real and a meta matrix is uninitialized memory.

    Args:
        to_meta: whether the model is built on meta; true anyway if that is the default device.
        moved: the indices of the parameters to move, in the order of registration; by default all.
    """

    def __init__(self, *, to_meta: bool = False, moved: Container[int] = range(sys.maxsize)) -> None:
        super().__init__()
        self.to_meta = to_meta
        #: errors of operations that needed the value of a meta tensor
        self.wanting: list[BaseException] = []
        self._moved = moved
        self._count = 0
        #: parameter -> the registered parameter and its index; weak, so that one which was moved is freed at once
        self._registered: Any = WeakIdKeyDictionary()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Put parameters on meta inside the block, and nothing else."""
        # transformers builds everything under `torch.device("meta")`; buffers have to be real.
        self.to_meta = self.to_meta or torch.empty(0).is_meta
        if not self.to_meta:
            yield
            return
        _active.add(self)
        try:
            with self:
                yield
        finally:
            _active.discard(self)

    def register(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return what to register in place of a parameter, None for the parameter itself."""
        if parameter not in self._registered:
            registered, index = parameter, self._count
            self._count += 1
            # `torch.device` as a context is a mode that is called for each attribute of a tensor.
            with DisableTorchFunction() if type(parameter) is nn.Parameter else nullcontext():
                if not parameter.is_meta and index in self._moved:
                    registered = like(parameter, parameter.data.to("meta"))
            self._registered[parameter] = self._registered[registered] = registered, index
        registered, _ = self._registered[parameter]
        return None if registered is parameter else registered

    def numbers(self, module: nn.Module) -> dict[str, int]:
        """Return name -> index of the parameters that were registered."""
        named = [(name, parameter) for name, parameter in named_parameters(module) if parameter in self._registered]
        return {name: self._registered[parameter][1] for name, parameter in named}

    def check_values(self, module: nn.Module) -> None:
        """Check that no buffer or attribute of a replacement depends on the value of a parameter.

        Modules of transformers and torch inside of it are excepted, as these fill in their own buffers.

        Raises:
            PatchConstructionError: if a buffer, or a tensor in a plain attribute, has no value.
        """
        parts = {id(part): part for _, part in named_modules(module)}
        for part in parts.values():
            cls = type(part)
            if is_modeling_module(cls.__module__) or cls.__module__.startswith("torch."):
                continue
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    raise without_value(cls, f"the buffer {name!r}")
            for name, value in attributes(part):
                if name.startswith("_flat_weight"):  # of `nn.RNNBase`, which updates it when a weight is set
                    continue
                tensors = tensors_in(value, lambda other: id(other) in parts)
                if any(self._registered.get(tensor, (tensor,))[0].is_meta for tensor in tensors):
                    raise without_value(cls, f"the attribute {name!r}")

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        with DisableTorchFunction():
            tensors = list(_tensors((*args, *kwargs.values())))
            is_meta = any(tensor.is_meta for tensor in tensors)
            if not is_meta and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors):
                return func(*args, **kwargs)  # on the CPU: outer modes have another device
        if not is_meta:
            with torch.device("cpu"):
                return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
            written = args[:1] if func is torch.Tensor.__setitem__ else ()
            with DisableTorchFunction():
                if any(not tensor.is_meta for tensor in _tensors((result, *written))):
                    raise RuntimeError(f"{func.__name__} of real tensors and of tensors on the meta device")
        except Exception as error:
            self.wanting.append(error)
            raise
        return result


#: Those in force in any thread: if there are none, the hook returns at once.
_active: set[MetaInit] = set()


def watch_parameters() -> RemovableHandle:
    """Register torch's hook, which does nothing in threads that build no replacement."""
    return register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    construction = construction_around() if _active and parameter is not None else None
    if construction is None or construction.meta_init not in _active:
        return None
    return construction.meta_init.register(parameter)


def without_value(replacement: type[nn.Module], what: str) -> PatchConstructionError:
    """Return the error for an `__init__` that needs the value of a parameter."""
    return PatchConstructionError(
        f"{replacement.__qualname__}.__init__ derives {what} from a parameter. While a model is loaded, or only its "
        "names and shapes are wanted, parameters are on the meta device, without values: compute it in forward. What "
        "depends on a shape alone is made from that: torch.zeros(weight.shape), not torch.zeros_like(weight)."
    )


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter of the same type, attributes and `requires_grad` with other data."""
    if type(parameter) is not nn.Parameter:
        return type(parameter)(data, requires_grad=parameter.requires_grad, **parameter.__dict__)
    result = nn.Parameter(data, requires_grad=parameter.requires_grad)
    result.__dict__.update(parameter.__dict__)
    return result
