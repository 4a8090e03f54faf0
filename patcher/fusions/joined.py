"""Modules whose projections are rows of one `nn.Linear`: what still looks like the parts, and takes their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from patcher.errors import PatchConflictError
from patcher.fusions.base import more_than_a_weight_and_bias
from patcher.fusions.fused_module import FusedModule, view_of
from patcher.fusions.shared_input import SharedInput
from patcher.layouts.carried import fused_weights
from patcher.layouts.sharded import Copied

_ADVICE = "Take the fusions off with Patcher().apply(model) first."


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
        return SharedInput(self, self._joined)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        joined = self._joined
        if name in joined.projections and fused_weights(self) is not None:  # type: ignore[arg-type]
            assign_part(self, joined, name, value)  # type: ignore[arg-type]
        else:
            super().__setattr__(name, value)


def assign_part(module: nn.Module, joined: Joined, name: str, value: Any) -> None:
    """Move the values of a layer into the rows that a projection has.

    Raises:
        PatchConflictError: it is another layer than the one that was joined.
    """
    part = ProjectionView(module, joined, joined.projections.index(name))
    asked = f"{type(module).__name__}.{name} is rows of its {joined.name}, and takes the values of a plain nn.Linear"
    if type(value) is not nn.Linear:
        raise PatchConflictError(f"{asked}; this is a {type(value).__qualname__}. {_ADVICE}")
    if reason := more_than_a_weight_and_bias(value):
        raise PatchConflictError(f"{asked}; this one {reason}. {_ADVICE}")
    if value.weight.shape != part.weight.shape or (value.bias is None) != (part.bias is None):
        raise PatchConflictError(
            f"{asked} of {part.in_features} inputs and {part.out_features} outputs, "
            f"{'without' if part.bias is None else 'with'} bias; this one is {value}. {_ADVICE}"
        )
    part.weight = value.weight
    if value.bias is not None:
        part.bias = value.bias


class ProjectionView:
    """A projection that has been joined, for code that looks at it: its rows of the weight, and what it computes."""

    def __init__(self, module: nn.Module, joined: Joined, number: int) -> None:
        sizes: tuple[int, ...] = getattr(module, joined.sizes)
        self._name = f"{type(module).__name__}.{joined.projections[number]}"
        self._joined_name = joined.name
        self._whole: nn.Linear = getattr(module, joined.name)
        self._start, self._size = sum(sizes[:number]), sizes[number]
        self._is_in_blocks = sum(sizes) != getattr(self._whole, "out_features", sum(sizes))
        self._bias: nn.Parameter | None = getattr(module, f"{joined.projections[number]}_bias", None)

    @property
    def in_features(self) -> int:
        return self._whole.in_features

    @property
    def out_features(self) -> int:
        return self._size

    @property
    def weight(self) -> torch.Tensor:
        return self._slice(self._whole.weight)

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        self._write(self.weight, value)

    @property
    def bias(self) -> torch.Tensor | None:
        whole: torch.Tensor | None = getattr(self._whole, "bias", None)
        return self._bias if whole is None else self._slice(whole)

    @bias.setter
    def bias(self, value: torch.Tensor) -> None:
        self._write(self.bias, value)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        whole = self._whole
        is_plain = type(whole) is nn.Linear and type(whole.weight) is nn.Parameter and not self._is_in_blocks
        if is_plain and not more_than_a_weight_and_bias(whole):
            return nn.functional.linear(features, self._slice(whole.weight), self.bias)
        # All of it, and then a part: so it is right for a quantized projection and one with an adapter as well.
        # Code of the original goes on with it as with a projection's result, which is contiguous.
        result: torch.Tensor = self._whole(features).narrow(-1, self._start, self._size).contiguous()
        return result if self._bias is None else result + self._bias.to(result.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._name} is rows of {self._joined_name} and no module of its own, so it has no {name!r}. {_ADVICE}"
        )

    def _write(self, rows: torch.Tensor | None, value: Any) -> None:
        if isinstance(rows, DTensor):  # a process has some of them, or none
            raise PatchConflictError(
                f"{self._name} has rows of {self._joined_name} that are split over processes, and they can't be "
                f"written. {_ADVICE}"
            )
        if rows is None or not isinstance(value, torch.Tensor) or value.shape != rows.shape or rows.is_meta:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            has = (
                "none"
                if rows is None
                else f"{tuple(rows.shape)}{' whose values are elsewhere' if rows.is_meta else ''}"
            )
            raise PatchConflictError(f"{self._name} has rows of {has}, and can't take {found}. {_ADVICE}")
        with torch.no_grad():
            rows.copy_(value)

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        if self._is_in_blocks:
            raise PatchConflictError(
                f"{self._name} is rows of {self._joined_name}, which processes share, and each has other rows of it. "
                "patcher.original_state_dict(model) gathers them; patcher.load_original_state_dict(model, state_dict) "
                "writes them."
            )
        rows = whole.narrow(0, self._start, self._size)
        return view_of(whole, Copied.of(rows) if isinstance(rows, DTensor) else rows)


def part_property(joined: Joined, number: int) -> property:
    name = joined.projections[number]

    def get(self: nn.Module) -> Any:
        own = self._modules.get(name)  # while the original's `__init__` runs, or where somebody has put something
        return ProjectionView(self, joined, number) if own is None else own

    return property(get, doc=f"`{name}`, which is joined in `{joined.name}`.")
