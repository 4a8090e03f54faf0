"""Models of a generated file that read and write the checkpoints of the models they are made from."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from patcher.codegen.conversions_text import render_conversions
from patcher.codegen.dependencies import Dependencies
from patcher.codegen.registration import PatchRegistration
from patcher.codegen.runtime import ORIGINAL
from patcher.codegen.spec import create_patch_from_external

if TYPE_CHECKING:
    from patcher.spec.patcher import Patcher

__all__ = ["add_conversions", "module_classes"]

#: method of a model -> what it is in `patcher.codegen.runtime`, and why
_METHODS = {
    "is_custom_code": (
        "is_custom_code",
        "the conversions of transformers, of parts of a model too, are those of the original",
    ),
    "from_pretrained": ("from_pretrained", "checkpoints of the original are converted"),
    "_from_config": ("from_config", "what is made without a checkpoint saves one of the original"),
    "save_pretrained": ("save_pretrained", "so is what is made by a call of the class"),
}


def module_classes(original: ModuleType) -> dict[str, type[nn.Module]]:
    """The classes that a module defines, by name."""
    return {
        name: value
        for name, value in vars(original).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == original.__name__
    }


def add_conversions(described: PatchRegistration, patcher: Patcher) -> None:
    """See `PatchConfig.add_conversions`."""
    original = importlib.import_module(described.source_module)
    text = render_conversions(patcher, described, Dependencies(described, original, {}))
    described.add_post_import_block(text, "how checkpoints of the original become those of the models here, and back")
    package, _, stem = original.__name__.rpartition(".")
    described.add_import(package, names=[f"{stem} as {ORIGINAL}"])
    for name, cls in module_classes(original).items():
        bases = [base for base in cls.__mro__[1:] if base.__module__ == original.__name__]
        if not issubclass(cls, PreTrainedModel) or any(issubclass(base, PreTrainedModel) for base in bases):
            continue
        for method, (source, why) in _METHODS.items():
            if method in vars(cls):
                raise described.error(
                    f"{name} has a {method} of its own, which the file would have to replace. "
                    "Load with the patcher itself."
                )
            patch = create_patch_from_external(f"{name}.{method}", "patcher.codegen", f"runtime.{source}", why)
            described.patches.append(replace(patch, new=True))
