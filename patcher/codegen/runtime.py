"""What generated files use while they run. Files are shipped and kept, so these names stay.

>>> from torch import nn
>>> mlp = nn.Module()
>>> mlp.gate, mlp.up = nn.Linear(4, 6), nn.Linear(4, 6)
>>> fuse(mlp, Rows(["gate.weight", "up.weight"], "gate_up.weight"))
Module(
  (gate_up): Linear(in_features=4, out_features=12, bias=True)
)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from patcher.compat.models import make_from_config
from patcher.construction.construction import under_construction
from patcher.errors import PatchConstructionError
from patcher.fusions.experts.listed import ListedExperts
from patcher.fusions.experts.matrices import Matrices
from patcher.fusions.fused_module import fuse_in_place, put_in_place
from patcher.fusions.joined import Joined, part_property
from patcher.fusions.patch_embeddings import LinearPatchEmbedding
from patcher.fusions.shared_input import SharedInput, are_values
from patcher.layouts.layouts import Flatten, Layout, Rows, named_parameter
from patcher.loading import record_of
from patcher.spec.patcher import Patcher

__all__ = [
    "CONVERSIONS",
    "ORIGINAL",
    "Flatten",
    "LinearPatchEmbedding",
    "ListedExperts",
    "Matrices",
    "Rows",
    "are_values",
    "from_config",
    "from_pretrained",
    "fuse",
    "is_custom_code",
    "joined_part",
    "save_pretrained",
    "shared_input",
    "under_construction",
]

#: What a generated file calls the Patcher that holds its weight conversions, and the module that it was made from.
CONVERSIONS = "CONVERSIONS"
ORIGINAL = "original"


def _home(cls: type) -> tuple[type, dict[str, Any]]:
    """The class of a generated file that a class is or inherits from, and the names of that file."""
    for base in cls.__mro__:
        names = vars(sys.modules[base.__module__])
        if isinstance(names.get(CONVERSIONS), Patcher) and ORIGINAL in names:
            return base, names
    raise TypeError(f"{cls.__qualname__} inherits from no class of a generated file.")


def _as_original(cls: type, patcher: Patcher | None) -> tuple[Any, Patcher]:
    """The class of transformers whose checkpoints a class reads, and what makes a load of it one of the class."""
    base, names = _home(cls)
    own: Patcher = names[CONVERSIONS].replace(class_mapping={base.__name__: cls})
    return getattr(names[ORIGINAL], base.__name__), own if patcher is None else own | patcher


def _inherited(cls: type) -> Any:
    """What these methods stand in front of: the class of the file that has them takes no part in `super()` here."""
    return next(base for base in cls.__mro__ if vars(base).get("is_custom_code") is is_custom_code)


@classmethod  # type: ignore[misc]
def is_custom_code(cls: type) -> bool:
    """No: what transformers does to checkpoints of the original classes, by name, holds for those here."""
    return False


@classmethod  # type: ignore[misc]
def from_pretrained(cls: type, *args: Any, patcher: Patcher | None = None, **kwargs: Any) -> Any:
    """Read a checkpoint of the original model."""
    original, own = _as_original(cls, patcher)
    return original.from_pretrained(*args, patcher=own, **kwargs)


@classmethod  # type: ignore[misc]
def from_config(cls: type, config: Any, *args: Any, patcher: Patcher | None = None, **kwargs: Any) -> Any:
    """Build a model that saves as the original one does."""
    if patcher is None and under_construction():  # a part of a model that has the conversions itself
        return make_from_config(super(_inherited(cls), cls), config, *args, **kwargs)
    original, own = _as_original(cls, patcher)
    return make_from_config(original, config, *args, patcher=own, **kwargs)


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Write a checkpoint of the original model."""
    record = record_of(self)
    if record is not None and record.patchers:
        return super(_inherited(type(self)), self).save_pretrained(*args, **kwargs)
    # Made by a call of the class, which knows nothing of conversions: a model that does, with the same weights.
    with torch.device("meta"):
        model = make_from_config(self, self.config)
    model.load_state_dict(self.state_dict(), assign=True)
    return model.save_pretrained(*args, **kwargs)


def fuse(module: nn.Module, *layouts: Layout, into: Any = None) -> Any:
    """Give a module the parameters of these layouts in the place of its own; it saves as it was.

    Args:
        module: as transformers builds it.
        layouts: which of its parameters become which.
        into: a class with a `from_module`, to put in its place. Without one the module itself is changed: each
            `<name>.weight` is that of an `nn.Linear` called `<name>`, and of joined rows the module keeps how many
            each part has, as `<name>_sizes`. Biases of layers that are joined are joined as well.
    """
    if into is not None:
        return put_in_place(module, into, layouts, None)
    fuse_in_place(module, _with_biases(module, layouts), type(module), None)
    return module


def _with_biases(module: nn.Module, layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts, and of linear layers that are joined the biases as well: a config may give them some."""
    known = {name for layout in layouts for name in layout.stock}
    result = list(layouts)
    for layout in layouts:
        owners = [name.removesuffix(".weight") for name in layout.stock]
        biases = [f"{owner}.bias" for owner in owners if named_parameter(module, f"{owner}.bias") is not None]
        if isinstance(layout, Rows) and len(owners) > 1 and biases and known.isdisjoint(biases):
            if len(biases) < len(owners):
                raise PatchConstructionError(
                    f"{type(module).__name__} is written for {', '.join(owners)} with biases or without, and this one "
                    f"has {', '.join(biases)}. Generate the file again, with this config."
                )
            result.append(Rows(biases, layout.fused[0].removesuffix("weight") + "bias"))
    return result


def joined_part(module: nn.Module, name: str, names: Sequence[str], joined: str) -> Any:
    """One of several projections that were joined, for code that looks at it; itself until they are."""
    return part_property(Joined(tuple(names), joined), names.index(name)).__get__(module)


def shared_input(module: nn.Module, names: Sequence[str], joined: str) -> SharedInput:
    """What a forward asks, call by call, for the rows of projections that were joined."""
    return SharedInput(module, Joined(tuple(names), joined))
