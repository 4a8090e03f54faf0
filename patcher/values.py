"""Values that no checkpoint holds: what a replacement computes, and what its `__init__` gives to new weights.

transformers puts an empty tensor in the place of every buffer that it doesn't save and initialises anew what it knows;
here what a replacement has computed is kept and put back, on the device where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import set_module_tensor_to_device  # type: ignore[import-untyped]
from torch import nn
from transformers import PreTrainedModel

from patcher import seams
from patcher.matching import search
from patcher.materialize import forget_index, parameter_index
from patcher.scope import Built, Scope, opened

__all__ = ["Values", "forget_indices", "keep_new_weights"]


class Values:
    """The computed values of a model's replacements, taken before transformers finishes the load."""

    def __init__(self, model: PreTrainedModel, scope: Scope, loading_info: Any) -> None:
        self.model = model
        self.scope = scope
        self.missing = set(loading_info.missing_keys) | {name for name, *_ in loading_info.mismatched_keys}
        paths = {id(module): path for path, module in model.named_modules()}
        self.replaced = [(paths[id(built.module)], built) for built in _outermost(scope) if id(built.module) in paths]
        self.buffers: dict[str, torch.Tensor] = {}
        self.wanted: list[tuple[Built, dict[str, int]]] = []
        for path, built in self.replaced:
            for key, buffer in _buffers(path, built.module):
                if key in self.missing or not _is_saved(model, key):
                    self.buffers[key] = buffer
                    seams.mark_initialized(buffer)
            wanted = self._missing_parameters(path, built)
            if wanted:
                self.wanted.append((built, wanted))

    def _missing_parameters(self, path: str, built: Built) -> dict[str, int]:
        tied = seams.tied_keys(self.model)
        wanted = {}
        for name, parameter in built.module.named_parameters(remove_duplicate=False):
            key = f"{path}.{name}" if path else name
            index = parameter_index(parameter)
            if key in self.missing and key not in tied and index is not None:
                wanted[key] = index
        return wanted

    def put_back(self, load_config: Any) -> None:
        """After transformers has filled in what it takes for missing."""
        device_map = load_config.device_map or {"": "cpu"}
        for key, value in self.buffers.items():
            device = seams.get_device(device_map, key, valid_torch_device=True)
            set_module_tensor_to_device(self.model, key, device, value=value, dtype=value.dtype)
        for built, wanted in self.wanted:
            with _default_dtype(load_config.dtype):
                _copy_initial(self.scope, built, wanted, self.model)
        if not set(map(str, device_map.values())) - {"cpu", "disk"}:
            return  # plain tensors were computed on the CPU, and stay there
        for path, built in self.replaced:
            for name, module in built.module.named_modules(prefix=path):
                _move_plain_tensors(module, seams.get_device(device_map, f"{name}.", valid_torch_device=True))


def keep_new_weights(model: PreTrainedModel, scope: Scope, expressions: list[str]) -> None:
    """Give new weights of a model without a checkpoint what `__init__` gave them, over what the model gave them."""
    if not expressions:
        return
    paths = {id(module): path for path, module in model.named_modules()}
    for built in _outermost(scope):
        path = paths.get(id(built.module))
        if path is None:
            continue
        wanted = {}
        for name, parameter in built.module.named_parameters(remove_duplicate=False):
            key = f"{path}.{name}" if path else name
            index = parameter_index(parameter)
            if (
                index is not None
                and parameter.device.type != "meta"
                and any(search(text, key) for text in expressions)
            ):
                wanted[key] = index
        if wanted:
            _copy_initial(scope, built, wanted, model)


def forget_indices(model: nn.Module) -> None:
    """Leave no mark on the parameters of a finished model."""
    for parameter in model.parameters():
        forget_index(parameter)


def _copy_initial(scope: Scope, built: Built, wanted: Mapping[str, int], model: PreTrainedModel) -> None:
    # Built once more, because what `__init__` does to a parameter on meta is lost; only the wanted ones are real.
    again = Scope(scope.layers)
    with opened(again):
        initial = again.rebuild(built, wanted.values())
    with torch.no_grad():
        for key, index in wanted.items():
            parameter = model.get_parameter(key)
            if index in initial and type(parameter) is nn.Parameter and parameter.shape == initial[index].shape:
                parameter.copy_(initial[index])


def _outermost(scope: Scope) -> list[Built]:
    return [built for built in scope.built if built.outermost]


def _buffers(path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, buffer in module.named_buffers(prefix=path, remove_duplicate=False):
        if buffer.device.type != "meta":
            yield key, buffer


def _is_saved(model: nn.Module, key: str) -> bool:
    path, _, name = key.rpartition(".")
    return name not in model.get_submodule(path)._non_persistent_buffers_set


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is not None and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
