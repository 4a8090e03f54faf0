"""Groups and state of an optimizer, from the parameters of one layout to those of another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patcher.errors import PatchedWeightsError
from patcher.layouts.sharded import whole
from patcher.layouts.transforms import by_itself
from patcher.patterns import compress

#: In a group: its parameters; and the names that they were given with.
PARAMS, GIVEN_NAMES = "params", "param_names"
_ADVICE = (
    "Parts of one parameter are trained together: put them into one group, or load the model without the fusion or "
    "conversion that joins them"
)


@dataclass(frozen=True)
class Move:
    """Parameters that become others: from the layout of the model to that of transformers, or the reverse."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    convert: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@torch.no_grad()
def moved(
    groups: list[dict[str, Any]],
    state: Mapping[Any, Any],
    moves: Iterable[Move],
    where: str,
    order: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Groups and state with some parameters in the place of those that they are made of.

    Args:
        where: what they are of, for errors.
        order: the places that parameters have in groups, if not those of what they are made of.

    Raises:
        PatchedWeightsError: those are trained differently.
    """
    place = {name: number for number, group in enumerate(groups) for name in group[PARAMS]}
    becomes: dict[str, tuple[str, ...]] = {}
    values: dict[Any, Any] = {}
    for move in moves:
        _check_one_group(move, groups, place, where)
        becomes |= {move.sources[0]: move.targets, **dict.fromkeys(move.sources[1:], ())}
        for key, found in _states(move, state, where).items():
            for name, value in zip(move.targets, found, strict=True):
                values.setdefault(name, {})[key] = value
    for name, found in state.items():
        if name not in becomes:
            values[name] = {key: whole(value) for key, value in found.items()} if isinstance(found, dict) else found
    result = []
    for group in groups:
        given = group.get(GIVEN_NAMES, group[PARAMS])
        pairs = [
            (new, new if name in becomes else called)
            for name, called in zip(group[PARAMS], given, strict=True)
            for new in becomes.get(name, (name,))
        ]
        if order is not None:
            pairs.sort(key=lambda pair: order.get(pair[0], len(order)))
        changed = {**group, PARAMS: [new for new, _ in pairs]}
        if GIVEN_NAMES in group:
            changed[GIVEN_NAMES] = [called for _, called in pairs]
        result.append(changed)
    ordered = {name: values.pop(name) for group in result for name in group[PARAMS] if name in values}
    return {"state": {**ordered, **values}, "param_groups": result}


def _check_one_group(move: Move, groups: list[dict[str, Any]], place: Mapping[str, int], where: str) -> None:
    made = f"{', '.join(compress(move.targets))} {'is' if len(move.targets) == 1 else 'are'} made of"
    if absent := [name for name in move.sources if name not in place]:
        there = [name for name in move.sources if name in place]
        raise PatchedWeightsError(
            f"{made} {listed(move.sources)}, and of these {where} has {listed(there)}, not {listed(absent)}. "
            f"{_ADVICE}."
        )
    numbers = sorted({place[name] for name in move.sources})
    if len(numbers) > 1:
        one, other = (groups[number] for number in numbers[:2])
        differing = [key for key in options(one) if not same(one[key], other.get(key))]
        held = "; ".join(
            f"group {number} {listed([name for name in move.sources if place[name] == number])}" for number in numbers
        )
        raise PatchedWeightsError(
            f"{made} parameters that are in several groups of {where} ({held}), "
            f"{f'which differ in {listed(differing)}' if differing else 'of the same options'}. {_ADVICE}."
        )


def _states(move: Move, state: Mapping[Any, Any], where: str) -> dict[str, list[Any]]:
    """What of the state of some parameters is that of those which they become: entry -> a value for each.

    Raises:
        PatchedWeightsError: they are in different states.
    """
    made = f"{', '.join(compress(move.targets))} {'is' if len(move.targets) == 1 else 'are'} made of"
    entries = {name: state.get(name) or {} for name in move.sources}
    keys = {name: sorted(found) for name, found in entries.items()}
    first, *rest = move.sources
    for name in rest:
        if keys[name] != keys[first]:
            raise PatchedWeightsError(
                f"{made} {first}, of which {where} has {listed(keys[first]) or 'no state'}, and {name}, of which it "
                f"has {listed(keys[name]) or 'no state'}. {_ADVICE}."
            )
    result: dict[str, list[Any]] = {}
    for key in entries[first]:
        found = [whole(entries[name][key]) for name in move.sources]
        if all(
            isinstance(value, torch.Tensor) and value.shape == torch.Size(shape)
            for value, shape in zip(found, move.shapes, strict=True)
        ):
            result[key] = [by_itself(value.contiguous()) for value in move.convert(found)]
        elif any(isinstance(value, torch.Tensor) and value.dim() for value in found):
            raise _other_shape(key, move.sources, found, move.shapes, where)
        else:
            for name, value in zip(rest, found[1:], strict=True):
                if not same(value, found[0]):
                    raise PatchedWeightsError(
                        f"{made} {first}, whose {key} is {_said(found[0])} in {where}, and {name}, whose {key} is "
                        f"{_said(value)}. {_ADVICE}."
                    )
            result[key] = [copy.deepcopy(found[0]) for _ in move.targets]  # a step is counted in place
    return result


def check_shapes(name: str, entries: Mapping[str, Any], shape: tuple[int, ...], where: str) -> None:
    """Refuse the state of a parameter of another shape.

    Raises:
        PatchedWeightsError: it is.
    """
    for key, value in entries.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != torch.Size(shape):
            raise _other_shape(key, [name], [value], [shape], where)


def _other_shape(
    key: str, names: Iterable[str], values: Iterable[Any], shapes: Iterable[Sequence[int]], where: str
) -> PatchedWeightsError:
    found = " and ".join(
        str(tuple(value.shape)) if isinstance(value, torch.Tensor) else str(value) for value in values
    )
    expected = " and ".join(str(tuple(shape)) for shape in shapes)
    return PatchedWeightsError(
        f"{key} of {listed(names)} is {found} in {where}, and the shape of what it is for is {expected}."
    )


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in (PARAMS, GIVEN_NAMES)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _said(value: Any) -> str:
    return str(value.item() if isinstance(value, torch.Tensor) else value)


def listed(names: Iterable[str]) -> str:
    return ", ".join(compress(list(names)))
