"""The members of a patcher: each key, each fusion and each conversion as a patcher of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from patcher.errors import PatchConflictError
from patcher.spec.patcher import Patcher
from patcher.spec.validation import MAPPINGS

#: Of more members not every subset is measured.
FEW = 3


def members_of(patcher: Patcher) -> list[Patcher]:
    """Each key of a mapping and each fusion as a patcher of its own.

    >>> members_of(Patcher(fusions=["qkv", "gate_up"]))
    [Patcher(fusions=['qkv']), Patcher(fusions=['gate_up'])]
    """
    parts: list[dict[str, Any]] = [
        {field: {key: value}} for field in MAPPINGS for key, value in getattr(patcher, field).items()
    ]
    return [Patcher(**part) for part in [*parts, *({"fusions": [fusion]} for fusion in patcher.fusions)]]


def only(patcher: Patcher, members: Iterable[Patcher], **more: Any) -> Patcher:
    """A patcher with these members and conversions alone, and the rest as it is."""
    fields: dict[str, Any] = {field: {} for field in MAPPINGS} | {"fusions": [], "extra_weight_conversions": []}
    for member in members:
        for field, part in fields.items():
            part.update(getattr(member, field)) if isinstance(part, dict) else part.extend(getattr(member, field))
    return patcher.replace(**fields | {"alternatives": (), "name": ""} | more)


# --- what is measured


def measured_members(patcher: Patcher) -> list[Patcher]:
    """Each key and each fusion alone; a patcher with conversions is one member."""
    members = members_of(patcher)
    conversions = patcher.extra_weight_conversions or patcher.filtered_weight_conversion_patterns
    if len(members) < 2 or conversions or patcher.new_weights or patcher.dropped_weights:
        return [patcher]
    return [only(patcher, [member]) for member in members]


def candidates_of(patchers: Sequence[Patcher], members: Sequence[Patcher]) -> list[Patcher]:
    """What is measured: what was given, and the subsets of its members; of many each alone, and all."""
    sizes = range(1, len(members) + 1) if len(members) <= FEW else (1, len(members))
    return unique(
        [*patchers, *(each for size in sizes for some in combinations(members, size) for each in joined(some))]
    )


def joined(patchers: Sequence[Patcher]) -> list[Patcher]:
    """All in one; none where they contradict one another, or there are none."""
    with suppress(PatchConflictError):
        return [functools.reduce(operator.or_, patchers)] if patchers else []
    return []


def unique(patchers: Iterable[Patcher]) -> list[Patcher]:
    """Without those that do what one before them does."""
    found: dict[Patcher, Patcher] = {}
    for each in patchers:
        found.setdefault(each.replace(name="", alternatives=()), each)
    return list(found.values())
