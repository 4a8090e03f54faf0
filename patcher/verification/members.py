"""The members of a patcher: each key, each fusion and each conversion as a patcher of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from patcher.errors import PatchConflictError
from patcher.spec.patcher import Patcher
from patcher.spec.validation import MAPPINGS


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


def joined(patchers: Iterable[Patcher]) -> Patcher | None:
    """All in one; None where they contradict one another, or there are none."""
    several = list(patchers)
    with suppress(PatchConflictError):
        return functools.reduce(operator.or_, several) if several else None
    return None
