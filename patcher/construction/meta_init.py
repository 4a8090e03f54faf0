"""Building replacements on the meta device.

The semantics are those of accelerate's meta-device init: parameters are on meta, buffers are real. accelerate gets
there by rebinding `nn.Module.register_parameter` for the whole process; here torch's registration hook, which looks at
a context variable, does it for one thread. What `__init__` computes from a parameter has no value then: it is refused.
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

from patcher.compat.held import attributes, tensors_in
from patcher.compat.modeling_code import is_modeling_module
from patcher.compat.models import DisableTorchFunction, named_modules, named_parameters
from patcher.construction.in_force import construction_around
from patcher.errors import PatchConstructionError


class NoValues(TorchFunctionMode):
    """Leaves out the initialisation of tensors on the meta device, which have no values.

    >>> with torch.device("meta"), NoValues():
    ...     layer = nn.Linear(2, 3)

    For each layer it takes torch a tenth of a millisecond to do nothing.
    """

    _LEFT_OUT = frozenset(
        {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._LEFT_OUT:
            tensor = args[0] if args else kwargs["tensor"]
            with DisableTorchFunction():
                is_without = tensor.is_meta and (tensor.dim() > 1 or func is not nn.init.kaiming_uniform_)  # it raises
            if is_without:
                return tensor
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class MetaInit(NoValues):
    """Where the parameters of a replacement go while it is built: to meta, if the model is built there.

    They are numbered in the order in which they are registered. Another parameter is registered in the place of each,
    for the one that `__init__` has made may be somebody else's as well.

    As a mode it refuses what torch computes without a value: a product of a real matrix with one on meta is
    uninitialised memory, and what is added to a real tensor is left out.

    Args:
        to_meta: whether the model is built on meta; where it is now, it is.
        moved: the numbers of those that are moved, by default all.
    """

    def __init__(self, *, to_meta: bool = False, moved: Container[int] = range(sys.maxsize)) -> None:
        super().__init__()
        self.to_meta = to_meta
        #: what torch raised for want of a value
        self.wanting: list[BaseException] = []
        self._moved = moved
        self._count = 0
        #: parameter -> what is registered, and its number; not on the parameters, which may be somebody else's
        self._known: Any = WeakIdKeyDictionary()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """See to it that what has no value is on meta inside the block, and nothing else."""
        # On the stock path everything is built under `torch.device("meta")`: there buffers must be made real.
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
        """What is registered in the place of a parameter, None for the parameter itself."""
        if parameter not in self._known:
            registered, number = parameter, self._count
            self._count += 1
            # The device that is put in force is a mode that every look at a tensor would pass through.
            with DisableTorchFunction() if type(parameter) is nn.Parameter else nullcontext():
                if not parameter.is_meta and number in self._moved:
                    registered = like(parameter, parameter.data.to("meta"))
            self._known[parameter] = self._known[registered] = registered, number
        registered, _ = self._known[parameter]
        return None if registered is parameter else registered

    def numbers(self, module: nn.Module) -> dict[str, int]:
        """The names of the parameters that were registered, and the places in which they were."""
        found = ((name, self._known.get(parameter)) for name, parameter in named_parameters(module))
        return {name: known[1] for name, known in found if known is not None}

    def check_values(self, module: nn.Module) -> None:
        """Raise for what a replacement that was built on meta has computed from a parameter.

        Of modules of transformers and torch that it builds, transformers and torch fill in what they compute.

        Raises:
            PatchConstructionError: a buffer, or a tensor in a plain attribute, has no value.
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
                if name.startswith("_flat_weight"):  # of `nn.RNNBase`, which sees to it when a weight is set
                    continue
                tensors = tensors_in(value, lambda each: id(each) in parts)
                if any(self._known.get(tensor, (tensor,))[0].is_meta for tensor in tensors):
                    raise without_value(cls, f"the attribute {name!r}")

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        with DisableTorchFunction():
            given = list(_tensors((*args, *kwargs.values())))
            lacks = any(tensor.is_meta for tensor in given)
            if not lacks and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in given):
                return func(*args, **kwargs)  # on the CPU, without the modes around, that have devices of their own
        if not lacks:
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


#: Those in force, in whatever thread: mostly none, and then the hook has nothing to look up.
_active: set[MetaInit] = set()


def watch_parameters() -> RemovableHandle:
    """Put torch's registration hook in place; for threads that build no replacement it does nothing."""
    return register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    construction = construction_around() if _active and parameter is not None else None
    if construction is None or construction.meta_init not in _active:
        return None
    return construction.meta_init.register(parameter)


def without_value(replacement: type[nn.Module], what: str) -> PatchConstructionError:
    """The error for what an `__init__` needs the value of a parameter for."""
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
    """The parameter with other data: its type, its attributes, and whether it is trained."""
    attributes = dict(parameter.__dict__)
    if type(parameter) is nn.Parameter:
        twin = nn.Parameter(data, requires_grad=parameter.requires_grad)
        twin.__dict__.update(attributes)
        return twin
    return type(parameter)(data, requires_grad=parameter.requires_grad, **attributes)
