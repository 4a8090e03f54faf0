"""Modules whose projections are rows of one `nn.Linear`: how they are made, and what still looks like the parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from patcher.compat.models import is_initialized, mark_initialized

if TYPE_CHECKING:
    from patcher.fusions.tracing import Guards


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


class JoinedProjections:
    """What the rewritten classes share: projections that are rows of one `nn.Linear`."""

    _joined: ClassVar[Joined]
    _made_by: ClassVar[tuple[Any, type[nn.Module], Guards]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        join(self, self._joined)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time: another process makes it again.
        fusion, original, guards = self._made_by
        return (_bare, (fusion, original, self._joined, guards), self.__getstate__())


def _bare(fusion: Any, original: type[nn.Module], joined: Joined, guards: Guards) -> nn.Module:
    cls: type[nn.Module] = fusion.subclass(original, joined, guards)
    return cls.__new__(cls)


def join(module: nn.Module, joined: Joined) -> None:
    """Put one `nn.Linear` in the place of the projections of a module that stands, with their values."""
    linears: list[nn.Linear] = [module._modules[name] for name in joined.projections]  # type: ignore[misc]
    sizes = tuple(part.out_features for part in linears)
    biases = [bias for part in linears if (bias := part._parameters["bias"]) is not None]
    with torch.device("meta"):
        linear = nn.Linear(linears[0].in_features, sum(sizes), bias=len(biases) == len(linears))
    linear.weight = _rows([part._parameters["weight"] for part in linears])
    if len(biases) == len(linears):
        linear.bias = _rows(biases)
    linear.train(linears[0].training)
    if all(is_initialized(part) for part in linears):
        mark_initialized(linear)
    # In the place of the first of them, so that parameters keep their order.
    modules = list(module._modules.items())
    module._modules.clear()
    for name, child in modules:
        if name == next(name for name, _ in modules if name in joined.projections):
            module._modules[joined.name] = linear
        if name not in joined.projections:
            module._modules[name] = child
    setattr(module, joined.sizes, sizes)
    for name in joined.biased:
        bias = linears[joined.projections.index(name)].bias
        module.register_parameter(f"{name}_bias", bias)


def _rows(parts: list[Any]) -> nn.Parameter:
    with torch.no_grad():
        joined = nn.Parameter(torch.cat(list(parts)), requires_grad=any(part.requires_grad for part in parts))
    if all(is_initialized(part) for part in parts):
        mark_initialized(joined)
    return joined


class ProjectionView:
    """A projection that has been joined, for code that looks at it: its rows of the weight, and what it computes."""

    def __init__(self, module: nn.Module, joined: Joined, number: int) -> None:
        sizes: tuple[int, ...] = getattr(module, joined.sizes)
        self._whole: nn.Linear = getattr(module, joined.name)
        self._start, self._size = sum(sizes[:number]), sizes[number]
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

    @property
    def bias(self) -> torch.Tensor | None:
        whole: torch.Tensor | None = getattr(self._whole, "bias", None)
        return self._bias if whole is None else self._slice(whole)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        # All of it, and then a part: so it is right for a quantized projection and one with an adapter as well.
        # Code of the original goes on with it as with a projection's result, which is contiguous.
        result: torch.Tensor = self._whole(features).narrow(-1, self._start, self._size).contiguous()
        return result if self._bias is None else result + self._bias.to(result.dtype)

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        rows = whole.narrow(0, self._start, self._size)
        if is_initialized(whole):
            mark_initialized(rows)  # transformers' initialisation asks the tensor that it is given
        return rows


def part_property(joined: Joined, number: int) -> property:
    name = joined.projections[number]

    def get(self: nn.Module) -> Any:
        own = self._modules.get(name)  # while the original's `__init__` runs, or where somebody has put something
        return ProjectionView(self, joined, number) if own is None else own

    return property(get, doc=f"`{name}`, which is joined in `{joined.name}`.")
