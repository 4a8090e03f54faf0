"""The weights of experts: a stack cut into matrices while a checkpoint is read, and put together again on save.

Whatever transformers does to get the stack from the checkpoint (merging per-expert tensors, joining gate and up,
transposing) runs inside, so a checkpoint that is stacked on disk and one that isn't are the same to us.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from patcher.conversions.transforms import single
from patcher.fusions.origins import NotConvertibleError, Origins
from patcher.fusions.weight_layout import Layout, LayoutConversion, Step
from patcher.patterns import common_prefix


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

    def under(self, prefix: str) -> Cut:
        """The same with names that start after `prefix`."""
        return replace(self, name=self.name.removeprefix(prefix), pieces=self.pieces.removeprefix(prefix))


def cut_layouts(cuts: Iterable[Cut], origins: Origins) -> list[Layout]:
    """The layouts of stacks, of which those that one converter makes are cut together.

    Raises:
        NotConvertibleError: transformers makes a stack together with something that isn't cut.
    """
    by_name = {cut.name: cut for cut in cuts}
    layouts: dict[tuple[str, ...], Layout] = {}
    for name in by_name:
        source = origins[name]
        made = tuple(target for _, target in source.targets)
        if others := [target for target in made if target not in by_name]:
            raise NotConvertibleError(f"{source} makes {', '.join(others)} as well")
        prefix = common_prefix(list(made))
        relative = tuple(by_name[target].under(prefix) for target in made)
        target = by_name[made[0]].pieces.format(0)
        layouts[source.keys] = Layout(made, target, partial(CutStacks, cuts=relative), takes_lists=True)
    return list(layouts.values())


class CutStacks(LayoutConversion):
    """Run the operations that make stacks, and cut what they make into the matrices of the experts."""

    reverses_as_stock = True

    def __init__(
        self, steps: tuple[Step, ...], tail: str, others: tuple[str, ...] = (), cuts: tuple[Cut, ...] = ()
    ) -> None:
        super().__init__(steps, tail, others)
        self.cuts = cuts

    def fuse(self, tensors: list[torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for cut, stack in zip(self._cuts_at(name), tensors, strict=True):
            if tuple(stack.shape) != cut.shape:
                raise ValueError(f"{cut.name} has the shape {tuple(stack.shape)}, not {cut.shape}")
            for number, matrix in enumerate(stack.unbind()):
                result[cut.pieces.format(number)] = matrix.t().contiguous() if cut.transposed else matrix
        return result

    def separate(self, tensors: dict[str, Any], name: str) -> list[torch.Tensor]:
        stacks = []
        for cut in self._cuts_at(name):
            stack = torch.stack([single(tensors.pop(cut.pieces.format(i))) for i in range(cut.shape[0])])
            stacks.append(stack.transpose(1, 2).contiguous() if cut.transposed else stack)
        return stacks

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        return {cut.name: cut.shape for cut in self._cuts_at(name)}

    def _cuts_at(self, name: str) -> list[Cut]:
        """The cuts with whole names, in the layer of which the first piece has this name."""
        head = name.removesuffix(self.cuts[0].pieces.format(0))
        return [replace(cut, name=head + cut.name, pieces=head + cut.pieces) for cut in self.cuts]
