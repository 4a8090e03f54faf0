"""What to add to a patcher, as code: expressions, and the conversion that is probably missing, where a checkpoint has
under other names what the model lacks.

By names and shapes alone: one tensor of the same shape and no other is the same weight renamed, and several whose rows
add up to those that are wanted were joined. Where more than one guess fits there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from patcher.loading.findings import ordered
from patcher.patterns import without_numbers

Shapes = Mapping[str, tuple[int, ...]]


def missing_conversions(absent: Shapes, left_over: Shapes, others: Iterable[str]) -> list[str]:
    """The conversions from what is left over to what is absent, as code.

    Args:
        absent: parameters that the checkpoint lacks.
        left_over: keys of the checkpoint that nobody takes.
        others: the keys that somebody takes, so that no conversion takes them away.
    """
    layers: dict[tuple[str, ...], tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {}
    for number, shapes in enumerate((absent, left_over)):
        for name, shape in shapes.items():
            layers.setdefault(tuple(re.findall(r"(?<![^.])\d+(?![^.])", name)), ({}, {}))[number][name] = shape
    found = [_of_layer(*layer) for layer in layers.values()]
    alike = {tuple((without_numbers(name), *map(without_numbers, keys)) for name, keys in pairs) for pairs in found}
    if len(alike) != 1:
        return []
    taken = list(others)
    return [_code(name, keys, taken) for name, keys in found[0]]


def _of_layer(absent: Shapes, left_over: Shapes) -> list[tuple[str, tuple[str, ...]]]:
    """(parameter, the keys that it is made of), of one layer."""
    pairs: list[tuple[str, tuple[str, ...]]] = []
    free = dict(left_over)
    for name, shape in absent.items():
        same = [key for key in free if free[key] == shape]
        if len(same) == 1 and list(absent.values()).count(shape) == 1:
            pairs.append((name, (same[0],)))
            del free[same[0]]
    done = dict(pairs)
    for name, shape in absent.items():
        if name in done or not shape:
            continue
        leaf = name.rpartition(".")[2]
        parts = [key for key, found in free.items() if key.rpartition(".")[2] == leaf and found[1:] == shape[1:]]
        wanted = [other for other, found in absent.items() if other not in done and other.rpartition(".")[2] == leaf]
        if len(parts) > 1 and len(wanted) == 1 and sum(free[key][0] for key in parts) == shape[0]:
            pairs.append((name, tuple(sorted(parts, key=lambda key: _place(key, name, parts)))))
    return pairs


def _place(key: str, joined: str, parts: Sequence[str]) -> tuple[int, int]:
    """Where the name of a joined parameter names a part: `gate` comes first in `gate_up_proj`, `q` in `qkv_proj`."""
    own, whole = (name.split(".")[-2] if "." in name else name for name in (key, joined))
    at = whole.find(own.split("_")[0])
    return (at if at >= 0 else len(whole), parts.index(key))


def _code(name: str, keys: Sequence[str], others: Iterable[str]) -> str:
    sources, target = _tails([*keys], others), ""
    if sources:
        target = ".".join(name.split(".")[-len(sources[0].split(".")) :])
    else:  # a tail would take what others need: the whole names, with their numbers as groups
        sources = ["^" + re.sub(r"(?<![^.])\d+(?![^.])", r"(\\d+)", key).replace(".", r"\.") + "$" for key in keys]
        numbers = iter(range(1, name.count(".") + 2))
        target = re.sub(r"(?<![^.])\d+(?![^.])", lambda match: rf"\{next(numbers)}", name)
    if len(sources) == 1:
        return f"WeightRenaming({sources[0]!r}, {target!r})"
    return f"WeightConverter({sources!r}, [{target!r}], operations=[Concatenate(dim=0)])"


def _tails(keys: list[str], others: Iterable[str]) -> list[str]:
    """The ends of the keys, behind the last number, if nothing else ends so and they have one length."""
    tails = [re.split(r"(?<![^.])\d+\.", key)[-1] for key in keys]
    if len({tail.count(".") for tail in tails}) > 1 or tails == keys:
        return tails if tails == keys and len(tails) == 1 else []
    return [] if any(tail in other for tail in tails for other in others) else tails


def transposing(mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> list[str]:
    """The conversions of parameters that the checkpoint has transposed, as code.

    Args:
        mismatched: name, the shape that was found, its own.
    """
    names = sorted(
        name for name, found, own in mismatched if len(tuple(own)) == 2 and tuple(own) == tuple(found)[::-1]
    )
    tails = dict.fromkeys(re.escape(".".join(name.split(".")[-2:])).replace(r"\.", ".") for name in names)
    return [f"WeightConverter({tail!r}, {tail!r}, operations=[Transpose(0, 1)])" for tail in tails]


def expressions_for(keys: set[str], others: Iterable[str]) -> list[str]:
    """Expressions that name the keys by their tails: long enough to tell them from the other parameters."""
    rest = {_in_layers(key) for key in others if key not in keys}
    tails = {parts[-length:] for parts in rest for length in range(2, len(parts))}
    result: dict[str, None] = {}
    for key in ordered(keys):
        parts = _in_layers(key)
        escaped = [r"\d+" if part is None else re.escape(part) for part in parts]
        length = next((length for length in range(2, len(parts)) if parts[-length:] not in tails), None)
        if length is not None:
            expression = r"\." + r"\.".join(escaped[-length:]) + "$"
        else:
            expression = f"^{re.escape(key)}$" if parts in rest else "^" + r"\.".join(escaped) + "$"
        result[expression] = None
    return list(result)


def _in_layers(key: str) -> tuple[str | None, ...]:
    """The segments of a name, with None for each number."""
    return tuple(None if part.isdecimal() else part for part in key.split("."))
