"""The weights of joined projections: rows put together while a checkpoint is read, and taken apart on save.

Where transformers itself makes the projections from something else in the checkpoint (a fused `qkv` that it splits,
rows that it permutes for rotary embeddings), its own operations run inside of ours.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from patcher.conversions.transforms import describe, single
from patcher.fusions.anchoring import anchored
from patcher.fusions.origins import AsStock, Made, NotConvertibleError
from patcher.patterns import common_prefix

__all__ = ["JoinRows", "SplitRows", "Step", "Target", "check_convertible", "converters_for"]


@dataclass(frozen=True)
class Target:
    """A joined parameter and its parts, in order, by the names that the stock model has for them."""

    name: str
    parts: tuple[str, ...]


# --- the conversions -----------------------------------------------------------------------------------------------


def check_convertible(targets: Iterable[Target], origins: Mapping[str, Made]) -> None:
    """Raise if the parts of a joined parameter can't be followed to the checkpoint.

    Raises:
        NotConvertibleError: transformers makes a part in a way that can't be followed.
    """
    for target in targets:
        _routes(target, origins)


def converters_for(
    model: PreTrainedModel, targets: Iterable[Target], origins: Mapping[str, Made]
) -> list[WeightConverter]:
    """The conversions that make joined parameters from the checkpoint of the stock model.

    Raises:
        NotConvertibleError: transformers makes a part in a way that can't be followed.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Target]]] = {}
    routes_of: dict[tuple[Any, ...], tuple[Route, ...]] = {}
    prefix_of: dict[tuple[Any, ...], str] = {}
    for target in targets:
        routes = _routes(target, origins)
        keys = [key for route in routes for key in route.keys]
        others = [name for route in routes for _, name in route.others]
        prefix = common_prefix([target.name, *keys, *others])
        names = tuple(text.removeprefix(prefix) for text in (target.name, *keys))
        kinds = tuple((route.first.removeprefix(prefix), *route.kind) for route in routes)
        kind = (names, tuple(text.removeprefix(prefix) for text in others), kinds)
        groups.setdefault(kind, []).append((prefix, target))
        routes_of[kind], prefix_of[kind] = routes, prefix
    every = {key for made in origins.values() for key in made.keys}
    converters = []
    for kind, members in groups.items():
        tail, *tails = kind[0]
        other_tails: tuple[str, ...] = kind[1]
        tails = [re.escape(text) for text in tails]
        head = anchored([prefix for prefix, _ in members], tails, every, model.base_model_prefix)
        sources = [f"{head}{text}$" for text in tails]
        operation = JoinRows(tuple(_numbered(routes_of[kind], prefix_of[kind])), tail, other_tails)
        targets_of = [rf"\1{text}" for text in (tail, *other_tails)]
        converters.append(WeightConverter(sources, targets_of, operations=[operation]))
    return converters


@dataclass(frozen=True)
class Route:
    """One way from checkpoint keys to parts: through the operations of a stock converter, or straight.

    Attributes:
        keys: the keys, as the renamings leave them.
        parts: (number of the part, the pattern under which the operations leave it).
        others: (pattern, parameter) of what the operations make besides, which is no part.
        first: the parameter that the operations are named by in a stock load.
    """

    keys: tuple[str, ...]
    parts: tuple[tuple[int, str], ...]
    converter: WeightConverter | None = None
    patterns: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    first: str = ""

    @property
    def kind(self) -> tuple[Any, ...]:
        others = tuple(pattern for pattern, _ in self.others)
        return (len(self.keys), self.parts, others, () if self.converter is None else self._settings())

    def _settings(self) -> tuple[Any, ...]:
        assert self.converter is not None
        return (*self.converter.source_patterns, *self.converter.target_patterns, repr(self.converter.operations))


def _routes(target: Target, origins: Mapping[str, Made]) -> tuple[Route, ...]:
    routes: dict[tuple[str, ...], Route] = {}
    for number, part in enumerate(target.parts):
        made = origins.get(part)
        if made is None:
            raise NotConvertibleError(f"no checkpoint key makes {part}")
        if made.converter is None:
            routes[made.keys] = Route(made.keys, ((number, ""),))
            continue
        pattern = next(pattern for pattern, name in made.targets if name == part)
        before = routes.get(made.keys)
        routes[made.keys] = Route(
            made.keys, (*(before.parts if before else ()), (number, pattern)), made.converter, made.patterns
        )
    for keys, route in routes.items():
        if route.converter is None:
            continue
        if len(set(route.patterns)) != len(route.keys):
            raise NotConvertibleError(f"{describe(route.converter)} takes several tensors by one pattern")
        whole = origins[target.parts[route.parts[0][0]]].targets
        others = tuple((pattern, name) for pattern, name in whole if name not in target.parts)
        routes[keys] = replace(route, others=others, first=whole[0][1])
    return tuple(routes.values())


class Step(NamedTuple):
    """What one route does, by the places of its sources and parts among those of the whole conversion."""

    first: int
    taken: int
    #: (part, pattern) pairs
    parts: tuple[tuple[int, str], ...]
    operations: tuple[ConversionOps, ...]
    #: the patterns that the operations were written with
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    #: the parameter that the operations are named by in a stock load, without what the layers don't share
    name: str


