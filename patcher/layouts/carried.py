"""What a module carries whose parameters are others than in transformers: how either become the other.

A frozen value on the module: it is copied, pickled and moved with it, and knows no model and no path. A state dict of
any model that holds the module becomes one in the layout of transformers by it.
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

#: On such a module: its `ModuleLayouts`.
CARRIED = "_patcher_layouts"


#: On a class that was made for one process: the function, and its arguments, by which another process makes it.
RECIPE = "_patcher_recipe"


class PickledClass:
    """A class in a pickle, by its recipe: cloudpickle and dill write down any other, with all that it refers to."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    @staticmethod
    def of(cls: Any) -> Any:
        """What to pickle for a class: the class itself, if every process has it."""
        return PickledClass(cls) if RECIPE in vars(cls) else cls

    @staticmethod
    def read(value: Any) -> Any:
        """The class, of what was pickled for it."""
        return value.cls if isinstance(value, PickledClass) else value

    def __reduce__(self) -> Any:  # read as the class itself
        make, *args = vars(self.cls)[RECIPE]
        return make, tuple(PickledClass.of(each) if isinstance(each, type) else each for each in args)

    def __deepcopy__(self, memo: Any) -> PickledClass:
        return self


def reduce_by_recipe(self: Any, protocol: Any) -> Any:
    """The `__reduce_ex__` of such a class: whoever reads the pickle makes its own. Not for what derives from one."""
    cls = type(self)
    if RECIPE not in vars(cls):
        return object.__reduce_ex__(self, protocol)
    return (_bare, (PickledClass(cls),), self.__getstate__())


def _bare(pickled: Any) -> Any:
    return object.__new__(PickledClass.read(pickled))


