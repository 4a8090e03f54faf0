"""The tensors of a checkpoint that one conversion takes at once, and what it makes of them, by names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter

from patcher.layouts.tracing import LayerTrace, trace_of
from patcher.layouts.transforms import single
from patcher.patterns import common_prefix, without_numbers


def made_by_name(converter: WeightConverter, first: str) -> list[str]:
    """The parameters that a converter makes, by its patterns alone, from the first of them."""
    target, *targets = converter.target_patterns
    return [first, *(first.replace(target, other) for other in targets)]


class Group:
    """What one converter takes for the parameters of one layer.

    Attributes:
        first: the first of the parameters, which a load calls the group by.
        taken: (key, source pattern) of all that it takes.
        shapes: key -> the shape of its tensor.
    """

    def __init__(self, converter: WeightConverter, first: str) -> None:
        self.converter = converter
        self.first = first
        self.taken: list[tuple[str, str]] = []
        self.shapes: dict[str, torch.Size] = {}
        # With the trace of the load, if it has one: that knows the key that was renamed last, so it is told at once.
        self._copy = deepcopy(converter)

    def add(self, key: str, pattern: str, tensor: torch.Tensor, read: Any = None) -> None:
        """Take a tensor of the meta device, whose key was renamed last.

        Args:
            read: gives its values, where they are to be converted.
        """
        self.taken.append((key, pattern))
        self.shapes[key] = tensor.shape
        self._copy.add_tensor(self.first, key, pattern, tensor if read is None else read)  # type: ignore[arg-type]

    def convert(self, model: Any, info: Any = None) -> dict[str, torch.Size]:
        """What it makes, and of which shapes; once, with the trace of the load.

        Args:
            model: the one that operations look at.
            info: what is known of the load, to note an error there instead of raising it as it is.
        """
        return {name: tensor.shape for name, tensor in self.made(model, info).items()}

    @torch.no_grad()
    def made(self, model: Any, info: Any = None) -> dict[str, torch.Tensor]:
        """What it makes; once, with the trace of the load. As `convert`."""
        made = self._copy.convert(self.first, model=model, config=model.config, loading_info=info)
        return {name: single(tensor) for name, tensor in made.items()}

    def take_at_its_word(self) -> None:
        """Have the trace of the load say that it was converted."""
        if trace := trace_of(self._copy):
            trace.failed = [name for name in trace.failed if name != self.first]
            trace.entries.append(LayerTrace(self.first, {"": [(key, torch.Size()) for key, _ in self.taken]}, {}, []))


class Alike:
    """What groups have made, for those of layers that are alike: only one of these is converted."""

    def __init__(self) -> None:
        #: converter, name without numbers and shapes -> the first parameter, and what was made
        self._known: dict[Any, tuple[str, Mapping[str, torch.Size]]] = {}

    def keep(self, group: Group, made: Mapping[str, torch.Size]) -> None:
        self._known[self._kind(group)] = group.first, made

    def made_by(self, group: Group) -> dict[str, torch.Size] | None:
        """What a group makes, if one like it has been converted, whose trace says so."""
        first, made = self._known.get(self._kind(group), ("", {}))
        head = common_prefix([first, *made])
        tail = first.removeprefix(head)
        if not made or not group.first.endswith(tail):
            return None
        return {group.first.removesuffix(tail) + name.removeprefix(head): shape for name, shape in made.items()}

    def _kind(self, group: Group) -> Any:
        taken = tuple((pattern, group.shapes[key]) for key, pattern in group.taken)
        return id(group.converter), without_numbers(group.first), taken
