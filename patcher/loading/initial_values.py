"""Values that no checkpoint holds: what a replacement computes, and what its `__init__` gives to new weights.

transformers puts an empty tensor in the place of every buffer that it doesn't save and initialises anew what it knows;
here what a replacement has computed is kept and put back, on the device where it belongs.

For new weights a replacement is built once more, after the others have been read: real where the checkpoint lacks
them, and on meta otherwise. So nothing can be computed from what a weight of the checkpoint is initialised with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_module_tensor_to_device  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.held import attributes, tensors_in
from patcher.compat.models import (
    forget_initialized,
    get_device,
    is_initialized,
    local_torch_dtype,
    mark_initialized,
    named_parameters,
    offload_weight,
    ties,
)
from patcher.construction.construction import Built, Construction, Placed
from patcher.construction.gates import building
from patcher.construction.meta_init import MetaInit, like, without_value
from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.layouts.sharded import one_piece, split_like
from patcher.loading.missing_experts import MissingExperts
from patcher.patterns import inside

if TYPE_CHECKING:
    from patcher.loading.load import Loaded


def frozen_parameters(model: PreTrainedModel, outermost: Placed) -> frozenset[str]:
    """The parameters that replacements have made not to be trained: a load makes new ones of all.

    Raises:
        PatchConstructionError: a replacement has a parameter under several names, of which a load would make several.
    """
    frozen, tied = set(), ties(model).keys()
    for path, built in outermost:
        names: dict[int, str] = {}
        for name, parameter in named_parameters(built.module, path):
            first = names.setdefault(id(parameter), name)
            if first != name and parameter.is_meta and tied.isdisjoint((first, name)):
                raise PatchConstructionError(
                    f"{built.replacement.__qualname__} has one parameter under two names, {first} and {name}, and a "
                    "load makes two of them. Register it once, and use it in both places."
                )
            if not parameter.requires_grad and parameter.is_floating_point():
                frozen.add(name)
    return frozenset(frozen)


class InitialValues:
    """The computed values of a model's replacements, taken before transformers finishes the load."""

    def __init__(self, load: Loaded) -> None:
        self.model = model = load.model
        self.model_class = load.record.model_class
        self.rules = load.rules
        self.frozen = load.frozen
        self.disk_index = load.disk_index
        self.missing = set(load.info.missing_keys) | {name for name, *_ in load.info.mismatched_keys}
        # A quantizer may have put others in the place of some.
        self.replaced = [(path, built) for path, built in load.outermost if module_at(model, path) is built.module]
        self.tied = ties(model).keys()
        self.absent = self.missing - self.tied
        self.buffers: dict[str, torch.Tensor] = {}
        #: parameters that were given to a replacement with their values, in a model that somebody else has loaded
        self.given: dict[str, nn.Parameter] = {}
        #: what the checkpoint lacks -> the innermost replacement that has it
        self.new: dict[str, tuple[str, Built]] = {}
        under = tuple(inside(path) for path, _ in self.replaced)
        drawn = {key for key in self.absent if not (under and key.startswith(under))}
        self.experts = MissingExperts.of(model, drawn) if drawn else None
        for path, built in self.replaced:
            for key, buffer in self._kept_buffers(path, built.module):
                self.buffers[key] = buffer
                mark_initialized(buffer)
        for path, built in sorted(self.replaced, key=lambda each: each[0].count(".")):
            for key, parameter in named_parameters(built.module, path) if self.absent else ():
                if key in self.absent and parameter.device.type != "meta":
                    self.given[key] = parameter
                elif key in self.absent:
                    self.new[key] = path, built

    def put_back(self, load_config: Any) -> None:
        """After transformers has filled in what it takes for missing.

        Raises:
            PatchConstructionError: what `__init__` gives to a new weight can't be known.
        """
        device_map = load_config.device_map or {"": "cpu"}
        if self.experts is not None:
            values = self.experts.values(self.model_class, self.model.config, load_config.dtype)
            for key, tensor in values.items():
                self._fill(key, tensor, device_map, load_config.disk_offload_folder)
        for key, parameter in self.given.items():
            if get_device(device_map, key, valid_torch_device=True) == parameter.device:
                _set(self.model, key, parameter)  # the very object
            else:
                self._put(key, parameter, device_map, load_config.disk_offload_folder)
        for path, built in dict.fromkeys(self.new.values()):
            module = self._built_again(path, built, load_config.dtype)
            _check_attributes(built, module)
            for key, (owner, _) in self.new.items():
                if owner == path and (value := self._initial(built, module, path, key)) is not None:
                    self._put(key, value, device_map, load_config.disk_offload_folder)
            # What is random was drawn anew, for buffers as for the weights that it may have been drawn for.
            self.buffers |= dict(self._kept_buffers(path, module))
        for key, buffer in self.buffers.items():
            self._put_buffer(key, buffer.detach(), load_config)
        for key, parameter in self.model.named_parameters() if self.frozen else ():
            if key in self.frozen:
                parameter.requires_grad_(False)
        if not set(map(str, device_map.values())) - {"cpu", "disk"}:
            return  # plain tensors were computed on the CPU, and stay there
        for path, built in self.replaced:
            for name, module in built.module.named_modules(prefix=path):
                _move_plain_tensors(module, get_device(device_map, f"{name}.", valid_torch_device=True))

    def _kept_buffers(self, path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of a replacement with values that no checkpoint brings."""
        for key, buffer in _buffers(path, module):
            if key in self.missing or not _is_saved(self.model, key):
                yield key, buffer

    def _built_again(self, path: str, built: Built, dtype: torch.dtype | None) -> nn.Module:
        """A replacement, built once more for its new weights.

        Raises:
            PatchConstructionError: it can't be.
        """
        names = [(inside(path) + name, number) for name, number in built.numbers.items()]
        brought = {number for key, number in names if key not in self.missing or key in self.tied}
        construction = Construction(self.rules, is_skeleton=True)
        default = local_torch_dtype(dtype) if dtype is not None and dtype.is_floating_point else nullcontext()
        with default, building(construction):
            return construction.build_again(built, MetaInit(to_meta=True, moved=brought))

    def _initial(self, built: Built, module: nn.Module, path: str, key: str) -> nn.Parameter | None:
        """What `__init__` has given to a new weight; None if the model has something of a quantizer in its place.

        Raises:
            PatchConstructionError: it was computed from what has no value, or `__init__` makes another one each time.
        """
        expected = self.model.get_parameter(key)
        value = dict(named_parameters(module, path)).get(key)
        if type(one_piece(expected)) not in (nn.Parameter, torch.Tensor, type(value)):
            return None
        if value is None or value.shape != expected.shape:
            raise PatchConstructionError(
                f"{built.replacement.__qualname__}.__init__ has made {key} of shape {tuple(expected.shape)}, and "
                f"{'not at all' if value is None else f'with {tuple(value.shape)}'} when it was called again "
                "with the same arguments: what it registers must follow from its arguments alone."
            )
        if value.device.type == "meta":
            raise without_value(built.replacement, key)
        return value

    def _put_buffer(self, key: str, value: torch.Tensor, load_config: Any) -> None:
        device_map = load_config.device_map or {"": "cpu"}
        device = get_device(device_map, key, valid_torch_device=True)
        set_module_tensor_to_device(self.model, key, device, value=value, dtype=value.dtype)
        if key in self.missing and load_config.offload_buffers:
            self._offload(key, value, device_map, load_config.disk_offload_folder)

    def _fill(self, key: str, value: torch.Tensor, device_map: Any, folder: Any) -> None:
        """Give a parameter, which may be tied, other values."""
        parameter = self.model.get_parameter(key)
        if type(parameter) is nn.Parameter and not parameter.is_meta and not isinstance(parameter.data, DTensor):
            parameter.data.copy_(value)
        else:
            self._put(key, nn.Parameter(value, parameter.requires_grad), device_map, folder)

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
        Path(folder).mkdir(parents=True, exist_ok=True)
        offload_weight(value, key, folder, self.disk_index)


@contextmanager
def keeping_computed(replacements: Iterable[nn.Module]) -> Iterator[None]:
    """Keep transformers' initialisation away from the buffers that replacements have computed."""
    buffers = [buffer for module in replacements for _, buffer in _buffers("", module)]
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


def _check_attributes(built: Built, module: nn.Module) -> None:
    """Raise for what belongs to the new weights of a replacement, perhaps, and has come out otherwise for them.

    Raises:
        PatchConstructionError: tensors in a plain attribute are not what they were when it was built first.
    """
    for path, part in module.named_modules():
        first = module_at(built.module, path)
        if first is None or type(first) is not type(part):  # a quantizer's, or a fusion's
            continue
        for name, value in attributes(part):
            values, before = (
                [each for each in tensors_in(held, lambda _: True) if not isinstance(each, nn.Parameter)]
                for held in (value, first.__dict__.get(name))
            )
            if len(values) != len(before) or not all(map(_equal, values, before)):
                raise PatchConstructionError(
                    f"{type(part).__qualname__}.__init__ gives other values to the attribute {name!r} each time, and "
                    "it is called twice where the checkpoint lacks weights: register it as a buffer, which is kept "
                    "together with the new weights."
                )


def module_at(module: nn.Module, path: str) -> nn.Module | None:
    """The part of a module at a path, if there is one."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


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
