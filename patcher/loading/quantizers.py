"""What a quantization config says of layers by name, where layers of the patched model have other names.

Such a config is written for the model of transformers: lists of what to leave alone, settings of single layers. What
it says of all weights that one layer here is made of holds for that layer; what it says of some of them only can't.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from patcher.compat.models import state_tensors, stock_class
from patcher.compat.quantizers import (
    goes_by_parameters,
    is_named,
    list_extended,
    method_of,
    names_setting,
    setting_of,
    settings_by_name,
    settings_extended,
    words_of,
)
from patcher.construction.in_force import InForce
from patcher.conversions.fused_weights import fused_modules
from patcher.conversions.selection import converts
from patcher.errors import InvalidPatcherError
from patcher.patterns import compress, inside
from patcher.resolution.resolution import skeleton


@dataclass(frozen=True)
class Weight:
    """A weight, and the layer that holds it.

    Attributes:
        is_stack: whether it lies in no layer of its own, but in the module that was patched.
    """

    layer: str
    name: str
    is_stack: bool = False


@dataclass(frozen=True)
class Remade:
    """Weights of one module that only the patched model has, and what they are made of."""

    path: str
    made: tuple[Weight, ...]
    parts: tuple[Weight, ...]


#: Whether a key of a config names a weight.
Names = Callable[[str, Weight], bool]


def remade_weights(
    model: PreTrainedModel, in_force: Iterable[InForce], replaced: Collection[str]
) -> tuple[Remade, ...]:
    """What fusions have made in a model, and replacements whose weights are converted.

    Args:
        replaced: the paths of the modules that a class mapping has replaced, none inside of another.
    """
    found: dict[tuple[str, ...], Remade] = {}
    for path, _, carried in fused_modules(model):
        for layout in sorted(carried.layouts, key=lambda layout: not layout.fused[0].endswith("weight")):
            made = tuple(_weight(path, name) for name in layout.fused)
            parts = tuple(_weight(path, name) for name in layout.stock)
            # A bias is in the layer of its weight, and goes with it.
            found.setdefault(tuple(weight.layer for weight in made), Remade(path, made, parts))
    fused = tuple(inside(path) for path, *_ in fused_modules(model))
    paths = [path for path in replaced if not inside(path).startswith(fused)]
    if paths and any(converts(entry.patcher) for entry in in_force):
        stock = state_tensors(skeleton(stock_class(model), model.config))  # type: ignore[arg-type]
        own = state_tensors(model)
        for path in paths:
            here, there = (
                [name for name, tensor in tensors.items() if tensor.dim() > 1 and _is_in(name, path, fused)]
                for tensors in (own, stock)
            )
            made, parts = (
                tuple(_weight(path, name.removeprefix(inside(path))) for name in names if name not in others)
                for names, others in ((here, stock), (there, own))
            )
            if made and parts:  # which is made of which, only the reading shows
                found[tuple(weight.layer for weight in made)] = Remade(path, made, parts)
    return tuple(found.values())


def _is_in(name: str, path: str, fused: tuple[str, ...]) -> bool:
    return name.startswith(inside(path)) and not name.startswith(fused)


def _weight(path: str, name: str) -> Weight:
    owner = name.rpartition(".")[0]
    return Weight(inside(path) + owner if owner else path, inside(path) + name, is_stack=not owner)


@contextmanager
def names_of_stock(quantizer: Any, remade: Collection[Remade]) -> Iterator[None]:
    """Have a quantizer that makes a model ready leave alone what is made of what its config names.

    Raises:
        InvalidPatcherError: the config doesn't say the same of weights that are one here.
    """
    with settings_of_stock(quantizer, remade):  # they are asked for when weights are read, but may raise before
        pass
    with list_extended(quantizer, lambda listed: _left_alone(quantizer, listed, remade)) as asked:
        yield
    if not asked:
        _check_no_part_is_named(quantizer, remade)


def settings_of_stock(quantizer: Any, remade: Collection[Remade]) -> AbstractContextManager[None]:
    """Have a quantizer give what is made of weights that its config has settings for these settings.

    Raises:
        InvalidPatcherError: it has other settings for others of them.
    """
    settings = settings_by_name(quantizer)
    if not settings or not remade:
        return nullcontext()
    found = _said_of_made(
        remade,
        list(settings),
        lambda key, weight: names_setting(key, weight.layer, weight.name),
        lambda weight: setting_of(settings, weight.layer, weight.name),
    )
    return settings_extended(quantizer, {weight.layer: value for item, value in found for weight in item.made})


def _left_alone(quantizer: Any, listed: list[str], remade: Collection[Remade]) -> list[str]:
    """Expressions for the layers that are made of weights which a quantizer leaves alone."""
    by_parameters = goes_by_parameters(quantizer)

    @cache
    def names(key: str, weight: Weight) -> bool:
        asked = {weight.name if by_parameters else weight.layer}
        return any(is_named(key, name) for name in (asked | {weight.layer, weight.name} if weight.is_stack else asked))

    found = _said_of_made(remade, listed, names, lambda weight: any(names(key, weight) for key in listed))
    return sorted({_expression(item.path, weight.layer) for item, _ in found for weight in item.made})


def _expression(path: str, layer: str) -> str:
    """A layer, and those like it that come of the same stack: thousands of expressions would take long to search."""
    head = inside(path)
    return re.escape(head) + re.sub(r"(?<![^.])\d+(?![^.])", r"\\d+", re.escape(layer.removeprefix(head)))


def _said_of_made(
    remade: Iterable[Remade], keys: Collection[str], names: Names, said: Callable[[Weight], Any]
) -> list[tuple[Remade, Any]]:
    """What a config says of the weights that others are made of, where it says anything.

    Raises:
        InvalidPatcherError: it doesn't say the same of all.
    """
    found: list[tuple[Remade, Any]] = []
    unlike: list[Remade] = []
    for item in remade:
        of_parts = {key for key in keys if any(names(key, weight) for weight in item.parts)}
        if not of_parts:
            continue
        of_made = [key for key in keys if key not in of_parts]  # if any: that speaks of the layers that there are here
        left = tuple(weight for weight in item.made if not any(names(key, weight) for key in of_made))
        values = [said(weight) for weight in item.parts]
        if all(value == values[0] for value in values):
            found.append((replace(item, made=left), values[0]))
        elif len(left) == len(item.made):
            unlike.append(item)
    if unlike:
        raise InvalidPatcherError(_text(unlike, said))
    return found


def _text(unlike: Iterable[Remade], said: Callable[[Weight], Any]) -> str:
    lines: dict[str, list[str]] = {}
    layers: dict[str, None] = {}
    for item in unlike:
        parts = [f"{_short(item, weight)} ({_described(said(weight))})" for weight in item.parts]
        made = dict.fromkeys(weight.layer for weight in item.made)
        layers |= dict.fromkeys(layer.rpartition(".")[2] for layer in made)
        lines.setdefault(", ".join(parts), []).extend(made)
    listed = "\n".join(f"  {', '.join(compress(made)[:3])}: {parts}" for parts, made in lines.items())
    return (
        f"quantization_config doesn't say the same of weights that are one weight in the patched model:\n{listed}\n"
        f"Name all of them alike, or name what holds them here ({', '.join(layers)}), or leave these modules out of "
        "the patcher."
    )


def _short(item: Remade, weight: Weight) -> str:
    return (weight.name if weight.is_stack else weight.layer).removeprefix(inside(item.path))


def _described(value: Any) -> str:
    if isinstance(value, bool):
        return "left alone" if value else "quantized"
    return "no setting" if value is None else str(value)


def _check_no_part_is_named(quantizer: Any, remade: Iterable[Remade]) -> None:
    """Raise where a quantizer that looks for names in a way of its own has been given such of parts."""
    words = words_of(quantizer)
    for item in remade:
        here = {weight.layer.rpartition(".")[2] for weight in item.made}
        for weight in item.parts:
            name = (weight.name if weight.is_stack else weight.layer).rpartition(".")[2]
            if name not in here and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", words):
                raise InvalidPatcherError(
                    f"quantization_config names {name}, of which the patched model makes {item.made[0].layer}, and "
                    f"how {method_of(quantizer)} looks for names isn't known. Leave such names out of "
                    "quantization_config, or these modules out of the patcher."
                )
