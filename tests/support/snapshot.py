"""What a load could touch in the libraries, object for object: to see that it has touched nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from types import ModuleType
from typing import Any

import torch
import torch.nn.modules.module as torch_module

__all__ = ["Snapshot", "changes", "snapshot"]

LIBRARIES = ("transformers", "transformers_modules", "torch", "accelerate", "safetensors")
# Python's own: a class gets `__slotnames__` when one of its objects is first pickled.
PYTHONS = ("__doc__", "__weakref__", "__slotnames__")
# Torch's own: each operation on the meta device sets it and sets it back, two at once in threads leave the other's.
# Plain loads of transformers in six threads do so too, in a process that never imports patcher.
RACED = {("torch._library.fake_impl", "global_ctx_getter")}
# Torch imports it, and remembers it, when somebody first asks whether an object is a device mesh.
RACED.add(("torch._opaque_base", "_FakeScriptObject_cls"))
ABSENT = object()

Key = tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """What a module, class, list or dict held: the container itself, its keys, and the very objects."""

    where: Key
    container: Any
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Snapshot:
    contents: tuple[Contents, ...]
    settings: dict[Key, Any]


def snapshot() -> Snapshot:
    """Every module attribute, every entry of a table, every attribute of a class and every entry of its tables."""
    return Snapshot(tuple(_contents()), _settings())


def changes(before: Snapshot) -> list[Key]:
    """What is no longer the object that it was. What has come to be since, by an import, doesn't count."""
    after = _settings()
    found = [key for key, value in before.settings.items() if not _same(value, after.get(key, ABSENT))]
    for was in before.contents:
        keys, values = _items(was.container)
        # Nearly all hold the very objects that they held, which is known without a look at each.
        if len(values) != len(was.values) or not all(map(is_, values, was.values)):
            found += _unlike(was, keys, values)
    return found


def _settings() -> dict[Key, Any]:
    modules = {(name,): type(module) for name, module in _modules()}
    return modules | {
        ("sys.meta_path",): tuple(sys.meta_path),
        ("registration hooks",): tuple(torch_module._global_parameter_registration_hooks.values()),
        ("torch's defaults",): (torch.empty(0).device.type, torch.get_default_dtype()),
    }


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in LIBRARIES and isinstance(module, ModuleType):
            yield name, module


def _contents() -> Iterator[Contents]:
    for name, module in _modules():
        yield Contents((name,), module, *_items(module))
        for key, value in list(vars(module).items()):
            if key.startswith("__") and key.endswith("__"):
                continue
            # `isinstance` would ask objects that pass for others, and some of them warn
            kind = type(value)
            if kind is list or issubclass(kind, dict):
                yield Contents((name, key), value, *_items(value))
            elif issubclass(kind, type) and value.__module__ == name:
                yield Contents((name, key), value, *_items(value))
                for attribute, item in list(vars(value).items()):
                    if type(item) is list or issubclass(type(item), dict):
                        yield Contents((name, key, attribute), item, *_items(item))


def _items(container: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The keys and objects of a container, by what `dict` has in it: a subclass may do anything when it is asked."""
    kind = type(container)
    if kind is list:
        return tuple(range(len(container))), tuple(container)
    held = container if issubclass(kind, dict) else dict(vars(container))
    return tuple(dict.keys(held)), tuple(dict.values(held))


def _unlike(was: Contents, keys: Iterable[Any], values: Iterable[Any]) -> Iterator[Key]:
    kind = type(was.container)
    is_module, is_class = isinstance(was.container, ModuleType), issubclass(kind, type)
    now = dict(zip(keys, values, strict=True))
    if is_class and set(now) - set(PYTHONS) != set(was.keys) - set(PYTHONS):
        yield (*was.where, "its attributes")
    if kind is list and len(now) != len(was.keys):
        yield (*was.where, "its length")
    for key, value in zip(was.keys, was.values, strict=True):
        if (*was.where, key) in RACED:
            continue
        is_pythons = (is_module and key.startswith("__") and key.endswith("__")) or (is_class and key in PYTHONS)
        # Numbers are counters and clocks, which go on as the libraries run.
        if not is_pythons and type(value) not in (int, float) and not _same(value, now.get(key, ABSENT)):
            yield (*was.where, str(key))


def _same(value: Any, other: Any) -> bool:
    return other is value or (type(value) in (tuple, str, bool, bytes, int) and other == value)