@dataclass(frozen=True)
class ModuleLayouts:
    """How the parameters of a module become those of transformers.

    Attributes:
        layouts: what a fusion has made of parameters of transformers.
        converted: what conversions of a patcher have made of tensors of a checkpoint.
        fusion: the name of the family that has fused the module, or the family; None where a file has it written out.
        original: the class of a fused module as transformers has it.
        names: what the state dict of a fused module has as transformers builds it, in order.
    """

    layouts: tuple[Layout, ...] = ()
    converted: tuple[Layout, ...] = ()
    fusion: Any = None
    original: type[nn.Module] | None = None
    names: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleLayouts:
        return self

    def __reduce__(self) -> Any:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        original = None if self.original is None else PickledClass.of(self.original)
        return (_unpickled, (values | {"original": original},))

    @property
    def all(self) -> tuple[Layout, ...]:
        """All layouts; what is fused is taken apart before what was converted."""
        return (*self.layouts, *self.converted)

    @property
    def fused(self) -> frozenset[str]:
        """The parameters that only the module has, of those of its fusion."""
        return frozenset(name for layout in self.layouts for name in layout.fused)

    @property
    def stock(self) -> frozenset[str]:
        """The parameters that only the module of transformers has, of those of the fusion."""
        return frozenset(name for layout in self.layouts for name in layout.stock)

    def separate(self, path: str, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """The tensors of one module in the layout of transformers, by their names in it.

        Returns:
            They, in the order of transformers, and which of them are tensors of a checkpoint, to be converted.

        Raises:
            PatchedWeightsError: the module has been changed so that they can't be known.
        """
        self._check(path, tensors)
        result, converted = dict(tensors), set[str]()
        for layout in self.all:
            parts = _separated(layout, inside(path), result)
            result = _in_place_of(layout.fused, parts, result)
            if isinstance(layout, Converted):
                converted |= parts.keys()
        if self.names:
            order = {name: number for number, name in enumerate(self.names)}
            result = {name: result[name] for name in sorted(result, key=lambda name: order.get(name, len(order)))}
        return result, converted

    def _check(self, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise for what is quantized, was added to a fused module, or is there in both forms."""
        prefix, fused = inside(path), self.fused
        owners = {name.rpartition(".")[0]: name for name in tensors}
        within = tuple({f"{owner}." for name in fused if (owner := name.rpartition(".")[0])})
        for layout in self.all:
            for name in layout.fused:
                value = tensors.get(name, tensors.get(owners.get(name, "")))  # some hold `weight._data` in its place
                if value is not None and (name not in tensors or is_quantized(value)):
                    raise _cannot(
                        f"{prefix}{name}",
                        f"it is quantized ({type(value).__name__} of {value.dtype}), and scales of joined rows aren't "
                        "those of each (if only fusions made this layout, save_original_format=False saves it as it "
                        "is)",
                    )
        for layout in self.layouts:
            both = [name for name in layout.stock if name in tensors and name not in layout.fused]
            if both and not set(layout.fused).isdisjoint(tensors):
                raise _cannot(
                    f"{prefix}{both[0]}",
                    f"{', '.join(layout.fused[:2])} of a fused module holds it, and both are there. Assign "
                    "layers to a fused module by its attributes, or take the fusions off with "
                    "Patcher().apply(model)",
                )
        for name in sorted(tensors.keys() - fused - set(self.names)):
            if name.startswith(within):
                raise _cannot(
                    f"{prefix}{name}",
                    "it was added to a fused layer, and the checkpoint has no place for it. Take it off before "
                    "saving, or take the fusions off with Patcher().apply(model) before it is added",
                )


@torch.no_grad()
def _separated(layout: Layout, prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of one layout; nothing where there is nothing of it: of a part of a model, or in stock's layout."""
    found = {name: tensors[name] for name in layout.fused if name in tensors}
    if not found:
        return {}
    if absent := [name for name in layout.fused if name not in found]:
        raise _cannot(
            f"{prefix}{absent[0]}",
            f"it is missing in the state dict, and {layout} has made it with others. Save a state dict with all "
            "of them",
        )
    for (name, tensor), shape in zip(found.items(), layout.fused_shapes(), strict=True):
        if tensor.shape != shape:
            raise _cannot(
                f"{prefix}{name}",
                f"it had the shape {tuple(shape)} when it was made, it has {tuple(tensor.shape)} now",
            )
    parts = dict(zip(layout.stock, layout.separate(list(found.values())), strict=True))
    for name, was in zip(layout.stock, layout.stock_shapes, strict=True):
        if tuple(parts[name].shape) != tuple(was):
            raise _cannot(f"{prefix}{name}", f"{layout} gives {tuple(parts[name].shape)}, and it was {was}")
    return parts if isinstance(layout, Converted) else {n: by_itself(part.contiguous()) for n, part in parts.items()}


def _in_place_of(
    gone: Collection[str], made: dict[str, torch.Tensor], held: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors with others in the place of the first of some: shards depend on the order."""
    result: dict[str, torch.Tensor] = {}
    for name, value in held.items():
        if name not in gone:
            result[name] = value
        elif made:
            result, made = result | made, {}
    return result


def _unpickled(values: dict[str, Any]) -> ModuleLayouts:
    importlib.import_module("patcher").install()  # so that the model saves there as it does here
    return ModuleLayouts(**values | {"original": PickledClass.read(values["original"])})


class Carrier(NamedTuple):
    """A module that carries layouts, its path, and what it carries."""

    path: str
    module: nn.Module
    carried: ModuleLayouts

    @property
    def prefix(self) -> str:
        """What its names in a state dict begin with."""
        return inside(in_state_dict(self.path))

    @property
    def fused(self) -> list[Layout]:
        """The layouts of its fusion, by the names that the state dict of the model has."""
        return [layout.named(self.prefix.__add__) for layout in self.carried.layouts]

    @property
    def all(self) -> list[Layout]:
        """All of its layouts, by these names."""
        return [layout.named(self.prefix.__add__) for layout in self.carried.all]


def carried_by(module: nn.Module) -> ModuleLayouts | None:
    """What a module carries, None if its parameters are those of transformers."""
    return module.__dict__.get(CARRIED)


def carriers(model: nn.Module) -> list[Carrier]:
    """The modules of a model whose parameters are others than in transformers."""
    return [
        Carrier(path, module, found)
        for path, module in named_modules(model)
        if (found := carried_by(module)) is not None
    ]


def fused_layouts(module: nn.Module) -> ModuleLayouts | None:
    """What a fused module carries, None if it isn't fused."""
    found = carried_by(module)
    return found if found is not None and found.layouts else None


def fused_modules(model: nn.Module) -> list[Carrier]:
    """The fused modules of a model."""
    return [each for each in carriers(model) if each.carried.layouts]


def separated(
    carrying: Iterable[Carrier], state_dict: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """A state dict in the layout of transformers, in the order that the state dict of its model has.

    Returns:
        It, and which of its tensors are those of a checkpoint, which transformers would convert.

    Raises:
        PatchedWeightsError: something in it can't be known.
    """
    result, converted = dict(state_dict), set[str]()
    # What is inside of another such module comes first, the model itself last.
    for each in sorted(carrying, key=lambda each: -len(each.path.split(".")) if each.path else 0):
        own = {key: value for key, value in result.items() if key.startswith(each.prefix)}
        if own:
            tensors = {key.removeprefix(each.prefix): value for key, value in own.items()}
            found, names = each.carried.separate(in_state_dict(each.path), tensors)
            result = _in_place_of(own, {f"{each.prefix}{name}": value for name, value in found.items()}, result)
            converted |= {f"{each.prefix}{name}" for name in names}
    return result, converted


def _cannot(name: str, reason: str) -> PatchedWeightsError:
    return PatchedWeightsError(f"{name} can't be saved in the original format: {reason}.")


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a quantizer has made the tensor: by its type, or since its numbers are of one byte."""
    tensor = local_tensor(tensor)
    return type(tensor) not in (torch.Tensor, nn.Parameter) or (
        tensor.dtype.itemsize == 1 and tensor.dtype is not torch.bool
    )
