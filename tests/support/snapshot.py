"""What a load could touch in the libraries, object for object: to see that it has touched nothing."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.modules.module as torch_module

LIBRARIES = ("transformers", "transformers_modules", "torch", "accelerate")
# Python's own: a class gets `__slotnames__` when one of its objects is first pickled.
PYTHONS = ("__doc__", "__weakref__", "__slotnames__")
ABSENT = object()


def snapshot() -> dict[tuple[str, ...], Any]:
    """Every module attribute, every entry of a table, every attribute of a class and every entry of its tables."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in LIBRARIES or not isinstance(module, ModuleType):
            continue
        found[(name,)] = type(module)
        for key, value in list(vars(module).items()):
            if key.startswith("__") and key.endswith("__"):
                continue
            _add(found, (name, key), value)
            # `isinstance` would ask objects that pass for others, and some of them warn
            if issubclass(type(value), type) and value.__module__ == name:
                attributes = {each: item for each, item in vars(value).items() if each not in PYTHONS}
                found[(name, key, "its attributes")] = tuple(sorted(attributes))
                for attribute, item in attributes.items():
                    _add(found, (name, key, attribute), item)
    found[("sys.meta_path",)] = tuple(sys.meta_path)
    found[("registration hooks",)] = tuple(torch_module._global_parameter_registration_hooks.values())
    found[("torch's defaults",)] = (torch.empty(0).device.type, torch.get_default_dtype())
    return found


def _add(found: dict[tuple[str, ...], Any], where: tuple[str, ...], value: Any) -> None:
    kind = type(value)
    if kind in (int, float):
        return  # counters and clocks, which go on as the libraries run
    found[where] = value
    if kind in (list, tuple):
        found |= {(*where, str(index)): item for index, item in enumerate(value)}
        found[(*where, "its length")] = len(value)
    elif issubclass(kind, dict):
        found |= {(*where, f"[{entry!r}]"): item for entry, item in list(dict.items(value))}


def changes(before: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """What is no longer the object that it was. What has come to be since, by an import, doesn't count."""
    after = snapshot()
    return [key for key, value in before.items() if not _same(value, after.get(key, ABSENT))]


def _same(value: Any, other: Any) -> bool:
    return other is value or (type(value) in (tuple, str, bool, bytes, int) and other == value)
