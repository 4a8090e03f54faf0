"""Values that no checkpoint holds: what a replacement computes, and what its `__init__` gives to new weights.

transformers puts an empty tensor in the place of every buffer that it doesn't save and initialises anew what it knows;
here what a replacement has computed is kept and put back, on the device where it belongs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_module_tensor_to_device  # type: ignore[import-untyped]
from torch import nn
from transformers import PreTrainedModel

from patcher.compat.models import (
    declare_shared,
    forget_initialized,
    get_device,
    is_initialized,
    local_torch_dtype,
    mark_initialized,
    named_parameters,
    offload,
    tied_keys,
)
from patcher.construction.construction import Built, Placed
from patcher.construction.meta_init import like
from patcher.errors import InvalidPatcherError
from patcher.expressions import Expressions
from patcher.layouts.sharded import split_like
from patcher.loading.reading.computed_values import BuiltAgain, build_again, module_at
from patcher.patterns import inside

if TYPE_CHECKING:
    from patcher.loading.load import Loaded


@dataclass(frozen=True)
class ParameterTraits:
    """What replacements have done with parameters besides giving them values; a load makes new ones of all."""

    #: the names of each parameter that has several, the first one first
    shared: tuple[tuple[str, ...], ...]
    #: what must not be trained
    frozen: frozenset[str]

    @classmethod
    def of(cls, model: PreTrainedModel, outermost: Placed) -> ParameterTraits:
        """What is to be seen in modules as they were built. Shared names are declared, so that they can be saved."""
        shared, frozen = [], set()
        tied = tied_keys(model)
        for path, built in outermost:
            names: dict[int, list[str]] = {}
            for name, parameter in named_parameters(built.module):
                names.setdefault(id(parameter), []).append(name)
                if not parameter.requires_grad and parameter.is_floating_point():
                    frozen.add(inside(path) + name)
            several = [group for group in names.values() if len(group) > 1]
            for group in several:
                keys = tuple(inside(path) + name for name in group)
                if not tied.intersection(keys):
                    shared.append(keys)
            if several:
                declare_shared(built.module, {name: group[0] for group in several for name in group[1:]})
        return cls(tuple(shared), frozenset(frozen))

    def without_aliases(self, missing: set[str], expressions: Iterable[str] = ()) -> set[str]:
        """Of a parameter with several names that one of them brings, none is missing; otherwise one is.

        That one is the first that an expression names, or else the first.
        """
        result, named = set(missing), Expressions(expressions)
        for keys in self.shared:
            result.difference_update(keys)
            if missing.issuperset(keys):
                result.add(next(filter(named.is_any_in, keys), keys[0]))
        return result

    def with_aliases(self, names: Iterable[str]) -> tuple[str, ...]:
        """The names, and after each of them the others of the same parameter."""
        groups = {key: keys for keys in self.shared for key in keys}
        return tuple(each for name in names for each in groups.get(name, (name,)))


class InitialValues:
    """The computed values of a model's replacements, taken before transformers finishes the load."""

    def __init__(self, load: Loaded) -> None:
        self.model = model = load.model
        self.rules = load.rules
        self.traits = load.traits
        self.disk_index = load.disk_index
        self.missing = set(load.info.missing_keys) | {name for name, *_ in load.info.mismatched_keys}
        # A quantizer may have put others in the place of some.
        self.replaced = [(path, built) for path, built in load.outermost if module_at(model, path) is built.module]
        self.buffers: dict[str, torch.Tensor] = {}
        #: parameters that were given to a replacement with their values, in a model that somebody else has loaded
        self.given: dict[str, nn.Parameter] = {}
        self.tied = tied_keys(model)
        self.absent = self.traits.without_aliases(self.missing) - self.tied
        for path, built in self.replaced:
            for key, buffer in _buffers(path, built.module):
                if key in self.missing or not _is_saved(model, key):
                    self.buffers[key] = buffer
                    mark_initialized(buffer)
            for key, parameter in named_parameters(built.module, path) if self.absent else ():
                if key in self.absent and parameter.device.type != "meta":
                    self.given[key] = parameter

    def put_back(self, load_config: Any) -> None:
        """After transformers has filled in what it takes for missing."""
        device_map = load_config.device_map or {"": "cpu"}
        for key, parameter in self.given.items():
            if get_device(device_map, key, valid_torch_device=True) == parameter.device:
                _set(self.model, key, parameter)  # the very object
            else:
                self._put(key, parameter, device_map, load_config.disk_offload_folder)
        for key, buffer in self.buffers.items():
            self._put_buffer(key, buffer, load_config)
        for again, absent in self._build_again(load_config.dtype):
            for key in absent:
                if (value := again.parameter(self.model, key)) is not None:
                    self._put(key, value, device_map, load_config.disk_offload_folder)
            for key, buffer in again.module.named_buffers(prefix=again.path, remove_duplicate=False):
                if (key in self.missing or not _is_saved(self.model, key)) and not again.lacks(key, buffer):
                    self._put_buffer(key, buffer.detach(), load_config)
            for keys in self.traits.shared:
                if keys[0].startswith(inside(again.path)):
                    self._share(keys)
            again.carry_attributes(self._known)
        for keys in self.traits.shared:
            self._share(keys)
        if self.traits.frozen:
            for key, parameter in self.model.named_parameters():
                if key in self.traits.frozen:
                    parameter.requires_grad_(False)
        if not set(map(str, device_map.values())) - {"cpu", "disk"}:
            return  # plain tensors were computed on the CPU, and stay there
        for path, built in self.replaced:
            for name, module in built.module.named_modules(prefix=path):
                _move_plain_tensors(module, get_device(device_map, f"{name}.", valid_torch_device=True))

    def _build_again(self, dtype: torch.dtype | None) -> Iterator[tuple[BuiltAgain, list[str]]]:
        """What `__init__` computes, of each replacement of which the load needs something."""
        for path, built in self.replaced:
            if not self.absent and not built.needs_values:
                continue
            names = [key for key, _ in named_parameters(built.module, path)]
            absent = [key for key in names if key in self.absent]
            if absent or built.needs_values:
                keys = [(inside(path) + name, number) for name, number in built.numbers.items()]
                loaded = {number: key for key, number in reversed(keys) if key not in self.missing or key in self.tied}
                with local_torch_dtype(dtype) if dtype is not None and dtype.is_floating_point else nullcontext():
                    again = build_again(self.model, self.rules, path, built, absent, loaded)
                yield again, absent

    @functools.cached_property
    def _known(self) -> dict[int, nn.Module]:
        return {id(module): module for module in self.model.modules()}

    def _put_buffer(self, key: str, value: torch.Tensor, load_config: Any) -> None:
        device_map = load_config.device_map or {"": "cpu"}
        device = get_device(device_map, key, valid_torch_device=True)
        set_module_tensor_to_device(self.model, key, device, value=value, dtype=value.dtype)
        if key in self.missing and load_config.offload_buffers:
            self._offload(key, value, device_map, load_config.disk_offload_folder)

    def _put(self, key: str, value: nn.Parameter, device_map: Any, folder: Any) -> None:
        made = value.data.to(get_device(device_map, key, valid_torch_device=True))
        value = like(value, split_like(made, self.model.get_parameter(key)))
        _set(self.model, key, value)
        self._offload(key, value.data, device_map, folder)

    def _offload(self, key: str, value: torch.Tensor, device_map: Any, folder: Any) -> None:
        """Put on the disk what the device map wants there: transformers does it with what it has read."""
        if self.disk_index is None or get_device(device_map, key) != "disk":
            return
        if folder is None:
            raise InvalidPatcherError(
                f"{key} is not in the checkpoint, and the device map puts it on the disk: say where, with "
                "offload_folder=..."
            )
        offload(value, key, folder, self.disk_index)

    def _share(self, keys: tuple[str, ...]) -> None:
        read = [key for key in keys if key not in self.missing]
        source = (read or keys)[0]
        parameter = self.model.get_parameter(source)
        for key in keys:
            if key != source and (key in self.missing or _equal(self.model.get_parameter(key), parameter)):
                _set(self.model, key, parameter)
                if self.disk_index is not None and source in self.disk_index:
                    self.disk_index[key] = self.disk_index[source]


