"""Modules whose projections are rows of one `nn.Linear`: what still looks like the parts, and takes their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from patcher.compat.standing_alone import SharedInput, are_values
from patcher.errors import PatchConflictError
from patcher.fusions.base import more_than_a_weight_and_bias
from patcher.fusions.fused_module import FusedModule
from patcher.fusions.old_names import ADVICE, ONE_HOLDER, holders, more_than_values, view_of
from patcher.layouts.carried import fused_weights


@dataclass(frozen=True)
class Joined:
    """What takes the place of the projections of a class.

    Attributes:
        projections: the names, in the order of the joined rows.
        name: the name of the joined projection.
        biased: the projections that have a bias, where not all and not none of them have one.
    """

    projections: tuple[str, ...]
    name: str
    biased: tuple[str, ...] = ()

    @property
    def sizes(self) -> str:
        return f"{self.name}_sizes"


class JoinedProjections(FusedModule):
    """What the rewritten classes share: projections that are rows of one `nn.Linear`."""

    _joined: ClassVar[Joined]

    def shared_input(self) -> SharedInput:
        """What a rewritten forward asks, call by call, for the rows of its projections."""
        return SharedInput(self, self._joined.projections, self._joined.name)

    def are_values(self, *given: Any) -> bool:
        """What a rewritten forward asks first of what it is given: whether nothing of that is anything else."""
        return are_values(given)

    def _assign(self, name: str, value: Any) -> None:
        assign_part(self, self._joined, name, value)  # type: ignore[arg-type]


def assign_part(module: nn.Module, joined: Joined, name: str, value: Any) -> None:
    """Move the values of a layer into the rows that a projection has.

    Raises:
        PatchConflictError: it is another layer than the one that was joined.
    """
    part = ProjectionView(module, joined, joined.projections.index(name))
    if type(value) is not nn.Linear:
        raise part._cannot(f"it takes the values of a plain nn.Linear, and this is a {type(value).__qualname__}")
    if reason := more_than_a_weight_and_bias(value):
        raise part._cannot(f"it takes the values of a plain nn.Linear, and this one {reason}")
    given = value._parameters
    shared = {kind for kind in given if holders(given, kind) > ONE_HOLDER}
    # Nothing is written before all of it is checked.
    written = [(part._rows_for(kind, own, is_shared=kind in shared), own) for kind, own in given.items()]
    for rows, own in written:
        _write(rows, own)


@torch.no_grad()
def _write(rows: torch.Tensor | None, value: Any) -> None:
    if rows is not None:
        rows.copy_(value)


class ProjectionView:
    """A projection that has been joined, for code that looks at it: its rows of the weight, and what it computes.

    A new `nn.Parameter` may be assigned to its `weight` and `bias`: its values are written into the rows.
    """

    __slots__ = ("_joined", "_module", "_number", "_sizes")

    def __init__(self, module: nn.Module, joined: Joined, number: int) -> None:
        self._module, self._joined, self._number = module, joined, number
        self._sizes: tuple[int, ...] = getattr(module, joined.sizes)

    @property
    def _whole(self) -> nn.Linear:
        whole: nn.Linear = getattr(self._module, self._joined.name)
        return whole

    @property
    def _rows(self) -> tuple[int, int]:
        return sum(self._sizes[: self._number]), self.out_features

    @property
    def in_features(self) -> int:
        return self._whole.in_features

    @property
    def out_features(self) -> int:
        return self._sizes[self._number]

    @property
    def weight(self) -> torch.Tensor:
        return self._slice(self._whole.weight, "weight")

    @property
    def bias(self) -> torch.Tensor | None:
        whole: torch.Tensor | None = getattr(self._whole, "bias", None)
        return self._own_bias if whole is None else self._slice(whole, "bias")

    @property
    def _own_bias(self) -> nn.Parameter | None:
        """The bias of this projection, where not all of them have one."""
        return getattr(self._module, f"{self._joined.projections[self._number]}_bias", None)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        whole, own = self._whole, self._own_bias
        is_plain = type(whole) is nn.Linear and type(whole.weight) is nn.Parameter
        if is_plain and whole.out_features == sum(self._sizes) and not more_than_a_weight_and_bias(whole):
            joined: torch.Tensor | None = whole.bias
            bias = own if joined is None else joined.narrow(0, *self._rows)
            return nn.functional.linear(features, whole.weight.narrow(0, *self._rows), bias)
        # All of it, and then a part: so it is right for a quantized projection and one with an adapter as well.
        # Code of the original goes on with it as with a projection's result, which is contiguous.
        result: torch.Tensor = whole(features).narrow(-1, *self._rows).contiguous()
        return result if own is None else result + own.to(result.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(str(self._cannot(f"it has no {name!r}")))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ProjectionView.__slots__:
            super().__setattr__(name, value)
        elif name in ("weight", "bias"):
            is_shared = holders({name: value}, name) > ONE_HOLDER + 2  # besides whoever assigns it, and this call
            _write(self._rows_for(name, value, is_shared=is_shared), value)
        else:
            raise self._cannot(f"{name!r} can't be set on it")

    def __delattr__(self, name: str) -> None:
        raise self._cannot(f"{name!r} can't be deleted")

    def _cannot(self, why: str) -> PatchConflictError:
        return PatchConflictError(f"{self._told()} and not a module: {why}. {ADVICE}")

    def _told(self, kind: str = "") -> str:
        name = f"{type(self._module).__name__}.{self._joined.projections[self._number]}"
        return f"{name}{kind} is rows of {self._joined.name}{kind}"

    def _rows_for(self, kind: str, value: Any, *, is_shared: bool) -> torch.Tensor | None:
        """The rows that take the values of a parameter; None where there are none, and the value is None.

        Args:
            is_shared: whether somebody else holds the parameter, who wouldn't write to the rows with it.

        Raises:
            PatchConflictError: the rows can't take them, or more than values would be lost.
        """
        rows: torch.Tensor | None = getattr(self, kind)
        has, given = (tuple(each.shape) if isinstance(each, torch.Tensor) else each for each in (rows, value))
        if has != given:
            raise self._cannot(f"its {kind} is {has or 'None'}, and can't take {given or value!r}")
        if rows is None:
            return None
        whole = getattr(self._whole, kind, None)
        if reason := more_than_values(rows, rows if whole is None else whole, value, is_shared=is_shared):
            raise self._cannot(f"its {kind} {reason}")
        return rows

    def _slice(self, whole: torch.Tensor, kind: str) -> torch.Tensor:
        if sum(self._sizes) != getattr(self._whole, "out_features", sum(self._sizes)):
            raise PatchConflictError(
                f"{self._told()}, which processes share, and each has other rows of it. "
                "patcher.original_state_dict(model) gathers them; patcher.load_original_state_dict(model, state_dict) "
                "writes them."
            )
        start, size = self._rows
        return view_of(whole, lambda tensor: tensor.narrow(0, start, size), self._told(f".{kind}"))


def part_property(joined: Joined, number: int) -> property:
    name = joined.projections[number]

    def get(self: nn.Module) -> Any:
        own = self._modules.get(name)
        if own is None:
            return ProjectionView(self, joined, number)
        if fused_weights(self) is None:  # while the original's `__init__` runs
            return own
        raise ProjectionView(self, joined, number)._cannot(
            f"a {type(own).__qualname__} that was put into _modules is not run, only module.{name} = layer is seen"
        )

    return property(get, doc=f"`{name}`, which is joined in `{joined.name}`.")
