"""What a fused module carries so that its weights can be given back wherever it goes.

A frozen value on the module: it is copied, pickled and moved with it, and knows no model and no path. A state dict of
any model that holds the module becomes one in the layout of transformers by it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patcher.compat.modeling_code import PickledClass
from patcher.compat.models import named_modules
from patcher.conversions.layouts import Layout, lies_in_blocks
from patcher.conversions.sharded import one_piece
from patcher.conversions.transforms import by_itself
from patcher.errors import PatchedWeightsError
from patcher.patterns import in_state_dict, inside

#: On a fused module: its `FusedWeights`.
FUSED = "_patcher_fused"


@dataclass(frozen=True)
class FusedWeights:
    """How the weights of a fused module are given back.

    Attributes:
        fusion: the name of the family, or the family.
        original: the class of the module as transformers has it.
        layouts: which parameters have become which.
        names: what the state dict of the module has as transformers builds it, in order.
    """

    fusion: Any
    original: type[nn.Module]
    layouts: tuple[Layout, ...]
    names: tuple[str, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedWeights:
        return self

    def __reduce__(self) -> Any:
        return (_unpickled, (self.fusion, PickledClass.of(self.original), self.layouts, self.names))

    @property
    def fused(self) -> frozenset[str]:
        """The parameters that only the fused module has."""
        return frozenset(name for layout in self.layouts for name in layout.fused)

    @property
    def stock(self) -> frozenset[str]:
        """The parameters that only the module of transformers has."""
        return frozenset(name for layout in self.layouts for name in layout.stock)

    def separate(self, path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters of transformers, from the tensors of one module by their names in it.

        Raises:
            PatchedWeightsError: the module has been changed so that they can't be given back.
        """
        prefix, result = inside(path), {}
        owners = {name.rpartition(".")[0]: name for name in tensors}
        for name in (name for layout in self.layouts for name in layout.fused):
            value = tensors.get(name, tensors.get(owners.get(name, "")))  # some hold `weight._data` in its place
            if value is not None and (name not in tensors or is_quantized(value)):
                raise _cannot(
                    f"{prefix}{name}",
                    f"it is quantized ({type(value).__name__} of {value.dtype}), its companions "
                    "can't be split (if only fusions made this layout, save_original_format=False saves it as it is)",
                )
        self._check_names(path, tensors)
        for layout in self.layouts:
            found = [tensors[name] for name in layout.fused if name in tensors]
            if not found:
                continue  # a state dict of a part of the model, or one in the layout of transformers
            if len(found) < len(layout.fused):
                absent = next(name for name in layout.fused if name not in tensors)
                raise _cannot(f"{prefix}{absent}", "it is missing in the state dict")
            for name, tensor, shape in zip(layout.fused, found, layout.fused_shapes(), strict=True):
                if tensor.shape != shape:
                    raise _cannot(
                        f"{prefix}{name}",
                        f"it had the shape {tuple(shape)} when it was fused, it has {tuple(tensor.shape)} now",
                    )
            with torch.no_grad():
                parts = layout.separate(found)
            for name, part, was in zip(layout.stock, parts, layout.stock_shapes, strict=True):
                if tuple(part.shape) != was:
                    raise _cannot(f"{prefix}{name}", f"{layout} gives back {tuple(part.shape)}, and it was {was}")
                result[name] = by_itself(part.contiguous())
        return result

    def _check_names(self, path: str, tensors: Iterable[str]) -> None:
        names = set(tensors)
        fused, prefix = self.fused, inside(path)
        for layout in self.layouts:
            for name in layout.stock if not names.isdisjoint(layout.fused) else ():
                if name in names and name not in layout.fused:
                    raise _cannot(
                        f"{prefix}{name}",
                        f"{', '.join(layout.fused[:2])} of a fused module stands for it, and both are there. Assign "
                        "layers to a fused module by its attributes, or take the fusions off with "
                        "Patcher().apply(model)",
                    )
        owners = tuple({f"{owner}." for name in fused if (owner := name.rpartition(".")[0])})
        for name in sorted(names - fused - set(self.names)):
            if name.startswith(owners):
                raise _cannot(
                    f"{prefix}{name}",
                    "it was added to a fused layer, and the checkpoint has no place for it. Take it off before "
                    "saving, or take the fusions off with Patcher().apply(model) before it is added",
                )


def _unpickled(fusion: Any, original: Any, *values: Any) -> FusedWeights:
    importlib.import_module("patcher").install()  # so that the model saves there as it does here
    return FusedWeights(fusion, PickledClass.read(original), *values)


def fused_weights(module: nn.Module) -> FusedWeights | None:
    """What a module carries, None if it isn't fused."""
    return module.__dict__.get(FUSED)


def is_shared(carried: FusedWeights) -> bool:
    """Whether what this process has of a fused module is not what others have: other rows."""
    return any(map(lies_in_blocks, carried.layouts))


def fused_modules(model: nn.Module) -> list[tuple[str, nn.Module, FusedWeights]]:
    """(path, module, what it carries) of each fused module of a model, the paths as state dicts have them."""
    return [
        (in_state_dict(path), module, found)
        for path, module in named_modules(model)
        if (found := fused_weights(module))
    ]


def separated(
    fused: Iterable[tuple[str, nn.Module, FusedWeights]], state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A state dict in the layout of transformers, in the order that the state dict of its model has.

    Raises:
        PatchedWeightsError: something in it can't be given back.
    """
    result = dict(state_dict)
    by_depth: dict[int, dict[str, FusedWeights]] = {}
    for path, _, carried in fused:
        by_depth.setdefault(len(path.split(".")) if path else 0, {})[path] = carried
    for depth in sorted(by_depth, reverse=True):  # what is fused inside of a fused module comes first
        owners: dict[str, dict[str, torch.Tensor]] = {path: {} for path in by_depth[depth]}
        for key, value in result.items():
            path = ".".join(key.split(".")[:depth])
            if path in owners:
                owners[path][key.removeprefix(inside(path))] = value
        ordered = {path: _given_back(path, by_depth[depth][path], own) for path, own in owners.items()}
        # In the place of the first of them: what transformers makes shards of goes by the order.
        replaced: dict[str, torch.Tensor] = {}
        for key, value in result.items():
            path = ".".join(key.split(".")[:depth])
            if path not in owners:
                replaced[key] = value
            else:
                replaced |= ordered.pop(path, {})
        result = replaced
    return result


def _given_back(path: str, carried: FusedWeights, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a state dict has of one module, in the layout of transformers."""
    fused = carried.fused
    found = {name: value for name, value in own.items() if name not in fused}
    found |= carried.separate(path, own)
    names = [name for name in carried.names if name in found]
    names += [name for name in found if name not in carried.names]
    return {f"{inside(path)}{name}": found[name] for name in names}


def _cannot(name: str, reason: str) -> PatchedWeightsError:
    return PatchedWeightsError(f"{name} can't be saved in the original format: {reason}.")


def is_quantized(tensor: torch.Tensor) -> bool:
    tensor = one_piece(tensor)
    return type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.dtype.itemsize == 1
