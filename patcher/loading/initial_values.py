"""Values that no checkpoint holds: those that a replacement computes, or that its `__init__` gives to new weights.

transformers replaces every buffer that isn't saved by an empty tensor, and initialises those that it knows. Here the
values that a replacement has computed are kept, and restored on their device.

For new weights a replacement is built once more, after the others have been read: with values for weights that the
checkpoint lacks, and on meta otherwise. So nothing can be computed from the initial value of a weight that is read.
Fused weights that a checkpoint lacks start as those of transformers do from the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_module_tensor_to_device  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.attributes import attributes, tensors_in
from patcher.compat.models import (
    forget_initialized,
    get_device,
    is_initialized,
    local_torch_dtype,
    mark_initialized,
    named_buffers,
    named_modules,
    named_parameters,
    offload_weight,
    state_tensors,
    ties,
)
from patcher.construction.construction import Built, Construction, Placed
from patcher.construction.gates import building
from patcher.construction.lock import construction_lock
from patcher.construction.meta_init import MetaInit, like, without_value
from patcher.errors import InvalidPatcherError, PatchConstructionError
from patcher.layouts.carried import fused_modules
from patcher.layouts.layouts import Layout
from patcher.layouts.sharded import distribute_like, local_tensor
from patcher.patterns import inside, parents
from patcher.resolution.resolution import skeleton

if TYPE_CHECKING:
    from patcher.loading.load import Loaded


def frozen_parameters(model: PreTrainedModel, outermost: Placed) -> frozenset[str]:
    """Return the parameters that replacements have frozen: a load creates new parameters, which aren't.

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
        self.load, self.model = load, load.model
        self.missing = set(load.info.missing_keys) | {name for name, *_ in load.info.mismatched_keys}
        self.tied = ties(load.model).keys()
        absent = self.missing - self.tied
        # A quantizer may have replaced some modules by others.
        modules = dict(named_modules(self.model))
        self.replaced = tuple((path, built) for path, built in load.outermost if modules.get(path) is built.module)
        #: parameters that a replacement was given with their values, from a model that was loaded elsewhere
        self.given: dict[str, nn.Parameter] = {}
        #: parameter that the checkpoint lacks -> the innermost replacement that has it
        self.new: dict[str, tuple[str, Built]] = {}
        prefixes = tuple(inside(path) for path, _ in self.replaced)
        #: parameters outside of replacements, which transformers initialises
        self.drawn = {key for key in absent if not (prefixes and key.startswith(prefixes))}
        #: the layouts of fusions of which the checkpoint has nothing
        self.drawn_layouts = (
            [item for item in self._layouts if self.drawn.issuperset(item.fused)] if self.drawn else []
        )
        self.random_state = torch.get_rng_state()
        self.buffers = {
            key: buffer for path, built in self.replaced for key, buffer in self._computed(path, built.module)
        }
        for buffer in self.buffers.values():
            mark_initialized(buffer)
        for path, built in sorted(self.replaced, key=lambda item: item[0].count(".")) if absent else ():
            for key, parameter in named_parameters(built.module, path):
                if key in absent and parameter.device.type != "meta":
                    self.given[key] = parameter
                elif key in absent:
                    self.new[key] = path, built
        if self.replaced:
            read = state_tensors(self.model).keys() - self.missing | self.new.keys() | self.given.keys() | self.tied
            skip_complete(self.model, self.replaced, read)

    def restore(self, load_config: Any) -> None:
        """Restore the values, after transformers has initialised the weights that it takes for missing.

        Raises:
            PatchConstructionError: the initial value of a new weight can't be known.
        """
        self.config, self.device_map = load_config, load_config.device_map or {"": "cpu"}
        for key, tensor in self._drawn_values().items() if self.drawn_layouts else ():
            parameter = self.model.get_parameter(key)  # which may be tied
            if type(parameter) is nn.Parameter and not parameter.is_meta and not isinstance(parameter.data, DTensor):
                parameter.data.copy_(tensor)
            else:
                self._assign(key, nn.Parameter(tensor, parameter.requires_grad))
        for key, parameter in self.given.items():
            if self._device(key) == parameter.device:
                _set(self.model, key, parameter)  # the very object
            else:
                self._assign(key, parameter)
        for path, built in dict.fromkeys(self.new.values()):
            self._initialise(path, built)
        for key, buffer in self.buffers.items():
            tensor = buffer.detach()
            set_module_tensor_to_device(self.model, key, self._device(key), value=tensor, dtype=tensor.dtype)
            if key in self.missing and load_config.offload_buffers:
                self._offload(key, tensor)
        frozen = self._frozen_by_replacements() if self.load.frozen else ()
        for key, parameter in self.model.named_parameters() if frozen else ():
            if key in frozen:
                parameter.requires_grad_(False)
        if not set(map(str, self.device_map.values())) - {"cpu", "disk"}:
            return  # plain tensors were computed on the CPU, and stay there
        for path, built in self.replaced:
            for name, module in built.module.named_modules(prefix=path):
                device = self._device(f"{name}.")
                for attribute, value in attributes(module):
                    module.__dict__[attribute] = _to_device(value, device)

    def _frozen_by_replacements(self) -> frozenset[str]:
        """Return the frozen parameters of replacements, without those that the code of the original freezes: a load of
        stock makes these trainable."""
        stock = skeleton(self.load.record.model_class, self.model.config)
        return self.load.frozen.difference(name for name, value in named_parameters(stock) if not value.requires_grad)

    def _device(self, key: str) -> Any:
        return get_device(self.device_map, key, valid_torch_device=True)

    def _computed(self, path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of a replacement that aren't read from the checkpoint."""
        for key, buffer in _buffers(path, module):
            owner, _, name = key.rpartition(".")
            if key in self.missing or name in self.model.get_submodule(owner)._non_persistent_buffers_set:
                yield key, buffer

    def _initialise(self, path: str, built: Built) -> None:
        """Give the new weights of a replacement the values of one that is built once more."""
        module = self._build_again(path, built)
        values = dict(named_parameters(module, path))
        for layout in self._layouts:
            if values.keys() >= set(layout.stock):
                fused = layout.fuse([values[name].detach() for name in layout.stock])
                values |= zip(layout.fused, map(nn.Parameter, fused), strict=True)
        for key, (owner, _) in self.new.items():
            if owner == path and (value := self._initial_value(built, values.get(key), key)) is not None:
                self._assign(key, value)
        # Random values were drawn anew, also in buffers and attributes that belong to these weights.
        self.buffers |= dict(self._computed(path, module))
        before = dict(built.module.named_modules())
        for name, part in module.named_modules():
            first = before.get(name)
            if first is not None and type(first) is type(part):  # not a quantizer's, or a fusion's
                first.__dict__.update((key, value) for key, value in attributes(part) if _holds_tensors(value))

    def _build_again(self, path: str, built: Built) -> nn.Module:
        """Build a replacement once more, with values for its new weights."""
        names = [(inside(path) + name, number) for name, number in built.numbers.items()]
        fused = {name for layout in self._layouts if self.missing.issuperset(layout.fused) for name in layout.stock}
        read = {number for key, number in names if key not in self.missing | fused or key in self.tied}
        construction = Construction(self.load.rules, is_skeleton=True)
        dtype = self.config.dtype
        default = local_torch_dtype(dtype) if dtype is not None and dtype.is_floating_point else nullcontext()
        with default, building(construction):
            return construction.build_again(built, MetaInit(to_meta=True, moved=read))

    def _initial_value(self, built: Built, value: nn.Parameter | None, key: str) -> nn.Parameter | None:
        """Return the value of a new weight in a replacement that was built again; None if a quantizer has replaced it.

        Raises:
            PatchConstructionError: it was computed from a tensor without values, or `__init__` isn't repeatable.
        """
        expected = self.model.get_parameter(key)
        if type(local_tensor(expected)) not in (nn.Parameter, torch.Tensor, type(value)):
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

    def _assign(self, key: str, value: nn.Parameter) -> None:
        value = like(value, distribute_like(value.data.to(self._device(key)), self.model.get_parameter(key)))
        _set(self.model, key, value)
        self._offload(key, value.data)

    def _offload(self, key: str, value: torch.Tensor) -> None:
        """Write a tensor to disk if the device map says so, as transformers does with those that it reads."""
        index, folder = self.load.disk_index, self.config.disk_offload_folder
        if index is None or get_device(self.device_map, key) != "disk":
            return
        if folder is None:
            raise InvalidPatcherError(
                f"{key} is not in the checkpoint, and the device map puts it on the disk: say where, with "
                "offload_folder=..."
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
        offload_weight(value, key, folder, index)

    # --- fused weights that the checkpoint lacks -----------------------------------------------------------------

    @cached_property
    def _layouts(self) -> list[Layout]:
        return [layout for carrier in fused_modules(self.model) for layout in carrier.fused]

    def _drawn_values(self) -> dict[str, torch.Tensor]:
        """Draw the missing weights outside of replacements on a stock model, from the random state of before.

        Stock draws a stack of experts as one parameter, and sets biases of linear layers to zero: its `_init_weights`
        wouldn't find those that a fused module itself has.
        """
        layouts, model_class = self.drawn_layouts, self.load.record.model_class
        others = self.drawn - {name for layout in layouts for name in layout.fused}
        torch.set_rng_state(self.random_state)
        with construction_lock.held_for(model_class.__name__):
            stock = skeleton(model_class, self.model.config)
            names = {name for layout in layouts for name in layout.stock}
            drawn = _draw(stock, names | others, self.config.dtype)
        values = {name: drawn[name] for name in others if name in drawn}
        for layout in layouts:
            values |= zip(layout.fused, layout.fuse([drawn[name] for name in layout.stock]), strict=True)
        return values


@torch.no_grad()
def _draw(model: PreTrainedModel, names: set[str], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Initialise some parameters of a model on meta, as transformers initialises missing ones."""
    parameters: dict[str, nn.Parameter] = {}
    for path, module in named_modules(model):
        # A module may initialise the parameters of its submodules.
        if not any(name.startswith(inside(path)) for name in names):
            mark_initialized(module)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            key = inside(path) + name
            if key in names and isinstance(tensor, nn.Parameter):
                kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                value = nn.Parameter(torch.empty(tensor.shape, dtype=kind, device="cpu"))
                parameters[key] = module._parameters[name] = value
            elif tensor is not None:
                mark_initialized(tensor)
    model.initialize_weights()  # type: ignore[no-untyped-call]
    return {name: parameter.data for name, parameter in parameters.items()}


def skip_complete(model: PreTrainedModel, replaced: Placed, read: Set[str] = frozenset()) -> None:
    """Keep `_init_weights` from replacements that have all their values, and from the modules around them.

    It may initialise parameters by the names of the original, which a replacement doesn't have.
    """
    modules, incomplete = list(named_modules(model)), set[str]()
    for path, module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            key = inside(path) + name
            if tensor is not None and key not in read and not is_initialized(tensor):
                incomplete.update(parents(key))
    outermost = {path for path, _ in replaced}
    around = {owner for path in outermost for owner in parents(path)}
    for path, module in modules:
        if path not in incomplete and (path in around or not outermost.isdisjoint((path, *parents(path)))):
            mark_initialized(module)


@contextmanager
def preserve_computed_buffers(replacements: Iterable[nn.Module]) -> Iterator[None]:
    """Keep transformers from initialising the buffers that replacements have computed."""
    buffers = [buffer for module in replacements for _, buffer in _buffers("", module)]
    fresh = [buffer for buffer in buffers if not is_initialized(buffer)]
    for buffer in fresh:
        mark_initialized(buffer)
    try:
        yield
    finally:
        for buffer in fresh:
            forget_initialized(buffer)


def _holds_tensors(value: Any) -> bool:
    """Whether a plain attribute holds tensors, and no parameter."""
    tensors = tensors_in(value, lambda module: True)
    return bool(tensors) and not any(isinstance(tensor, nn.Parameter) for tensor in tensors)


def _set(model: nn.Module, key: str, parameter: nn.Parameter) -> None:
    path, _, name = key.rpartition(".")
    setattr(model.get_submodule(path), name, parameter)


def _buffers(path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, buffer) for key, buffer in named_buffers(module, path) if not buffer.is_meta)


def _to_device(value: Any, device: Any) -> Any:
    """Move the tensors of a plain attribute: one alone, or in a list, tuple or dict."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "meta" else value.to(device)
    if type(value) in (list, tuple, dict):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        if any(isinstance(item, torch.Tensor) for item in items):
            if isinstance(value, dict):
                return {key: _to_device(item, device) for key, item in value.items()}
            return type(value)(_to_device(item, device) for item in value)
    return value
