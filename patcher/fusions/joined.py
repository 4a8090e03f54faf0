"""Modules whose projections are joined in one `nn.Linear`, and the views of the single projections."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from patcher.compat.standing_alone import SharedInput, are_values
from patcher.errors import PatchConflictError
from patcher.fusions.base import more_than_a_weight_and_bias
from patcher.fusions.fused_module import FusedModule
from patcher.fusions.old_names import ADVICE, SINGLE_REFERENCE, count_references, more_than_values, view_of
from patcher.layouts.carried import fused_layouts, is_quantized


@dataclass(frozen=True)
class Joined:
    """The projections of a class that are joined.

    Attributes:
        projections: their names, in the order of the rows.
        name: the name of the joined projection.
        biased: the projections with a bias, if only some have one.
    """

    projections: tuple[str, ...]
    name: str
    biased: tuple[str, ...] = ()

    @property
    def sizes(self) -> str:
        return f"{self.name}_sizes"


class JoinedProjections(FusedModule):
    """The base of rewritten classes whose projections are rows of one `nn.Linear`."""

    _joined: ClassVar[Joined]

    def shared_input(self) -> SharedInput:
        """Return what a rewritten forward calls for the output of each of its projections."""
        return SharedInput(self, self._joined.projections, self._joined.name)

    def are_values(self, *arguments: Any) -> bool:
        """Whether the arguments of a rewritten forward are values: see `patcher.fusions.purity`."""
        return are_values(arguments)

    def _assign(self, name: str, value: Any) -> None:
        assign_part(self, self._joined, name, value)  # type: ignore[arg-type]


def assign_part(module: nn.Module, joined: Joined, name: str, value: Any) -> None:
    """Copy the values of a layer into the rows of a projection.

    Raises:
        PatchConflictError: the layer isn't a plain `nn.Linear` of the same shape.
    """
    part = ProjectionView(module, joined, joined.projections.index(name))
    if type(value) is not nn.Linear:
        raise part._cannot(f"it takes the values of a plain nn.Linear, and this is a {type(value).__qualname__}")
    if reason := more_than_a_weight_and_bias(value):
        raise part._cannot(f"it takes the values of a plain nn.Linear, and this one {reason}")
    if _has_parent(value):
        raise part._cannot("it takes the values of a new nn.Linear, and this one is a layer of another module, too")
    parameters = value._parameters
    shared = {name for name in parameters if count_references(parameters, name) > SINGLE_REFERENCE}
    # Check everything before anything is written.
    written = [(part._rows_for(kind, tensor, is_shared=kind in shared), tensor) for kind, tensor in parameters.items()]
    for rows, tensor in written:
        _write(rows, tensor)


def _has_parent(layer: nn.Module) -> bool:
    """Whether a module has this one as a child, with which it would share the layer."""
    for children in gc.get_referrers(layer):
        if isinstance(children, dict) and any(child is layer for child in children.values()):
            for owner in gc.get_referrers(children):
                attributes = vars(owner) if isinstance(owner, nn.Module) else owner
                if isinstance(attributes, dict) and attributes.get("_modules") is children:
                    return True
    return False


@torch.no_grad()
def _write(rows: torch.Tensor | None, value: Any) -> None:
    if rows is not None:
        rows.copy_(value)


class ProjectionView:
    """A projection that has been joined: a callable whose `weight` and `bias` are views of its rows.

    A new `nn.Parameter` may be assigned to `weight` and `bias`: its values are written into the rows.
    """

    __slots__ = ("_index", "_joined", "_module", "_sizes")

    def __init__(self, module: nn.Module, joined: Joined, index: int) -> None:
        self._module, self._joined, self._index = module, joined, index
        self._sizes: tuple[int, ...] = getattr(module, joined.sizes)

    @property
    def _whole(self) -> nn.Linear:
        whole: nn.Linear = getattr(self._module, self._joined.name)
        return whole

    @property
    def _rows(self) -> tuple[int, int]:
        return sum(self._sizes[: self._index]), self.out_features

    @property
    def in_features(self) -> int:
        return self._whole.in_features

    @property
    def out_features(self) -> int:
        return self._sizes[self._index]

    @property
    def weight(self) -> torch.Tensor:
        return self._slice(self._whole.weight, "weight")

    @property
    def bias(self) -> torch.Tensor | None:
        whole: torch.Tensor | None = getattr(self._whole, "bias", None)
        return self._own_bias if whole is None else self._slice(whole, "bias")

    @property
    def _own_bias(self) -> nn.Parameter | None:
        """The bias of this projection, if only some projections have one."""
        return getattr(self._module, f"{self._joined.projections[self._index]}_bias", None)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        whole, own_bias = self._whole, self._own_bias
        # accelerate reads offloaded weights in a `forward` of the layer.
        is_plain = type(whole) is nn.Linear and type(whole.weight) is nn.Parameter and "forward" not in whole.__dict__
        if is_plain and whole.out_features == sum(self._sizes) and not more_than_a_weight_and_bias(whole):
            joined_bias: torch.Tensor | None = whole.bias
            bias = own_bias if joined_bias is None else joined_bias.narrow(0, *self._rows)
            return nn.functional.linear(features, whole.weight.narrow(0, *self._rows), bias)
        # Compute all rows, then select: also correct for a quantized projection, and one with an adapter.
        # The result of a projection is contiguous, and the original code may rely on it.
        result: torch.Tensor = whole(features).narrow(-1, *self._rows).contiguous()
        return result if own_bias is None else result + own_bias.to(result.dtype)

    def __repr__(self) -> str:
        start, size = self._rows
        return f"<rows {start} to {start + size} of {self._joined.name}, {self._whole!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(str(self._cannot(f"it has no {name!r}")))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ProjectionView.__slots__:
            super().__setattr__(name, value)
        elif name in ("weight", "bias"):
            # One reference is the caller's, one is that of this call.
            is_shared = count_references({name: value}, name) > SINGLE_REFERENCE + 2
            _write(self._rows_for(name, value, is_shared=is_shared), value)
        else:
            raise self._cannot(f"{name!r} can't be set on it")

    def __delattr__(self, name: str) -> None:
        raise self._cannot(f"{name!r} can't be deleted")

    def _cannot(self, why: str) -> PatchConflictError:
        return PatchConflictError(f"{self._describe()} and not a module: {why}. {ADVICE}")

    def _describe(self, kind: str = "") -> str:
        name = f"{type(self._module).__name__}.{self._joined.projections[self._index]}"
        return f"{name}{kind} is rows of {self._joined.name}{kind}"

    def _rows_for(self, kind: str, value: Any, *, is_shared: bool) -> torch.Tensor | None:
        """Return the rows to write a parameter to; None if there are none, and the value is None.

        Args:
            is_shared: whether there are other references to the parameter, which wouldn't see the rows.

        Raises:
            PatchConflictError: the rows can't take the values, or more than values would be lost.
        """
        rows: torch.Tensor | None = getattr(self, kind)
        shape = None if rows is None else tuple(rows.shape)
        value_shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        if shape != value_shape:
            raise self._cannot(f"its {kind} is {shape or 'None'}, and can't take {value_shape or value!r}")
        if rows is None:
            return None
        whole = getattr(self._whole, kind, None)
        if reason := more_than_values(rows, rows if whole is None else whole, value, is_shared=is_shared):
            raise self._cannot(f"its {kind} {reason}")
        return rows

    def _slice(self, whole: torch.Tensor, kind: str) -> torch.Tensor:
        rows, (start, size) = sum(self._sizes), self._rows
        if rows != getattr(self._whole, "out_features", rows):
            raise PatchConflictError(
                f"{self._describe()}, which processes share, and each has other rows of it. "
                "patcher.original_state_dict(model) gathers them; patcher.load_original_state_dict(model, state_dict) "
                "writes them."
            )
        if is_quantized(whole) and tuple(whole.shape) != (rows, self.in_features)[: whole.ndim]:
            raise self._cannot(
                f"its {kind} is quantized, and packed into {tuple(whole.shape)} without rows of its own"
            )
        return view_of(whole, lambda tensor: tensor.narrow(0, start, size), self._describe(f".{kind}"))


def part_property(joined: Joined, index: int) -> property:
    name = joined.projections[index]

    def get(self: nn.Module) -> Any:
        module = self._modules.get(name)
        if module is None:
            return ProjectionView(self, joined, index)
        if fused_layouts(self) is None:  # while the original's `__init__` runs
            return module
        raise ProjectionView(self, joined, index)._cannot(
            f"a {type(module).__qualname__} that was put into _modules is not run, only module.{name} = layer is seen"
        )

    return property(get, doc=f"`{name}`, which is joined in `{joined.name}`.")
