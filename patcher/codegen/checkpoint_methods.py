"""Models of a generated file that read and write the checkpoints of the models they are made from."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.codegen.builder import PatchConfig
from patcher.codegen.conversions_text import render_conversions
from patcher.codegen.dependencies import RUNTIME, Dependencies
from patcher.codegen.to_patcher import CONVERSIONS
from patcher.errors import CodegenError

if TYPE_CHECKING:
    from patcher.patcher import Patcher

__all__ = ["add_conversions", "import_torch", "module_classes"]


def add_conversions(described: PatchConfig, patcher: Patcher) -> None:
    """See `PatchConfig.add_conversions`."""
    shipped = importlib.import_module(described.source_module)
    text = render_conversions(patcher, described, Dependencies(described, shipped, {}))
    described.add_post_import_block(text, "how checkpoints of the original become those of the models here, and back")
    _load_and_save(described, shipped)


def module_classes(shipped: ModuleType) -> dict[str, type[nn.Module]]:
    """The classes that a module defines, by name."""
    return {
        name: value
        for name, value in vars(shipped).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == shipped.__name__
    }


def import_torch(described: PatchConfig, shipped: ModuleType) -> None:
    """`torch` and `nn`, unless the file has them; it may have written `import torch.nn as nn`."""
    if vars(shipped).get("torch") is not torch:
        described.add_import("torch", is_from_import=False)
    if vars(shipped).get("nn") is not nn:
        described.add_import("torch", names=["nn"])


_SHIPPED = '''
def shipped_class(cls):
    """The class of transformers in whose checkpoints a class of this file, or one that inherits from it, lives."""
    own = next(base for base in cls.__mro__ if base.__module__ == __name__)
    return getattr(shipped, own.__name__)
'''

_WITH = f'''
def with_conversions(cls, patcher):
    """What a load of the shipped class has to do to become one of `cls`."""
    own = {CONVERSIONS}.replace(class_mapping={{shipped_class(cls).__name__: cls}})
    return own if patcher is None else own | patcher
'''

_METHODS = {
    "is_custom_code": (
        '''
@classmethod
def is_custom_code(cls):
    """No: what transformers does to checkpoints of the shipped classes, by name, holds for those here."""
    return False
''',
        "the conversions of transformers, of parts of a model too, are those of the original",
    ),
    "from_pretrained": (
        '''
@classmethod
def from_pretrained(cls, *args, patcher=None, **kwargs):
    """Read a checkpoint of the shipped model."""
    return shipped_class(cls).from_pretrained(*args, patcher=with_conversions(cls, patcher), **kwargs)
''',
        "checkpoints of the original are converted",
    ),
    "_from_config": (
        '''
@classmethod
def _from_config(cls, config, *args, patcher=None, **kwargs):
    """Build a model that saves as the shipped one does."""
    if patcher is None and under_construction():  # a part of a model that has the conversions itself
        return super()._from_config(config, *args, **kwargs)
    return shipped_class(cls)._from_config(config, *args, patcher=with_conversions(cls, patcher), **kwargs)
''',
        "what is made without a checkpoint saves one of the original",
    ),
    "save_pretrained": (
        '''
def save_pretrained(self, *args, **kwargs):
    """Write a checkpoint of the shipped model."""
    if report(self).patchers:
        return super().save_pretrained(*args, **kwargs)
    # Made by a call of the class, which knows nothing of conversions: a model that does, with the same weights.
    with torch.device("meta"):
        model = self._from_config(self.config)
    model.load_state_dict(self.state_dict(), assign=True)
    return model.save_pretrained(*args, **kwargs)
''',
        "so is what is made by a call of the class",
    ),
}


def _load_and_save(described: PatchConfig, shipped: ModuleType) -> None:
    """Have the models of the file read and write the checkpoints of the original."""
    package, _, stem = shipped.__name__.rpartition(".")
    import_torch(described, shipped)
    described.add_import(package, names=[f"{stem} as shipped"])
    described.add_import("patcher", names=["report"])
    described.add_import(RUNTIME, names=["under_construction"])
    described.add_helper(_SHIPPED)
    described.add_helper(_WITH)
    for name, cls in module_classes(shipped).items():
        bases = [base for base in cls.__mro__[1:] if base.__module__ == shipped.__name__]
        if not issubclass(cls, PreTrainedModel) or any(issubclass(base, PreTrainedModel) for base in bases):
            continue
        for method, (text, why) in _METHODS.items():
            if method in vars(cls):
                raise CodegenError(
                    f"{described.where}: {name} has a {method} of its own, which the file would have to replace. "
                    "Load with the patcher itself."
                )
            described.override_method(f"{name}.{method}", text, why, new=True)
