"""What fused parameters are made of: the parameters that transformers has for a model, and what each is read from.

transformers may have to rename, split, permute or merge tensors of the checkpoint to get them. Its conversions run
when one of the parts that they make is first read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from patcher.compat.conversions import copy_transform, dot_natural_key, key_renamer, stock_revert
from patcher.compat.models import ModelView
from patcher.compat.quantizers import is_of_quantizer
from patcher.layouts.groups import Alike, Group, made_by_name
from patcher.layouts.sources import Computation, Computed, Conversion, dtype_of, on_meta
from patcher.layouts.tracing import trace_of
from patcher.layouts.transforms import describe, has_known_operations, single


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter of the model as transformers has it.

    Attributes:
        source: what it is read from.
        keys: the keys of the checkpoint that it takes.
    """

    source: Any
    keys: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Parts:
    """The parameters that were wanted, the rest of the checkpoint, and what keeps others from being made.

    Attributes:
        found: those that the checkpoint has.
        rest: the checkpoint without what they take.
        unused: the keys of which no parameter is made.
        twice: what several keys would make.
        failed: the conversions of transformers that raise.
        lacking: the keys that these would need.
    """

    found: dict[str, Part] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def add(self, name: str, part: Part) -> None:
        if name in self.found:
            self.twice.append(f"{name} twice: as {self.found[name].keys[0]}, and as {', '.join(part.keys)}")
        self.found[name] = part


@dataclass(frozen=True, eq=False)
class StockParameters:
    """A model as transformers has it, of a load that fuses.

    Attributes:
        model: the model with its fused modules.
        tensors: the state dict that it would have without these, on the meta device.
        wanted: the parameters that fused ones are made of.
        conversions: those of the load, in their order.
        unknown: the keys of the checkpoint whose shapes nobody knows.
        simulated: whether nothing will be read: of layers that are alike one is converted.
    """

    model: PreTrainedModel
    tensors: dict[str, torch.Tensor]
    wanted: Set[str]
    conversions: Sequence[WeightTransform]
    unknown: Set[str] = frozenset()
    simulated: bool = False

    @property
    def view(self) -> Any:
        """The model as operations see it, which look at its parameters while they convert."""
        return ModelView(self.model, get_parameter=self.tensors.__getitem__, state_dict=lambda: self.tensors)

    def parts(self, checkpoint: Mapping[str, Any]) -> Parts:
        """The wanted parameters, as a checkpoint has them."""
        parts = Parts(rest=dict(checkpoint))
        groups: dict[str, Group] = {}
        rename = key_renamer(self.conversions, self.model, self.tensors)
        for key in sorted(checkpoint, key=dot_natural_key):
            renamed, taker, pattern = rename(key)
            if isinstance(taker, WeightConverter):
                if renamed not in groups:
                    groups[renamed] = Group(taker, renamed)
                groups[renamed].add(key, pattern or "", on_meta(checkpoint[key]))
            elif renamed in self.wanted:
                parts.add(renamed, Part(parts.rest.pop(key), (key,)))
            if renamed not in self.tensors:
                parts.unused[key] = renamed
        alike = Alike()
        for group in groups.values():
            if group.first in self.tensors:
                self._take(group, alike, parts)
        return parts

    def _take(self, group: Group, alike: Alike, parts: Parts) -> None:
        """Put the parts that a converter makes to the others, if any of them is wanted."""
        of_quantizer = any(map(is_of_quantizer, group.converter.operations))
        if self.wanted.isdisjoint(made_by_name(group.converter, group.first)):
            if of_quantizer:
                return  # it makes what its patterns say, and writes to the parameters of the model on its way
            # It may still make one, under a name that its patterns don't tell.
            try:
                empty = {key: torch.empty(shape, device="meta") for key, shape in group.shapes.items()}
                made = {name: tensor.shape for name, tensor in converted(group, self.view, empty).items()}
            except Exception:
                return
        else:
            try:
                made = self._made(group, alike)
            except Exception as error:
                absent = self._lacking(group)
                parts.lacking.extend(absent)
                if not absent:
                    parts.failed.append(f"{describe(group.converter)} raises {type(error).__name__}: {error}")
                return
        if self.wanted.isdisjoint(made):
            return
        if any(shape != self.tensors[name].shape for name, shape in made.items() if name in self.wanted):
            parts.lacking.extend(self._lacking(group))
        sources = {key: parts.rest.pop(key) for key in group.shapes}
        convert = partial(converted, group, self.view)
        can_be_traced = has_known_operations(group.converter) and not of_quantizer
        computation = Conversion(convert, sources) if can_be_traced else Computation(partial(convert, sources))
        dtype = dtype_of(next(iter(sources.values())))
        keys = tuple(sources)
        for name, shape in made.items():
            source = Computed(computation, name, shape, dtype)
            if name in self.wanted:
                parts.add(name, Part(source, keys))
            else:
                parts.rest[name] = source

    def _made(self, group: Group, alike: Alike) -> dict[str, torch.Size]:
        """What a converter makes, and of which shapes; the trace of the load has it, since it will not run again."""
        if not self.unknown.isdisjoint(group.shapes):
            group.take_at_its_word()
            names = made_by_name(group.converter, group.first)
            return {name: self.tensors[name].shape for name in names if name in self.tensors}
        made = alike.made_by(group) if self.simulated else None
        if made is None:
            made = group.convert(self.view)
            alike.keep(group, made)
        return made

    def _lacking(self, group: Group) -> list[str]:
        """The keys that the checkpoint should have besides, as far as the reverse of a converter tells."""
        between = key_renamer(each for each in self.conversions if not isinstance(each, WeightConverter))
        #: the name that the converter meets -> the key
        renamed = {between(key)[0]: key for key in group.shapes}
        try:
            whole = {name: self.tensors[name] for name in made_by_name(group.converter, group.first)}
            expected = stock_revert(self.view, whole, [copy_transform(_plain(group.converter))])
        except Exception:  # it may have none, and then there is nothing to tell
            return []
        # In the names that the converter meets; the checkpoint's own may begin otherwise.
        named, key = next(iter(renamed.items()))
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(named), reversed(key), strict=False))
        end = sum(1 for _ in alike)
        head, own = named[: len(named) - end], key[: len(key) - end]
        absent = sorted(expected.keys() - renamed.keys(), key=dot_natural_key)
        return [own + name.removeprefix(head) if name.startswith(head) else name for name in absent]


def _plain(converter: WeightConverter) -> WeightConverter:
    """A converter without the trace of the load."""
    trace = trace_of(converter)
    return converter if trace is None else trace.transform  # type: ignore[return-value]


@torch.no_grad()
def converted(group: Group, view: Any, sources: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What a converter makes of these sources, key by key those of its group; no trace has it."""
    copy = copy_transform(_plain(group.converter))
    for key, pattern in group.taken:
        copy.add_tensor(group.first, key, pattern, sources[key][...])
    made = copy.convert(group.first, model=view, config=view.config)
    return {name: single(tensor) for name, tensor in made.items()}
