"""The layout of one weight conversion for one layer: its parts are tensors of a checkpoint.

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

The operations are replaced by copies that reverse exactly and take any number of tensors: transformers reverses a
concatenation by splitting into equal pieces, and accepts one tensor only for a transposition. The copy of a
concatenation remembers the sizes that it joined, and the copy of an operation on one tensor runs for each tensor, so
`[Transpose(), Concatenate()]` works as written.
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
    PermuteForRope,
    SplitModulelist,
    Transpose,
    WeightConverter,
)

from patcher.compat.conversions import copy_transform, dot_natural_key
from patcher.errors import PatchedWeightsError
from patcher.layouts.layouts import Layout
from patcher.layouts.transforms import describe, has_known_operations

_ANCHOR = re.compile(r".*\\\d")
#: Operations that only move values, whatever the shapes of their tensors are.
_MOVEMENTS = (Chunk, Concatenate, MergeModulelist, SplitModulelist, Transpose)
#: Operations on one tensor, which don't depend on others.
_UNARY = (Conv3dToLinear, Interleave, LinearToConv3d, PermuteForRope, Transpose)


def target_names(converter: WeightConverter, first: str) -> list[str]:
    """Return the parameters that a converter makes, by its patterns alone, given the first of them."""
    target, *targets = endings(converter)
    return [first, *(first.replace(target, other) for other in targets)]


def endings(converter: WeightConverter) -> list[str]:
    r"""Return the target patterns from their group on: transformers expands `\1` in the name of the layer alone.

    >>> from transformers.core_model_loading import Chunk
    >>> endings(WeightConverter([r"(layers\.\d+\.)qk$"], [r"\1q", r"\1k"], [Chunk(dim=0)]))
    ['q', 'k']
    """
    return [_ANCHOR.sub("", pattern) or pattern for pattern in converter.target_patterns]


def only_moves(transform: WeightConverter) -> bool:
    """Whether a conversion only moves values, in the same way for all shapes."""
    return has_known_operations(transform) and all(type(operation) in _MOVEMENTS for operation in transform.operations)


def single(value: Any) -> Any:
    """Unwrap a tensor that transformers may have wrapped in a list."""
    return value[0] if isinstance(value, list) else value


@dataclass(frozen=True)
class Converted(Layout):
    """What one conversion makes for one layer.

    Attributes:
        transform: the conversion, as it was written.
        target: the first of the parameters, which operations take as the name of the layer.
        patterns: the source pattern of each part.
        targets: (parameter, target pattern) of each parameter.
        shapes: the shapes of the parameters.
        operations: the operations of the layer, which remember the sizes that they joined.
        config: the config of the model, which operations may read.
    """

    transform: Any = None
    target: str = ""
    patterns: tuple[str, ...] = ()
    targets: tuple[tuple[str, str], ...] = ()
    shapes: tuple[torch.Size, ...] = ()
    operations: tuple[ConversionOps, ...] = ()
    config: Any = None

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parameters = convert(self, tensors, self._model)
        return [parameters[name] for name, _ in self.targets]

    def separate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        target_patterns = endings(self.transform)
        collected: dict[str, Any] = {}
        for (_, pattern), tensor in zip(self.targets, tensors, strict=True):
            # A target pattern with a star made several parameters, `experts.0.w`, `experts.1.w`: group them again.
            family = next((target for target in target_patterns if _matches(target, pattern)), pattern)
            collected.setdefault(family, []).append(tensor)
        try:
            for operation in [operation.reverse_op for operation in reversed(self.operations)]:
                sources = [target for target in target_patterns if target in collected]
                collected = operation.convert(
                    collected,
                    source_patterns=sources or list(collected),
                    # in the order in which they were written, as in `fuse`
                    target_patterns=[name for name in self.transform.source_patterns if name in self.patterns],
                    full_layer_name=self.target,
                    model=self._model,
                    config=self.config,
                    missing_keys=None,
                )
        except NotImplementedError as error:
            names = ", ".join(type(operation).__name__ for operation in self.transform.operations)
            raise self._error(f"one of its operations ({names}) has no reverse") from error
        except Exception as error:
            raise self._error(f"taking it apart failed with {type(error).__name__}: {error}") from error
        pieces: dict[str, list[torch.Tensor]] = {}
        for pattern in dict.fromkeys(self.patterns):
            pieces[pattern] = _tensors_of(pattern, collected)
            if len(pieces[pattern]) != (count := self.patterns.count(pattern)):
                raise self._error(
                    f"the reverse gives {len(pieces[pattern])} tensors for {pattern!r}, the checkpoint had {count}"
                )
        return [pieces[pattern].pop(0) for pattern in self.patterns]

    def is_known(self) -> bool:
        return has_known_operations(self.transform)

    def fused_shapes(self) -> list[torch.Size]:
        return list(self.shapes)

    def joins_unequal(self) -> bool:
        """Whether an operation joined parts of different sizes."""
        sizes = [getattr(operation, "sizes", ()) for operation in self.operations]
        return any(len({size for _, size in joined}) > 1 for joined in sizes)

    def __str__(self) -> str:
        return describe(self.transform)

    def _error(self, reason: str) -> PatchedWeightsError:
        return PatchedWeightsError(
            f"{', '.join(name for name, _ in self.targets)} can't be saved in the original format: {reason}.\n"
            f"It was made by {self}.\n"
            "Give its operations a `reverse_op` that inverts them, or save the runtime layout yourself with "
            "`safetensors.torch.save_model(model, ...)`."
        )

    @property
    def _model(self) -> Any:
        """A model with what operations read of one."""
        shapes = {name: shape for (name, _), shape in zip(self.targets, self.shapes, strict=True)}
        return SimpleNamespace(config=self.config, get_parameter=lambda name: torch.empty(shapes[name], device="meta"))


@torch.no_grad()
def convert(layout: Converted, tensors: Sequence[Any], model: Any) -> dict[str, torch.Tensor]:
    """Convert the parts of a layer, and return the parameters by name; operations may read the model."""
    if not has_known_operations(layout.transform):  # which may write into what they are given
        tensors = [tensor.clone() for tensor in tensors]
    copy = copy_transform(layout.transform)
    copy.operations = list(layout.operations)
    object.__setattr__(copy, "target_patterns", endings(copy))  # assigning it raises
    for index, (pattern, tensor) in enumerate(zip(layout.patterns, tensors, strict=True)):
        copy.add_tensor(layout.target, str(index), pattern, tensor)
    converted = copy.convert(layout.target, model=model, config=model.config)
    parameters: dict[str, Any] = {name: single(tensor) for name, tensor in converted.items()}
    for name, value in parameters.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    return parameters


@dataclass(eq=False)
class Group:
    """What one conversion takes for the parameters of one layer, of which `first` is the first."""

    transform: WeightConverter
    first: str
    #: key -> (the source pattern that matches it, the shape of its tensor)
    taken: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def add(self, key: str, pattern: str, shape: Iterable[int]) -> None:
        self.taken[key] = pattern, tuple(shape)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, in the order in which they are joined: that of the patterns."""
        order = {pattern: index for index, pattern in enumerate(self.transform.source_patterns)}
        return tuple(sorted(self.taken, key=lambda key: order.get(self.taken[key][0], len(order))))

    def layout(self, model: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Converted:
        """Return the layout, found by running the conversion on the meta device, or on tensors by their keys."""
        recorder = _RecordTargets()
        trial = self.make_layout([*reversible(self.transform.operations), recorder])
        on_meta = [torch.empty(shape, device="meta") for shape in trial.stock_shapes]
        parameters = convert(trial, on_meta if tensors is None else [tensors[key] for key in trial.stock], model)
        return self.make_layout(
            trial.operations[:-1],
            dict(zip(parameters, recorder.patterns, strict=True)),
            [tensor.shape for tensor in parameters.values()],
            getattr(model, "config", None),
        )

    def make_layout(
        self,
        operations: Iterable[ConversionOps] = (),
        targets: Mapping[str, str] | None = None,
        shapes: Iterable[torch.Size] = (),
        config: Any = None,
    ) -> Converted:
        """Return the layout with known results; `targets` are parameter -> its target pattern."""
        keys, targets = self.keys, targets or {}
        patterns, stock_shapes = zip(*map(self.taken.__getitem__, keys), strict=True)
        return Converted(
            keys,
            tuple(targets),
            stock_shapes,
            self.transform,
            self.first,
            patterns,
            tuple(targets.items()),
            tuple(shapes),
            tuple(operations),
            config,
        )


class _RecordTargets(ConversionOps):
    """The last operation of a run, which records the target patterns of the results."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self.patterns = list(input_dict)
        return input_dict


def _matches(pattern: str, name: str) -> bool:
    """Whether a name is a pattern, or the pattern with a number in place of its star."""
    return name == pattern or (
        "*" in pattern and re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
    )


def _tensors_of(pattern: str, collected: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that operations left for a pattern, or for its numbered names."""
    listed = _listed({name: collected[name] for name in sorted(collected, key=dot_natural_key)})
    return [tensor for name, tensors in listed.items() if _matches(pattern, name) for tensor in tensors]


# --- operations ------------------------------------------------------------------------------------------------------


def reversible(operations: Iterable[ConversionOps]) -> list[ConversionOps]:
    """Copy the operations of a conversion for one layer, so that they reverse exactly.

    >>> reversible([Transpose(), Concatenate(dim=0)])
    [ForEach(Transpose), ReversibleConcatenate(dim=0)]
    """
    return [
        ReversibleConcatenate(operation.dim)
        if type(operation) is Concatenate
        else ForEach(operation)
        if type(operation) in _UNARY
        else deepcopy(operation)
        for operation in operations
    ]


def _listed(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: value if isinstance(value, list) else [value] for name, value in tensors.items()}


class ReversibleConcatenate(Concatenate):
    """A `Concatenate` whose reverse splits by the sizes that it joined, not into equal pieces."""

    sizes: tuple[tuple[str, int], ...] = ()

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], source_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        listed = _listed(input_dict)
        self.sizes = tuple(
            (pattern, tensor.shape[self.dim]) for pattern in source_patterns for tensor in listed.get(pattern, ())
        )
        join: Any = super().convert
        joined: dict[str, torch.Tensor] = join(input_dict, source_patterns=source_patterns, **kwargs)
        return joined

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitBySizes(self.dim, self.sizes)


class SplitBySizes(ConversionOps):
    """Split a tensor by sizes. The reverse of `ReversibleConcatenate`."""

    def __init__(self, dim: int, sizes: tuple[tuple[str, int], ...]) -> None:
        self.dim, self.sizes = dim, sizes

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, list[torch.Tensor]]:  # type: ignore[override]
        (tensors,) = input_dict.values()
        pieces = torch.split(single(tensors), [size for _, size in self.sizes], dim=self.dim)
        # The source patterns under which the tensors were joined are the target patterns of this direction.
        result: dict[str, list[torch.Tensor]] = {}
        for (pattern, _), piece in zip(self.sizes, pieces, strict=True):
            result.setdefault(pattern, []).append(piece.contiguous())
        return result


class ForEach(ConversionOps):
    """Runs an operation on one tensor for each of several; with a single one, as transformers does."""

    def __init__(self, operation: ConversionOps) -> None:
        self.operation = deepcopy(operation)

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        listed = _listed(input_dict)
        run: Any = self.operation.convert
        if [len(tensors) for tensors in listed.values()] == [1]:
            result: dict[str, Any] = run(
                input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
            )
            return result
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
