"""One weight conversion for one layer: a layout, whose parts are tensors of a checkpoint.

>>> from transformers.core_model_loading import Concatenate, WeightConverter
>>> join = WeightConverter(["q.weight", "k.weight"], ["qk.weight"], operations=[Concatenate(dim=0)])
>>> group = Group(join, "layers.0.qk.weight")
>>> group.add("layers.0.k.weight", "k.weight", (3, 2))
>>> group.add("layers.0.q.weight", "q.weight", (4, 2))
>>> layout = group.layout(SimpleNamespace(config=None))
>>> print(layout)
q.weight, k.weight -> qk.weight [Concatenate(dim=0)]
>>> layout.stock, layout.fused, layout.fused_shapes()
(('layers.0.q.weight', 'layers.0.k.weight'), ('layers.0.qk.weight',), [torch.Size([7, 2])])
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from patcher.compat.conversions import copy_transform, dot_natural_key
from patcher.errors import PatchedWeightsError
from patcher.layouts.layouts import Layout
from patcher.layouts.operations import reversible
from patcher.layouts.transforms import by_itself, describe, single


def made_by_name(converter: WeightConverter, first: str) -> list[str]:
    """The parameters that a converter makes, by its patterns alone, from the first of them."""
    target, *targets = converter.target_patterns
    return [first, *(first.replace(target, other) for other in targets)]


@dataclass(frozen=True)
class Converted(Layout):
    """What one conversion makes for one layer.

    Attributes:
        transform: the conversion, as it was written.
        target: the first of the parameters, by which operations know the layer.
        patterns: the source pattern of each part.
        made: the name of each parameter in the model that was loaded, and the target pattern that made it.
        shapes: those of the parameters.
        operations: those of the layer, which remember what they have joined.
        config: that of the model, which operations look at.
    """

    transform: Any = None
    target: str = ""
    patterns: tuple[str, ...] = ()
    made: tuple[tuple[str, str], ...] = ()
    shapes: tuple[torch.Size, ...] = ()
    operations: tuple[ConversionOps, ...] = ()
    config: Any = None

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = convert(self.transform, self.operations, self.target, self.patterns, tensors, self._model)
        return [single(made[name]) for name, _ in self.made]

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        targets = self.transform.target_patterns
        collected: dict[str, Any] = {}
        for (_, pattern), tensor in zip(self.made, tensors, strict=True):
            # One target pattern with a star makes many parameters, `experts.0.w`, `experts.1.w`: together again.
            family = next((target for target in targets if _expands(target, pattern)), pattern)
            collected.setdefault(family, []).append(tensor)
        try:
            for operation in [each.reverse_op for each in reversed(self.operations)]:
                collected = operation.convert(
                    collected,
                    source_patterns=[target for target in targets if target in collected] or list(collected),
                    # In the order in which they were written, as on the way in.
                    target_patterns=[name for name in self.transform.source_patterns if name in self.patterns],
                    full_layer_name=self.target,
                    model=self._model,
                    config=self.config,
                    missing_keys=None,
                )
        except NotImplementedError as error:
            names = ", ".join(type(operation).__name__ for operation in self.transform.operations)
            raise self._cannot(f"one of its operations ({names}) has no reverse") from error
        except Exception as error:
            raise self._cannot(f"taking it apart failed with {type(error).__name__}: {error}") from error
        found: dict[str, list[torch.Tensor]] = {}
        for pattern in dict.fromkeys(self.patterns):
            found[pattern] = _tensors_of(pattern, collected)
            if len(found[pattern]) != (count := self.patterns.count(pattern)):
                raise self._cannot(
                    f"the reverse gives {len(found[pattern])} tensors for {pattern!r}, the checkpoint had {count}"
                )
        parts = [found[pattern].pop(0) for pattern in self.patterns]
        for name, part, shape in zip(self.stock, parts, self.stock_shapes, strict=True):
            if tuple(part.shape) != tuple(shape):
                raise self._cannot(
                    f"the reverse gives {name} the shape {tuple(part.shape)}, the checkpoint had {tuple(shape)}"
                )
        # Pieces that stock cuts from one tensor, with the operations that stock has, are saved into one shard there.
        if all(getattr(operation, "reverses_as_stock", False) for operation in self.operations):
            return parts
        return [by_itself(part.contiguous()) for part in parts]

    def fused_shapes(self) -> list[torch.Size]:
        return list(self.shapes)

    def __str__(self) -> str:
        return describe(self.transform)

    def _cannot(self, reason: str) -> PatchedWeightsError:
        return PatchedWeightsError(
            f"{', '.join(name for name, _ in self.made)} can't be saved in the original format: {reason}.\n"
            f"It was made by {self}.\n"
            "Give its operations a `reverse_op` that inverts them, or save the runtime layout yourself with "
            "`safetensors.torch.save_model(model, ...)`."
        )

    @property
    def _model(self) -> Any:
        """The model as operations look at it."""
        shapes = {name: shape for (name, _), shape in zip(self.made, self.shapes, strict=True)}
        return SimpleNamespace(config=self.config, get_parameter=lambda name: torch.empty(shapes[name], device="meta"))


@torch.no_grad()
def convert(
    transform: WeightConverter,
    operations: Sequence[ConversionOps],
    target: str,
    patterns: Sequence[str],
    tensors: Sequence[Any],
    model: Any,
) -> dict[str, Any]:
    """What a conversion makes with these operations, by the names of parameters.

    Args:
        patterns: the source pattern of each of the tensors.
    """
    copy = copy_transform(transform)
    copy.operations = list(operations)
    for number, (pattern, tensor) in enumerate(zip(patterns, tensors, strict=True)):
        copy.add_tensor(target, str(number), pattern, tensor)
    made: dict[str, Any] = copy.convert(target, model=model, config=model.config)
    return made


class Group:
    """What one conversion takes for the parameters of one layer.

    Attributes:
        transform: the conversion.
        first: the first of the parameters.
        taken: key -> the source pattern that takes it, and the shape of its tensor.
    """

    def __init__(self, transform: WeightConverter, first: str) -> None:
        self.transform, self.first = transform, first
        self.taken: dict[str, tuple[str, tuple[int, ...]]] = {}

    def add(self, key: str, pattern: str, shape: Sequence[int]) -> None:
        """Take a tensor."""
        self.taken[key] = pattern, tuple(shape)

    @property
    def keys(self) -> tuple[str, ...]:
        """Those that it takes, in the order in which they are joined: that of the patterns."""
        order = {pattern: number for number, pattern in enumerate(self.transform.source_patterns)}
        return tuple(sorted(self.taken, key=lambda key: order.get(self.taken[key][0], len(order))))

    def layout(self, model: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Converted:
        """The layout, found by running the conversion on the meta device.

        Args:
            model: the one that operations look at.
            tensors: run it on these, by their keys: for operations that need values.
        """
        keys = self.keys
        patterns = tuple(self.taken[key][0] for key in keys)
        shapes = tuple(self.taken[key][1] for key in keys)
        given = (
            [torch.empty(shape, device="meta") for shape in shapes] if tensors is None else [*map(tensors.get, keys)]
        )
        operations, seen = reversible(self.transform.operations), _Seen()
        made = convert(self.transform, [*operations, seen], self.first, patterns, given, model)
        return Converted(
            keys,
            tuple(made),
            shapes,
            self.transform,
            self.first,
            patterns,
            tuple(zip(made, seen.names, strict=True)),
            tuple(single(tensor).shape for tensor in made.values()),
            tuple(operations),
            getattr(model, "config", None),
        )


class _Seen(ConversionOps):
    """The last operation of a run, which notes the target patterns of what those before it have made."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self.names = list(input_dict)
        return input_dict


def _expands(pattern: str, name: str) -> bool:
    """Whether `name` is `pattern`, or `pattern` with a number in place of its star."""
    return name == pattern or (
        "*" in pattern and re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
    )


def _tensors_of(pattern: str, collected: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that operations left for a pattern: under it, or numbered in place of its star."""
    tensors: list[torch.Tensor] = []
    for name in sorted(collected, key=dot_natural_key):
        if _expands(pattern, name):
            value = collected[name]
            tensors += value if isinstance(value, list) else [value]
    return tensors
