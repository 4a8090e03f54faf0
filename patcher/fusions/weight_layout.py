"""The weights of a fused layout: converted from the checkpoint's while it is read, and back on save.

Where transformers itself makes the parameters from something else in the checkpoint (a fused `qkv` that it splits,
rows that it permutes for rotary embeddings, tensors of single experts that it merges), its own operations run inside
of ours, forwards on the way in and backwards on the way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter

from patcher.conversions.concatenate import ReversibleConcatenate
from patcher.conversions.transforms import single
from patcher.fusions.anchoring import anchored
from patcher.fusions.origins import NotConvertibleError, Origins, ParameterSource, as_separate
from patcher.patterns import common_prefix, without_numbers


class Layout(NamedTuple):
    """Parameters of the stock model that become others together.

    Attributes:
        stock: the parameters, by the names that the stock model has for them.
        target: the first parameter that they become, by which a load names the conversion.
        operation: makes the conversion, from the arguments of a `LayoutConversion`.
        takes_lists: whether it takes what stock makes from several tensors of one pattern, one for each expert.
    """

    stock: tuple[str, ...]
    target: str
    operation: Callable[..., LayoutConversion]
    takes_lists: bool = False


Plan: TypeAlias = "tuple[str, tuple[str, ...], LayoutConversion]"


def converters_for(model: PreTrainedModel, layouts: Iterable[Layout], origins: Origins) -> list[WeightConverter]:
    """The conversions that make fused layouts from the checkpoint of the stock model: one for all layers alike.

    Raises:
        NotConvertibleError: transformers makes a parameter in a way that can't be followed.
    """
    groups: dict[str, list[Plan]] = {}
    for layout in layouts:
        prefix, tails, operation = plan_of(layout, origins)
        # Operations have no equality of their own.
        groups.setdefault(repr((tails, vars(operation))), []).append((prefix, tails, operation))
    every = {key for source in origins.values() for key in source.keys}
    converters = []
    for plans in groups.values():
        _, tails, operation = plans[0]
        head = anchored([prefix for prefix, _, _ in plans], tails, every, model.base_model_prefix)
        targets = [rf"\1{tail}" for tail in (operation.tail, *operation.others)]
        converters.append(WeightConverter([f"{head}{tail}$" for tail in tails], targets, operations=[operation]))
    return converters


def plan_of(layout: Layout, origins: Origins) -> Plan:
    """How one layout is made: the prefix of its names, expressions for the keys behind it, and the conversion.

    Raises:
        NotConvertibleError: transformers makes a parameter in a way that can't be followed.
    """
    sources = {source.keys: source for source in (origins[name] for name in layout.stock)}
    made = [name for source in sources.values() for _, name in source.targets]
    prefix = common_prefix([layout.target, *made, *(key for keys in sources for key in keys)])
    # What is no part of the layout gets a number behind the parts.
    others = [name for name in made if name not in layout.stock]
    numbers = {name: number for number, name in enumerate([*layout.stock, *others])}
    steps: list[Step] = []
    tails: list[str] = []
    for source in sources.values():
        taken = _tails(source, prefix, layout.takes_lists)
        converter = source.converter
        steps.append(
            Step(
                first=len(tails),
                taken=len(taken),
                parts=tuple((numbers[name], pattern) for pattern, name in source.targets),
                operations=tuple(map(_reversible, converter.operations)) if converter else (),
                sources=tuple(taken),
                targets=tuple(converter.target_patterns) if converter else (),
                name=source.targets[0][1].removeprefix(prefix),
            )
        )
        tails += taken.values()
    tail, *names = (name.removeprefix(prefix) for name in (layout.target, *others))
    return prefix, tuple(tails), layout.operation(tuple(steps), tail, tuple(names))


def _tails(source: ParameterSource, prefix: str, takes_lists: bool) -> dict[str, str]:
    """The patterns by which stock takes its keys -> expressions for these keys after the prefix."""
    keys: dict[str, list[str]] = {}
    for key, pattern in zip(source.keys, source.patterns, strict=True):
        keys.setdefault(pattern, []).append(key.removeprefix(prefix))
    tails = {}
    # In the order in which the patterns are written: operations go by it.
    for pattern in source.converter.source_patterns if source.converter else source.patterns:
        if not (found := keys.get(pattern)):
            continue
        if len(found) > 1 and not takes_lists:
            raise NotConvertibleError(f"{source} takes several tensors by one pattern")
        form, *forms = dict.fromkeys(map(without_numbers, found))
        if forms:
            odd = next(key for key in found if without_numbers(key) == forms[0])
            raise NotConvertibleError(f"{source} takes {prefix}{odd} and others of another form")
        tails[pattern] = re.escape(form).replace(re.escape("#"), r"\d+") if len(found) > 1 else re.escape(found[0])
    return tails


def _reversible(operation: ConversionOps) -> ConversionOps:
    return ReversibleConcatenate(operation.dim) if type(operation) is Concatenate else operation


class Step(NamedTuple):
    """What stock does to make some of the tensors, by the places of its sources among those of the conversion."""

    first: int
    taken: int
    #: (number of the tensor, the pattern under which the operations leave it) pairs
    parts: tuple[tuple[int, str], ...]
    operations: tuple[ConversionOps, ...]
    #: the patterns that the operations were written with
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    #: the parameter that the operations are named by in a stock load, without what the layers don't share
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        # A load copies a conversion for each tensor that it takes: only what may change is worth that.
        return self._replace(operations=deepcopy(self.operations, memo)) if self.operations else self

    def calls(self, backwards: bool, head: str, **kwargs: Any) -> tuple[list[ConversionOps], dict[str, Any]]:
        """Stock's operations, or the reverse of them, and the arguments of each besides the tensors."""
        operations, patterns = list(self.operations), (list(self.sources), list(self.targets))
        if backwards:
            operations, patterns = [each.reverse_op for each in reversed(operations)], patterns[::-1]
        return operations, {
            "source_patterns": patterns[0],
            "target_patterns": patterns[1],
            "full_layer_name": f"{head}{self.name}",
            **kwargs,
        }