@contextmanager
def keeping_computed(outermost: Iterable[Built]) -> Iterator[None]:
    """Keep transformers' initialisation away from the buffers that replacements have computed."""
    buffers = [buffer for built in outermost for _, buffer in _buffers("", built.module)]
    fresh = [buffer for buffer in buffers if not is_initialized(buffer)]
    for buffer in fresh:
        mark_initialized(buffer)
    try:
        yield
    finally:
        for buffer in fresh:
            forget_initialized(buffer)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device == other.device != torch.device("meta") and one.shape == other.shape and torch.equal(one, other)


def _set(model: nn.Module, key: str, parameter: nn.Parameter) -> None:
    path, _, name = key.rpartition(".")
    setattr(model.get_submodule(path), name, parameter)


def _buffers(path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, buffer in module.named_buffers(prefix=path, remove_duplicate=False):
        if buffer.device.type != "meta":
            yield key, buffer


def _is_saved(model: nn.Module, key: str) -> bool:
    path, _, name = key.rpartition(".")
    return name not in model.get_submodule(path)._non_persistent_buffers_set


def _move_plain_tensors(module: nn.Module, device: Any) -> None:
    """Move tensors that a replacement keeps as plain attributes, alone or in a list, tuple or dict."""
    for name, value in list(vars(module).items()):
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        moved = _moved(value, device)
        if moved is not value:
            module.__dict__[name] = moved


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "meta" else value.to(device)
    if type(value) in (list, tuple, dict):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        if any(isinstance(item, torch.Tensor) for item in items):
            if isinstance(value, dict):
                return {key: _moved(item, device) for key, item in value.items()}
            return type(value)(_moved(item, device) for item in value)
    return value
