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
from patcher.fusions.matrices import Matrices
from patcher.fusions.origins import NotConvertibleError, Origins
from patcher.fusions.weight_layout import Layout, LayoutConversion, Step
from patcher.patterns import common_prefix


@dataclass(frozen=True)
class Cut:
    """A stacked parameter and the layers that it becomes, in a module whose names begin with `prefix`."""

    prefix: str
    layout: Matrices

    @property
    def name(self) -> str:
        return self.prefix + self.layout.stock[0]

    @property
    def pieces(self) -> list[str]:
        return [self.prefix + name for name in self.layout.fused]


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
        prefix = common_prefix([by_name[target].prefix for target in made])
        relative = tuple(
            replace(by_name[target], prefix=by_name[target].prefix.removeprefix(prefix)) for target in made
        )
        target = by_name[made[0]].pieces[0]
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
            result |= zip(cut.pieces, cut.layout.fuse([stack]), strict=True)
        return result

    def separate(self, tensors: dict[str, Any], name: str) -> list[torch.Tensor]:
        return [
            cut.layout.separate([single(tensors.pop(piece)) for piece in cut.pieces])[0] for cut in self._cuts_at(name)
        ]

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        return {cut.name: cut.layout.stock_shapes[0] for cut in self._cuts_at(name)}

    def _cuts_at(self, name: str) -> list[Cut]:
        """The cuts with whole names, in the layer of which the first piece has this name."""
        head = name.removesuffix(self.cuts[0].pieces[0])
        return [replace(cut, prefix=head + cut.prefix) for cut in self.cuts]
