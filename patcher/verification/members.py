"""The members of a patcher (each key, fusion and conversion), and the one that makes a verification fail."""

from __future__ import annotations

import functools
import operator
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from patcher.functions.models import replaced_now
from patcher.loading.record import record_of
from patcher.patterns import inside
from patcher.spec.patcher import Patcher
from patcher.spec.validation import MAPPINGS
from patcher.verification.checks import Run
from patcher.verification.comparing import Stage


def members_of(patcher: Patcher) -> list[Patcher]:
    """Return a patcher for each key of a mapping and each fusion.

    >>> members_of(Patcher(fusions=["qkv", "gate_up"]))
    [Patcher(fusions=['qkv']), Patcher(fusions=['gate_up'])]
    """
    parts: list[dict[str, Any]] = [
        {field: {key: value}} for field in MAPPINGS for key, value in getattr(patcher, field).items()
    ]
    return [Patcher(**part) for part in [*parts, *({"fusions": [fusion]} for fusion in patcher.fusions)]]


def only(patcher: Patcher, members: Iterable[Patcher], **more: Any) -> Patcher:
    """Return the patcher with these members only."""
    whole = functools.reduce(operator.or_, members, Patcher())
    fields = {name: getattr(whole, name) for name in (*MAPPINGS, "fusions", "extra_weight_conversions")}
    return patcher.replace(**fields | {"alternatives": (), "name": ""} | more)


class Guilty(NamedTuple):
    """The member of a patcher that is wrong.

    Attributes:
        member: as it is written: `Patcher(fusions=['qkv'])`.
        alone: whether it fails alone; otherwise the patcher passes without it.
        layer: the first module whose outputs differ although its inputs don't; None where no outputs differ.
    """

    member: str
    alone: bool
    layer: str | None = None

    def __str__(self) -> str:
        why = "it fails alone" if self.alone else "the others pass without it"
        where = "" if self.layer is None else f", from {self.layer or 'the model itself'} on"
        return f"{self.member}: {why}{where}"


def guilty_of(run: Run, patcher: Patcher, stages: Sequence[Stage]) -> Guilty | None:
    """Return the member that makes the first failed stage fail; None if it isn't a single one.

    A bisection: the model is loaded about log2(members) times, and runs on the input on which the outputs differed, or
    through the stage that failed.
    """
    failed = next(stage for stage in stages if not stage.passed)
    layer = failed.layers.begins if failed.layers is not None else None
    members = members_of(patcher)
    conversions = [Patcher(extra_weight_conversions=conversion) for conversion in patcher.extra_weight_conversions]
    if len(members) + (not members) * len(conversions) == 1:
        return Guilty(repr((members or conversions)[0]), alone=True, layer=layer)
    if failed.name == "load" and conversions:
        return None  # a part of them may not load for other reasons

    def fails(some: Sequence[Patcher]) -> bool:
        more = {"fingerprints": {}, "transformers": "", "strict": failed.name == "load"}
        side = replace(run.mine, patcher=only(patcher, [*some, *conversions], **more))
        with warnings.catch_warnings():  # members may have no effect without the others
            warnings.simplefilter("ignore")
            return run.fails(side, failed.name)

    if conversions and fails(()):  # the conversions fail whatever is replaced
        members, conversions = conversions, []
    guilty = next((member for member in _owners(run, members, layer) if fails([member])), None)
    if guilty is not None:
        return Guilty(repr(guilty), True, layer)
    guilty = members[bisect_left(range(1, len(members)), True, key=lambda count: fails(members[:count]))]
    alone = fails([guilty])
    if not alone and fails([member for member in members if member is not guilty]):
        return None
    return Guilty(repr(guilty), alone, layer)


def _owners(run: Run, members: Sequence[Patcher], layer: str | None) -> Iterator[Patcher]:
    """Yield the members that have replaced something where the error begins."""
    record = record_of(run.pair.ours) if layer is not None else None
    if record is None:
        return
    kinds = {cls.__name__ for cls in type(run.pair.ours.get_submodule(str(layer))).__mro__}
    replaced: set[Any] = {hit.replacement for hit in replaced_now(run.pair.ours) if not kinds.isdisjoint(hit.callers)}
    around = [item for item in record.modules if f"{layer}.".startswith(inside(item.path))]
    for innermost in sorted(around, key=lambda item: len(item.path))[-1:]:
        replaced |= {innermost.replacement, innermost.fusion}
    for member in members:
        values = (value for field in MAPPINGS for value in getattr(member, field).values())
        if not replaced.isdisjoint([*values, *member.fusions]):
            yield member
