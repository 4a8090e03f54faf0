"""The weights of experts: a stack cut into matrices while a checkpoint is read, and put together again on save.

Whatever transformers does to get the stack from the checkpoint (merging per-expert tensors, joining gate and up,
transposing) runs inside, so a checkpoint that is stacked on disk and one that isn't are the same to us.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter

from patcher.conversions.concatenate import ReversibleConcatenate
from patcher.conversions.transforms import describe, single
from patcher.fusions.anchoring import anchored
from patcher.fusions.origins import AsStock, Made, NotConvertibleError
from patcher.patterns import common_prefix

__all__ = ["Cut", "unstacking"]


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


def unstacking(model: PreTrainedModel, cuts: Iterable[Cut], origins: Mapping[str, Made]) -> list[WeightConverter]:
    """The conversions that make the pieces from the checkpoint of the stock model.

    Raises:
        NotConvertibleError: transformers makes a stack in a way that can't be followed.
    """
    by_name = {cut.name: cut for cut in cuts}
    every = {key for made in origins.values() for key in made.keys}
    units: dict[tuple[str, ...], _Unit] = {}
    for name in by_name:
        made = origins.get(name)
        if made is None:
            raise NotConvertibleError(f"no checkpoint key makes {name}")
        if made.keys not in units:
            units[made.keys] = _unit(name, made, by_name)
    grouped: dict[Any, list[_Unit]] = {}
    for unit in units.values():
        grouped.setdefault(unit.kind, []).append(unit)
    converters = []
    for members in grouped.values():
        first = members[0]
        head = anchored([unit.prefix for unit in members], first.sources, every, model.base_model_prefix)
        target = first.parts[0].first.removeprefix(first.prefix)
        converters.append(
            WeightConverter(
                [f"{head}{source}$" for source in first.sources],
                rf"\1{target}",
                operations=[
                    CutStacks(
                        tuple(part.under(first.prefix) for part in first.parts),
                        target,
                        tuple(first.made.converter.operations) if first.made.converter else (),
                        first.inner_sources,
                        tuple(first.made.converter.target_patterns) if first.made.converter else (),
                    )
                ],
            )
        )
    return converters


@dataclass(frozen=True)
class Part:
    """A stock target: a stack that is cut, or a tensor that stays as it is."""

    pattern: str
    name: str
    cut: Cut | None

    @property
    def first(self) -> str:
        return self.cut.pieces.format(0) if self.cut else self.name

    def under(self, prefix: str) -> Part:
        """The same with names that start after `prefix`."""
        cut = self.cut and Cut(
            self.cut.name.removeprefix(prefix),
            self.cut.pieces.removeprefix(prefix),
            self.cut.transposed,
            self.cut.shape,
        )
        return Part(self.pattern, self.name.removeprefix(prefix), cut)


@dataclass(frozen=True)
class _Unit:
    """One run of a stock converter, or one tensor that needs none."""

    made: Made
    prefix: str
    #: expressions for the keys after the prefix, and the stock patterns that they stand for
    sources: tuple[str, ...]
    inner_sources: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def kind(self) -> Any:
        converter = self.made.converter
        settings = () if converter is None else (*converter.target_patterns, repr(converter.operations))
        return (self.sources, self.inner_sources, tuple(part.under(self.prefix) for part in self.parts), settings)


def _unit(name: str, made: Made, cuts: Mapping[str, Cut]) -> _Unit:
    if made.converter is None:
        (key,) = made.keys
        prefix = common_prefix([key, name])
        return _Unit(made, prefix, (re.escape(key.removeprefix(prefix)),), ("",), (Part("", name, cuts[name]),))
    parts = tuple(Part(pattern, target, cuts.get(target)) for pattern, target in made.targets)
    if not all(part.cut for part in parts):
        others = ", ".join(part.name for part in parts if part.cut is None)
        raise NotConvertibleError(f"{describe(made.converter)} makes {others} as well")
    prefix = common_prefix([*made.keys, *(part.name for part in parts)])
    templates: dict[str, str] = {}
    for key, pattern in zip(made.keys, made.patterns, strict=True):
        template = re.sub(r"(?<![^.])\d+(?=\.|$)", "#", key.removeprefix(prefix))
        if templates.setdefault(pattern, template) != template:
            raise NotConvertibleError(f"{describe(made.converter)} takes {key} and others of another form")
    # Operations go by the order in which the patterns are written.
    inner = tuple(pattern for pattern in made.converter.source_patterns if pattern in templates)
    counts = {pattern: made.patterns.count(pattern) for pattern in inner}
    sources = tuple(
        re.escape(templates[pattern]).replace(re.escape("#"), r"\d+")
        if counts[pattern] > 1
        else re.escape(next(k for k, p in zip(made.keys, made.patterns, strict=True) if p == pattern)[len(prefix) :])
        for pattern in inner
    )
    return _Unit(made, prefix, sources, inner, parts)


# --- operations ----------------------------------------------------------------------------------------------------


class CutStacks(ConversionOps):
    """Run the operations that make stacks, and cut what they make into the matrices of the experts."""

    reverses_as_stock = True

    def __init__(
        self,
        parts: tuple[Part, ...],
        target: str,
        operations: tuple[ConversionOps, ...] = (),
        sources: tuple[str, ...] = (),
        targets: tuple[str, ...] = (),
    ) -> None:
        self.parts = parts
        self.target = target
        self.operations = tuple(_reversible(operation) for operation in operations)
        self.sources = sources
        self.targets = targets

    def __repr__(self) -> str:
        return f"CutStacks({', '.join(map(repr, self.operations))})"

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        prefix = full_layer_name.removesuffix(self.target)
        if absent := [pattern for pattern in source_patterns if pattern not in input_dict]:
            raise ValueError(f"{full_layer_name} lacks what {', '.join(absent)} takes")
        tensors: dict[str, Any] = {
            inner: input_dict.pop(outer) for inner, outer in zip(self.sources, source_patterns, strict=True)
        }
        for operation in self.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=list(self.sources),
                target_patterns=list(self.targets),
                full_layer_name=f"{prefix}{self.parts[0].name}",
                model=AsStock(model, _shapes(prefix, self.parts)),
                **kwargs,
            )
        result: dict[str, torch.Tensor] = {}
        for part in self.parts:
            # The only one may have any name: operations disagree about what a group in a pattern becomes.
            stack = single(tensors.pop(part.pattern) if len(self.parts) > 1 else next(iter(tensors.values())))
            assert part.cut is not None
            if tuple(stack.shape) != part.cut.shape:
                raise ValueError(f"{prefix}{part.name} has the shape {tuple(stack.shape)}, not {part.cut.shape}")
            for number, matrix in enumerate(stack.unbind()):
                result[prefix + part.cut.pieces.format(number)] = (
                    matrix.t().contiguous() if part.cut.transposed else matrix
                )
        return result

    @property
    def reverse_op(self) -> ConversionOps:
        return StackAgain(self)


class StackAgain(ConversionOps):
    """The reverse of `CutStacks`."""

    def __init__(self, cut: CutStacks) -> None:
        self._cut = cut

    def __repr__(self) -> str:
        return "StackAgain()"

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        cut = self._cut
        prefix = full_layer_name.removesuffix(cut.target)
        tensors: dict[str, Any] = {}
        for part in cut.parts:
            assert part.cut is not None
            pieces = [single(input_dict.pop(prefix + part.cut.pieces.format(i))) for i in range(part.cut.shape[0])]
            stack = torch.stack(pieces)
            del pieces
            # In a list, as operations are given what is read: some take it as such, whatever they find in it.
            tensors[part.pattern] = [stack.transpose(1, 2).contiguous() if part.cut.transposed else stack]
        for operation in reversed(cut.operations):
            tensors = operation.reverse_op.convert(
                tensors,
                source_patterns=list(cut.targets),
                target_patterns=list(cut.sources),
                full_layer_name=f"{prefix}{cut.parts[0].name}",
                model=AsStock(model, _shapes(prefix, cut.parts)),
                **kwargs,
            )
        result: dict[str, Any] = {}
        for inner, outer in zip(cut.sources, target_patterns, strict=True):
            found = tensors[inner] if inner in tensors else _numbered(tensors, inner)
            result[outer] = found
        return result

    @property
    def reverse_op(self) -> ConversionOps:
        return self._cut


def _numbered(tensors: Mapping[str, Any], pattern: str) -> list[torch.Tensor]:
    """What operations have left under `pattern` with numbers in the place of its star, in order."""
    expression = re.compile(re.escape(pattern).replace(re.escape("*"), r"(\d+)"))
    found = sorted((int(match[1]), name) for name in tensors if (match := expression.fullmatch(name)))
    return [single(tensors[name]) for _, name in found]


def _reversible(operation: ConversionOps) -> ConversionOps:
    return ReversibleConcatenate(operation.dim) if type(operation) is Concatenate else operation


def _shapes(prefix: str, parts: tuple[Part, ...]) -> dict[str, tuple[int, ...]]:
    """The stacks that the model no longer has."""
    return {prefix + part.name: part.cut.shape for part in parts if part.cut}
