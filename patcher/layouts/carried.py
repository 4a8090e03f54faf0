"""The layouts that a module carries if its parameters aren't those of transformers, and conversions by them.

The value is frozen, and is copied, pickled and moved with the module; it knows no model and no path. By it, a state
dict of any model that contains the module is converted to the layout of transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from patcher.compat.models import named_modules
from patcher.errors import PatchedWeightsError
from patcher.layouts.conversion import Converted
from patcher.layouts.layouts import Layout, by_itself
from patcher.layouts.sharded import local_tensor
from patcher.patterns import in_state_dict, inside

#: The attribute of a module for its `ModuleLayouts`.
CARRIED = "_patcher_layouts"
#: The attribute of a class that was generated in one process, by which another one generates it: (function, *args).
RECIPE = "_patcher_recipe"


class PickledClass:
    """A class in a pickle, by its recipe: cloudpickle and dill pickle other classes by value."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    @staticmethod
    def of(cls: Any) -> Any:
        """Return what to pickle for a class: the class itself, if every process has it."""
        return PickledClass(cls) if RECIPE in vars(cls) else cls

    @staticmethod
    def read(value: Any) -> Any:
        """Return the class from what was pickled for it."""
        return value.cls if isinstance(value, PickledClass) else value

    def __reduce__(self) -> Any:  # unpickled as the class itself
        make, *args = vars(self.cls)[RECIPE]
        return make, tuple(PickledClass.of(arg) if isinstance(arg, type) else arg for arg in args)

    def __deepcopy__(self, memo: Any) -> PickledClass:
        return self


def reduce_by_recipe(self: Any, protocol: Any) -> Any:
    """The `__reduce_ex__` of a generated class, without effect on its subclasses."""
    cls = type(self)
    if RECIPE not in vars(cls):
        return object.__reduce_ex__(self, protocol)
    return (_bare, (PickledClass(cls),), self.__getstate__())


def _bare(pickled: Any) -> Any:
    return object.__new__(PickledClass.read(pickled))