def _numbered(routes: tuple[Route, ...], prefix: str) -> Iterator[Step]:
    position, parts_before_others = 0, sum(len(route.parts) for route in routes)
    for route in routes:
        operations: tuple[ConversionOps, ...] = ()
        sources: tuple[str, ...] = ()
        targets: tuple[str, ...] = ()
        if route.converter is not None:
            operations = tuple(route.converter.operations)
            # In the order of the converter's own patterns: operations go by it.
            sources, targets = tuple(route.patterns), tuple(route.converter.target_patterns)
        # What is no part gets a number behind the parts.
        others = tuple((parts_before_others + place, pattern) for place, (pattern, _) in enumerate(route.others))
        parts_before_others += len(others)
        name = route.first.removeprefix(prefix)
        yield Step(position, len(route.keys), (*route.parts, *others), operations, sources, targets, name)
        position += len(route.keys)


class JoinRows(ConversionOps):
    """Put the rows of several tensors one under the other, and remember how many each had.

    Where stock's operations make something else from the same tensors, that is made as well.
    """

    supports_many_to_many = True

    def __init__(self, steps: tuple[Step, ...], tail: str, others: tuple[str, ...] = ()) -> None:
        self.steps = steps
        self.tail = tail
        self.others = others
        self.sizes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        inner = [repr(operation) for step in self.steps for operation in step.operations]
        return f"JoinRows({', '.join(inner)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinRows:
        # A load copies a conversion for each tensor that it takes: only what may change is worth that.
        steps = deepcopy(self.steps, memo) if any(step.operations for step in self.steps) else self.steps
        return JoinRows(steps, self.tail, self.others)

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
        pieces: dict[int, torch.Tensor] = {}
        head = full_layer_name.removesuffix(self.tail)
        for first, taken, parts, operations, inner_sources, inner_targets, inner_name in self.steps:
            outer = source_patterns[first : first + taken]
            if absent := [pattern for pattern in outer if not input_dict.get(pattern)]:
                raise ValueError(f"{full_layer_name} lacks what {', '.join(absent)} takes")
            tensors: dict[str, Any]
            if not operations:
                tensors = {"": input_dict.pop(outer[0])}
            else:
                tensors = {inner: input_dict.pop(name) for inner, name in zip(inner_sources, outer, strict=True)}
                for operation in operations:
                    tensors = operation.convert(
                        tensors,
                        source_patterns=list(inner_sources),
                        target_patterns=list(inner_targets),
                        full_layer_name=f"{head}{inner_name}",
                        model=AsStock(model),
                        **kwargs,
                    )
            for part, pattern in parts:
                pieces[part] = single(tensors[pattern])
        ordered = [pieces[part] for part in sorted(pieces)]
        others = ordered[len(ordered) - len(self.others) :]
        ordered = ordered[: len(ordered) - len(self.others)]
        self.sizes = tuple(piece.shape[0] for piece in ordered)
        result = {full_layer_name: _joined(ordered)}
        return result | {f"{head}{name}": piece for name, piece in zip(self.others, others, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitRows(self)


class SplitRows(ConversionOps):
    """The reverse of `JoinRows`."""

    def __init__(self, join: JoinRows) -> None:
        self.join = join

    def __repr__(self) -> str:
        return f"SplitRows({list(self.join.sizes)})"

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
        head = full_layer_name.removesuffix(self.join.tail)
        pieces = list(torch.split(single(input_dict[full_layer_name]), list(self.join.sizes)))
        pieces += [single(input_dict[f"{head}{name}"]) for name in self.join.others]
        result: dict[str, torch.Tensor] = {}
        for first, taken, parts, operations, inner_sources, inner_targets, inner_name in self.join.steps:
            outer = target_patterns[first : first + taken]
            tensors: dict[str, Any] = {pattern: pieces[part] for part, pattern in parts}
            for operation in reversed(operations):
                tensors = operation.reverse_op.convert(
                    tensors,
                    source_patterns=list(inner_targets),
                    target_patterns=list(inner_sources),
                    full_layer_name=f"{head}{inner_name}",
                    model=AsStock(model),
                    **kwargs,
                )
            for inner, name in zip(inner_sources or ("",), outer, strict=True):
                result[name] = single(tensors[inner]).contiguous()
        return result

    @property
    def reverse_op(self) -> ConversionOps:
        return JoinRows(self.join.steps, self.join.tail, self.join.others)


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all pieces; a view of them where they lie one behind the other, as a mapped file may have them.

    A load on the CPU only maps the file, so a copy would take most of the time and twice the memory.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    ends = itertools.accumulate((piece.nbytes for piece in pieces), initial=first.data_ptr())
    if any(
        type(piece) is not torch.Tensor
        or piece.device.type != "cpu"
        or piece.dtype != first.dtype
        or piece.shape[1:] != first.shape[1:]
        or not piece.is_contiguous()
        or piece.data_ptr() != end
        or not piece.nbytes
        for piece, end in zip(pieces, ends, strict=False)
    ):
        return torch.cat(pieces)
    memory = (ctypes.c_byte * sum(piece.nbytes for piece in pieces)).from_address(first.data_ptr())
    memory.pieces = pieces  # type: ignore[attr-defined]  # they hold the memory, as long as the view does
    return torch.frombuffer(memory, dtype=first.dtype).view(-1, *first.shape[1:])
