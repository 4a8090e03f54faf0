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

The operations are copies, exactly reversible and for any number of tensors: transformers reverses a concatenation by
cutting into equal pieces, and gives a transposition one tensor only. A copy of a concatenation remembers the sizes
that it has joined; a copy of an operation on one tensor is run for each, so `[Transpose(), Concatenate()]` means what
it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ConversionOps,
    Interleave,
    LinearToConv3d,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
)

from patcher.compat.conversions import copy_transform, dot_natural_key
from patcher.errors import PatchedWeightsError
from patcher.layouts.layouts import Layout, by_itself
from patcher.layouts.transforms import describe

_GROUP = re.compile(r"\\\d")
#: Operations that move values, by the numbers of their tensors alone.
_MOVEMENTS = (Chunk, Concatenate, MergeModulelist, SplitModulelist, Transpose)
#: Operations that change one tensor, whatever others there are.
_OF_ONE = (Conv3dToLinear, Interleave, LinearToConv3d, Transpose)


def target_names(converter: WeightConverter, first: str) -> list[str]:
    """The parameters that a converter makes, by its patterns alone, from the first of them."""
    target, *targets = converter.target_patterns
    return [first, *(first.replace(target, other) for other in targets)]


def only_moves(transform: WeightConverter) -> bool:
    """Whether a conversion moves values in the same way, whatever the sizes of its tensors are."""
    return all(type(operation) in _MOVEMENTS for operation in transform.operations)


def single(value: Any) -> Any:
    """The tensor, of one that transformers may have handed on in a list."""
    return value[0] if isinstance(value, list) else value


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
        made = convert(self, tensors, self._model)
        return [made[name] for name, _ in self.made]

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

    def joins_unequal(self) -> bool:
        """Whether operations have joined parts of different sizes."""
        return any(len({size for _, size in getattr(each, "sizes", ())}) > 1 for each in self.operations)

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
def convert(layout: Converted, tensors: Sequence[Any], model: Any) -> dict[str, torch.Tensor]:
    """What a conversion makes of the parts of a layer, by the names of parameters; operations look at the model."""
    copy = copy_transform(layout.transform)
    copy.operations = list(layout.operations)
    for number, (pattern, tensor) in enumerate(zip(layout.patterns, tensors, strict=True)):
        copy.add_tensor(layout.target, str(number), pattern, tensor)
    made = copy.convert(layout.target, model=model, config=model.config)
    return {name: single(tensor) for name, tensor in made.items()}


@dataclass(eq=False)
class Group:
    """What one conversion takes for the parameters of one layer.

    Attributes:
        first: the first of the parameters.
        taken: key -> the source pattern that takes it, and the shape of its tensor.
    """

    transform: WeightConverter
    first: str
    taken: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def add(self, key: str, pattern: str, shape: Iterable[int]) -> None:
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
        seen = _Seen()
        tried = self.as_written([*reversible(self.transform.operations), seen])
        on_meta = [torch.empty(shape, device="meta") for shape in tried.stock_shapes]
        made = convert(tried, on_meta if tensors is None else [tensors[key] for key in tried.stock], model)
        return self.as_written(
            tried.operations[:-1],
            dict(zip(made, seen.names, strict=True)),
            [tensor.shape for tensor in made.values()],
            getattr(model, "config", None),
        )

    def as_written(
        self,
        operations: Iterable[ConversionOps] = (),
        made: Mapping[str, str] | None = None,
        shapes: Iterable[torch.Size] = (),
        config: Any = None,
    ) -> Converted:
        """The layout, of which it is known what it makes.

        Args:
            made: parameter -> its target pattern.
            shapes: those of the parameters.
        """
        keys, made = self.keys, made or {}
        patterns, stock_shapes = zip(*map(self.taken.__getitem__, keys), strict=True)
        return Converted(
            keys,
            tuple(made),
            stock_shapes,
            self.transform,
            self.first,
            patterns,
            tuple(made.items()),
            tuple(shapes),
            tuple(operations),
            config,
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


# --- operations ------------------------------------------------------------------------------------------------------


def reversible(operations: Iterable[ConversionOps]) -> list[ConversionOps]:
    """Copies of the operations of a conversion for one of its layers.

    >>> reversible([Transpose(), Concatenate(dim=0)])
    [ForEach(Transpose), ReversibleConcatenate(dim=0)]
    """
    return [
        ReversibleConcatenate(operation.dim)
        if type(operation) is Concatenate
        else ForEach(operation)
        if type(operation) in _OF_ONE
        else deepcopy(operation)
        for operation in operations
    ]


class ReversibleConcatenate(Concatenate):
    """A `Concatenate` whose reverse cuts at the sizes that it joined, not into equal pieces."""

    sizes: tuple[tuple[str, int], ...] = ()

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        listed = {pattern: value if isinstance(value, list) else [value] for pattern, value in input_dict.items()}
        self.sizes = tuple(
            (pattern, tensor.shape[self.dim]) for pattern in source_patterns for tensor in listed.get(pattern, ())
        )
        join: Any = super().convert
        joined: dict[str, torch.Tensor] = join(
            input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
        )
        if len(joined) == 1 and _GROUP.search(next(iter(joined))):
            # Anchored, `^(layers\.\d+\.)q$ -> \1qkv`: transformers expands a group in the name of the layer alone.
            return {kwargs["full_layer_name"]: joined.popitem()[1]}
        return joined

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitBySizes(self.dim, self.sizes)


class SplitBySizes(ConversionOps):
    """Cut a tensor at given sizes. The reverse of `ReversibleConcatenate`."""

    def __init__(self, dim: int, sizes: tuple[tuple[str, int], ...]) -> None:
        self.dim, self.sizes = dim, sizes

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[torch.Tensor]]:
        (tensors,) = input_dict.values()
        pieces = torch.split(single(tensors), [size for _, size in self.sizes], dim=self.dim)
        # The tensors were joined under their source patterns; those are this direction's target patterns.
        result: dict[str, list[torch.Tensor]] = {}
        for (pattern, _), piece in zip(self.sizes, pieces, strict=True):
            result.setdefault(pattern, []).append(piece.contiguous())
        return result


class ForEach(ConversionOps):
    """An operation on one tensor, for each of those that there are; as transformers has it where there is one."""

    def __init__(self, operation: ConversionOps) -> None:
        self.operation = deepcopy(operation)

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        listed = {name: value if isinstance(value, list) else [value] for name, value in input_dict.items()}
        run: Any = self.operation.convert
        if [len(tensors) for tensors in listed.values()] == [1]:
            found: dict[str, Any] = run(
                input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
            )
            return found
        return {
            name: [
                single(*run({name: tensor}, source_patterns=[name], target_patterns=[name], **kwargs).values())
                for tensor in tensors
            ]
            for name, tensors in listed.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return ForEach(self.operation.reverse_op)

    def __repr__(self) -> str:
        return f"ForEach({type(self.operation).__name__})"
