"""What a load could touch in the libraries, object for object: to see that it has touched nothing."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn

LIBRARIES = ("transformers", "transformers_modules", "torch", "accelerate")
# Counters and the like, which change as the libraries run, are no place where a patch of a class is kept.
PLAIN = (bool, int, float, str, bytes, type(None))


def snapshot() -> dict[tuple[str, ...], Any]:
    """Every module attribute, every entry of a table of modeling code, every attribute of a module class."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in LIBRARIES or not isinstance(module, ModuleType):
            continue
        found[(name,)] = type(module)
        for key, value in list(vars(module).items()):
            kind = type(value)  # `isinstance` would ask objects that pass for others, and some of them warn
            if kind not in PLAIN:
                found[(name, key)] = value
            if key.startswith("__") or not name.startswith("transformers"):
                pass
            elif kind in (list, tuple):
                found |= {(name, key, str(index)): item for index, item in enumerate(value)}
            elif issubclass(kind, dict):
                found |= {(name, key, str(entry)): item for entry, item in list(dict.items(value))}
            if issubclass(kind, type) and issubclass(value, nn.Module) and value.__module__ == name:
                found |= {(name, key, attribute): item for attribute, item in vars(value).items()}
    found[("sys.meta_path",)] = tuple(sys.meta_path)
    found[("registration hooks",)] = tuple(torch_module._global_parameter_registration_hooks.values())
    return found


def changes(before: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """What is no longer the object that it was. What has come to be since, by an import, doesn't count."""
    after = snapshot()
    listed = [
        key
        for key, value in before.items()
        if (after.get(key) != value if type(value) is tuple else after.get(key) is not value)
    ]
    if torch.empty(0).device.type != "cpu" or torch.get_default_dtype() != torch.float32:
        listed.append(("torch's defaults",))
    return listed