class LayoutConversion(ConversionOps):
    """Stock's operations, and what makes a fused layout of the tensors that they give.

    Args:
        steps: what stock does.
        tail: the name of the first parameter of the layout, without what the layers don't share.
        others: the names of what stock makes from the same tensors besides, which is made as well.
    """

    supports_many_to_many = True
    #: whether the reverse gives the checkpoint's tensors as stock's own reverse would, views of one another included
    reverses_as_stock = False

    def __init__(self, steps: tuple[Step, ...], tail: str, others: tuple[str, ...] = ()) -> None:
        self.steps = steps
        self.tail = tail
        self.others = others

    def __repr__(self) -> str:
        inner = [repr(operation) for step in self.steps for operation in step.operations]
        return f"{type(self).__name__}({', '.join(inner)})"

    def fuse(self, tensors: list[torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        """The parameters of the layout from those of stock; `name` is the first of them."""
        raise NotImplementedError

    def separate(self, tensors: dict[str, Any], name: str) -> list[torch.Tensor]:
        """The parameters of stock from those of the layout."""
        raise NotImplementedError

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The parameters of stock that the model has in no form, which its operations may look at."""
        return {}

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
        head = full_layer_name.removesuffix(self.tail)
        shown = as_separate(model, self.shapes(full_layer_name))
        pieces: dict[int, torch.Tensor] = {}
        for step in self.steps:
            outer = source_patterns[step.first : step.first + step.taken]
            if absent := [pattern for pattern in outer if not input_dict.get(pattern)]:
                raise ValueError(f"{full_layer_name} lacks what {', '.join(absent)} takes")
            tensors = {inner: input_dict.pop(name) for inner, name in zip(step.sources or ("",), outer, strict=True)}
            operations, arguments = step.calls(backwards=False, head=head, model=shown, **kwargs)
            for operation in operations:  # here, so that nothing holds what one has used up
                tensors = operation.convert(tensors, **arguments)
            for number, pattern in step.parts:
                # The only one may have any name: operations disagree about what a group in a pattern becomes.
                pieces[number] = single(tensors[pattern] if len(step.parts) > 1 else next(iter(tensors.values())))
        ordered = [pieces[number] for number in sorted(pieces)]
        wanted = len(ordered) - len(self.others)
        others = {f"{head}{name}": piece for name, piece in zip(self.others, ordered[wanted:], strict=True)}
        return self.fuse(ordered[:wanted], full_layer_name) | others

    @property
    def reverse_op(self) -> ConversionOps:
        return ReverseLayoutConversion(self)


class ReverseLayoutConversion(ConversionOps):
    """The reverse of a `LayoutConversion`."""

    def __init__(self, forwards: LayoutConversion) -> None:
        self.forwards = forwards

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

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
        forwards = self.forwards
        head = full_layer_name.removesuffix(forwards.tail)
        shown = as_separate(model, forwards.shapes(full_layer_name))
        others = [single(input_dict[f"{head}{name}"]) for name in forwards.others]
        pieces = dict(enumerate([*forwards.separate(input_dict, full_layer_name), *others]))
        result: dict[str, Any] = {}
        for step in forwards.steps:
            # In a list, as operations are given what is read: some take it as such, whatever they find in it.
            tensors: dict[str, Any] = {pattern: [pieces.pop(number)] for number, pattern in step.parts}
            operations, arguments = step.calls(backwards=True, head=head, model=shown, **kwargs)
            for operation in operations:  # here, so that nothing holds what one has used up
                tensors = operation.convert(tensors, **arguments)
            outer = target_patterns[step.first : step.first + step.taken]
            for inner, name in zip(step.sources or ("",), outer, strict=True):
                found = tensors[inner] if inner in tensors else _numbered(tensors, inner)
                result[name] = found if forwards.reverses_as_stock else single(found).contiguous()
        return result

    @property
    def reverse_op(self) -> ConversionOps:
        return self.forwards


def _numbered(tensors: Mapping[str, Any], pattern: str) -> list[torch.Tensor]:
    """What operations have left under `pattern` with numbers in the place of its star, in order."""
    expression = re.compile(re.escape(pattern).replace(re.escape("*"), r"(\d+)"))
    found = sorted((int(match[1]), name) for name in tensors if (match := expression.fullmatch(name)))
    return [single(tensors[name]) for _, name in found]
