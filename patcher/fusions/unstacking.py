"""The weights of experts: a stack cut into matrices while a checkpoint is read, and put together again on save.

Whatever transformers does to get the stack from the checkpoint (merging per-expert tensors, joining gate and up,
transposing) runs inside, so a checkpoint that is stacked on disk and one that isn't are the same to us.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from patcher.conversions import single
from patcher.fusions.origins import NotConvertibleError, ParameterSource
from patcher.fusions.weight_layout import Layout, LayoutConversion, Step, source_of

__all__ = ["Cut", "CutStacks", "cut_layouts"]


@dataclass(frozen=True)
class Cut:
    """A stacked parameter, and how the layers are called that it becomes.

    Attributes:
        name: the parameter, (experts, ...).
        pieces: the name of a piece, with {} for the number of the expert.
        transposed: the matrices are (in, out), a linear layer has (out, in).
        shape: the shape of the stack.
    """

    name: str
    pieces: str
    transposed: bool
    shape: tuple[int, ...]


def cut_layouts(cuts: Iterable[Cut], origins: Mapping[str, ParameterSource]) -> list[Layout]:
    """The layouts of stacks, of which those that one converter makes are cut together.

    Raises:
        NotConvertibleError: transformers makes a stack together with something that isn't cut.
    """
    by_name = {cut.name: cut for cut in cuts}
    layouts: dict[tuple[str, ...], Layout] = {}
    for name in by_name:
        source = source_of(name, origins)
        made = tuple(target for _, target in source.targets)
        if others := [target for target in made if target not in by_name]:
            raise NotConvertibleError(f"{source} makes {', '.join(others)} as well")
        layouts[source.keys] = _CutTogether(made, tuple(by_name[target] for target in made))
    return list(layouts.values())


@dataclass(frozen=True)
class _CutTogether(Layout):
    takes_lists = True

    cuts: tuple[Cut, ...]

    @property
    def target(self) -> str:
        return self.cuts[0].pieces.format(0)

    def operation(self, steps: tuple[Step, ...], prefix: str, others: tuple[str, ...]) -> LayoutConversion:
        cuts = (
            replace(cut, name=cut.name.removeprefix(prefix), pieces=cut.pieces.removeprefix(prefix))
            for cut in self.cuts
        )
        return CutStacks(steps, self.target.removeprefix(prefix), tuple(cuts))


class CutStacks(LayoutConversion):
    """Run the operations that make stacks, and cut what they make into the matrices of the experts."""

    reverses_as_stock = True

    def __init__(self, steps: tuple[Step, ...], tail: str, cuts: tuple[Cut, ...]) -> None:
        super().__init__(steps, tail)
        self.cuts = cuts

    def fuse(self, tensors: list[torch.Tensor], name: str, head: str) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for cut, stack in zip(self.cuts, tensors, strict=True):
            if tuple(stack.shape) != cut.shape:
                raise ValueError(f"{head}{cut.name} has the shape {tuple(stack.shape)}, not {cut.shape}")
            for number, matrix in enumerate(stack.unbind()):
                result[head + cut.pieces.format(number)] = matrix.t().contiguous() if cut.transposed else matrix
        return result

    def separate(self, tensors: dict[str, Any], name: str, head: str) -> list[torch.Tensor]:
        stacks = []
        for cut in self.cuts:
            stack = torch.stack([single(tensors.pop(head + cut.pieces.format(i))) for i in range(cut.shape[0])])
            stacks.append(stack.transpose(1, 2).contiguous() if cut.transposed else stack)
        return stacks

    def shapes(self, head: str) -> dict[str, tuple[int, ...]]:
        return {head + cut.name: cut.shape for cut in self.cuts}