@dataclass(frozen=True)
class ModuleLayouts:
    """How the parameters of a module are converted to those of transformers.

    Attributes:
        layouts: from parameters of transformers to those of a fused module.
        converted: from tensors of a checkpoint to what conversions of a patcher made of them.
        fusion: the name of the fusion family, or the family itself; None for modules of generated files.
        original: the stock class of a fused module.
        names: the names in the state dict of the stock module, in order, for a fused module.
    """

    layouts: tuple[Layout, ...] = ()
    converted: tuple[Layout, ...] = ()
    fusion: Any = None
    original: type[nn.Module] | None = None
    names: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleLayouts:
        return self

    def __reduce__(self) -> Any:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        original = None if self.original is None else PickledClass.of(self.original)
        return (_unpickled, (values | {"original": original},))

    @property
    def all(self) -> tuple[Layout, ...]:
        """All layouts: fused parameters are separated before conversions are reversed."""
        return (*self.layouts, *self.converted)

    @property
    def fused(self) -> frozenset[str]:
        """The fused parameters."""
        return frozenset(name for layout in self.layouts for name in layout.fused)

    @property
    def stock(self) -> frozenset[str]:
        """The stock parameters from which the fused ones are made."""
        return frozenset(name for layout in self.layouts for name in layout.stock)

    def separate(self, path: str, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Convert the tensors of one module as `separated` does, by their names in the module.

        Raises:
            PatchedWeightsError: the module was changed so that they can't be known.
        """
        self._check(path, tensors)
        result, converted = dict(tensors), set[str]()
        for layout in self.all:
            parts = _separate(layout, inside(path), result)
            result = _substitute(layout.fused, parts, result)
            if isinstance(layout, Converted):
                converted |= parts.keys()
        if self.names:
            order = {name: index for index, name in enumerate(self.names)}
            result = {name: result[name] for name in sorted(result, key=lambda name: order.get(name, len(order)))}
        return result, converted

    def _check(self, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise for tensors that are quantized, were added to a fused module, or are present in both layouts."""
        prefix, fused = inside(path), self.fused
        owners = {name.rpartition(".")[0]: name for name in tensors}
        fused_layers = tuple({f"{owner}." for name in fused if (owner := name.rpartition(".")[0])})
        for layout in self.all:
            for name in layout.fused:
                value = tensors.get(name, tensors.get(owners.get(name, "")))  # quantizers may have `weight._data`
                if value is not None and (name not in tensors or is_quantized(value)):
                    raise _not_saved(
                        f"{prefix}{name}",
                        f"it is quantized ({type(value).__name__} of {value.dtype}), and scales of joined rows aren't "
                        "those of each (if only fusions made this layout, save_original_format=False saves it as it "
                        "is)",
                    )
        for layout in self.layouts:
            both = [name for name in layout.stock if name in tensors and name not in layout.fused]
            if both and not set(layout.fused).isdisjoint(tensors):
                raise _not_saved(
                    f"{prefix}{both[0]}",
                    f"{', '.join(layout.fused[:2])} of a fused module holds it, and both are there. Assign "
                    "layers to a fused module by its attributes, or take the fusions off with "
                    "Patcher().apply(model)",
                )
        for name in sorted(tensors.keys() - fused - set(self.names)):
            if name.startswith(fused_layers):
                raise _not_saved(
                    f"{prefix}{name}",
                    "it was added to a fused layer, and the checkpoint has no place for it. Take it off before "
                    "saving, or take the fusions off with Patcher().apply(model) before it is added",
                )


@torch.no_grad()
def _separate(layout: Layout, prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parts of one layout, {} if its parameters are absent: of a part of a model, or in stock's layout."""
    fused = {name: tensors[name] for name in layout.fused if name in tensors}
    if not fused:
        return {}
    if absent := [name for name in layout.fused if name not in fused]:
        raise _not_saved(
            f"{prefix}{absent[0]}",
            f"it is missing in the state dict, and {layout} has made it with others. Save a state dict with all "
            "of them",
        )
    for (name, tensor), shape in zip(fused.items(), layout.fused_shapes(), strict=True):
        if tensor.shape != shape:
            raise _not_saved(
                f"{prefix}{name}",
                f"it had the shape {tuple(shape)} when it was made, it has {tuple(tensor.shape)} now",
            )
    parts = dict(zip(layout.stock, layout.separate(list(fused.values())), strict=True))
    for name, expected in zip(layout.stock, layout.stock_shapes, strict=True):
        if tuple(parts[name].shape) != tuple(expected):
            raise _not_saved(f"{prefix}{name}", f"{layout} gives {tuple(parts[name].shape)}, and it was {expected}")
    if isinstance(layout, Converted):
        return parts
    return {name: by_itself(part.contiguous()) for name, part in parts.items()}


def _substitute(
    names: Collection[str], substitutes: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Put substitutes in the place of the first of some tensors, and drop these: shards depend on the order."""
    result: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name not in names:
            result[name] = value
        elif substitutes:
            result, substitutes = result | substitutes, {}
    return result


def _unpickled(values: dict[str, Any]) -> ModuleLayouts:
    importlib.import_module("patcher").install()  # so that the unpickled model saves like this one
    return ModuleLayouts(**values | {"original": PickledClass.read(values["original"])})


class Carrier(NamedTuple):
    """A module that carries layouts, with its path."""

    path: str
    module: nn.Module
    carried: ModuleLayouts

    @property
    def prefix(self) -> str:
        """The prefix of its names in a state dict."""
        return inside(in_state_dict(self.path))

    @property
    def fused(self) -> list[Layout]:
        """The layouts of its fusion, by the names in the state dict of the model."""
        return [layout.named(self.prefix.__add__) for layout in self.carried.layouts]

    @property
    def all(self) -> list[Layout]:
        """All of its layouts, by the names in the state dict of the model."""
        return [layout.named(self.prefix.__add__) for layout in self.carried.all]


def carried_by(module: nn.Module) -> ModuleLayouts | None:
    """Return the layouts that a module carries, None if its parameters are those of transformers."""
    return module.__dict__.get(CARRIED)


def carriers(model: nn.Module) -> list[Carrier]:
    """Return the modules of a model that carry layouts."""
    return [
        Carrier(path, module, carried)
        for path, module in named_modules(model)
        if (carried := carried_by(module)) is not None
    ]


def fused_layouts(module: nn.Module) -> ModuleLayouts | None:
    """Return the layouts that a fused module carries, None if it isn't fused."""
    carried = carried_by(module)
    return carried if carried is not None and carried.layouts else None


def fused_modules(model: nn.Module) -> list[Carrier]:
    """Return the fused modules of a model."""
    return [carrier for carrier in carriers(model) if carrier.carried.layouts]


def separated(
    carrying: Iterable[Carrier], state_dict: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Convert a state dict to the layout of transformers; return also which names are tensors of a checkpoint.

    Raises:
        PatchedWeightsError: some of it can't be known.
    """
    result, converted = dict(state_dict), set[str]()
    # Modules inside of others come first, the model itself last.
    for carrier in sorted(carrying, key=lambda carrier: -len(carrier.path.split(".")) if carrier.path else 0):
        prefix = carrier.prefix
        fused = {key: value for key, value in result.items() if key.startswith(prefix)}
        if fused:
            tensors = {key.removeprefix(prefix): value for key, value in fused.items()}
            stock, names = carrier.carried.separate(in_state_dict(carrier.path), tensors)
            result = _substitute(fused, {f"{prefix}{name}": value for name, value in stock.items()}, result)
            converted |= {f"{prefix}{name}" for name in names}
    return result, converted


def _not_saved(name: str, reason: str) -> PatchedWeightsError:
    return PatchedWeightsError(f"{name} can't be saved in the original format: {reason}.")


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a quantizer's: a subclass, or one of a one-byte dtype."""
    tensor = local_tensor(tensor)
    return type(tensor) not in (torch.Tensor, nn.Parameter) or (
        tensor.dtype.itemsize == 1 and tensor.dtype is not torch.bool
    )
