"""Which member of a patcher is wrong: the one that fails alone, or without which the others pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from patcher.loading.record import record_of
from patcher.patterns import inside
from patcher.spec.patcher import Patcher
from patcher.spec.validation import MAPPINGS
from patcher.verification.checks import Run
from patcher.verification.comparing import Stage

Fails = Callable[[Sequence["Member"]], bool]


class Guilty(NamedTuple):
    """The member of a patcher that is wrong.

    Attributes:
        member: as it is written: `Patcher(fusions=['qkv'])`.
        alone: whether it fails by itself; otherwise the patcher passes without it.
        layer: the first module whose error is its own, not that of what goes into it; None where no outputs differ.
    """

    member: str
    alone: bool
    layer: str | None = None

    def __str__(self) -> str:
        why = "it fails alone" if self.alone else "without it all is right"
        return f"{self.member}: {why}" + (
            "" if self.layer is None else f", from {self.layer or 'the model itself'} on"
        )


class Member(NamedTuple):
    """A key of a mapping, a fusion, or a conversion."""

    field: str
    value: Any

    def within(self, patcher: Patcher) -> Any:
        """What the patcher has for it."""
        return {self.value: getattr(patcher, self.field)[self.value]} if self.field in MAPPINGS else [self.value]

    def text(self, patcher: Patcher) -> str:
        """As it is written."""
        return repr(Patcher(**{self.field: self.within(patcher)}))


def guilty_of(run: Run, patcher: Patcher, stages: Sequence[Stage]) -> Guilty | None:
    """The member because of which the first stage that failed has failed; None where it is no single one.

    The models are loaded once for each look, a number that grows with the logarithm of that of the members; each is
    run on the input on which the outputs were wrong, or through the stage that failed.
    """
    failed = next(stage for stage in stages if not stage.passed)
    layer = failed.layers.begins if failed.layers else None
    members = [Member(field, key) for field in MAPPINGS for key in getattr(patcher, field)]
    members += [Member("fusions", fusion) for fusion in patcher.fusions]
    conversions = [Member("extra_weight_conversions", each) for each in patcher.extra_weight_conversions]
    if len(members) + (not members) * len(conversions) == 1:
        return Guilty((members or conversions)[0].text(patcher), alone=True, layer=layer)
    if failed.name == "load" and conversions:
        return None  # which of them need each other only the whole tells

    def fails(some: Sequence[Member]) -> bool:
        side = replace(run.mine, patcher=_only(patcher, some, conversions, strict=failed.name == "load"))
        with warnings.catch_warnings():  # of what has no effect without the others
            warnings.simplefilter("ignore")
            return run.fails(side, failed.name)

    if conversions and fails(()):  # conversions of stock modules, whatever is replaced
        members, conversions = conversions, []
    last = next((each for each in _owners(run, patcher, layer) if each in members and fails([each])), None)
    alone = last is not None
    if last is None:
        last = members[_first_failing(members, fails) - 1]
        alone = fails([last])
        if not alone and fails([each for each in members if each is not last]):
            return None
    return Guilty(last.text(patcher), alone, layer)


def _first_failing(members: Sequence[Member], fails: Fails) -> int:
    """How many of the first ones fail, where all of them do and none doesn't."""
    passing, failing = 0, len(members)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if fails(members[:middle]):
            failing = middle
        else:
            passing = middle
    return failing


def _only(patcher: Patcher, some: Sequence[Member], conversions: Sequence[Member], *, strict: bool) -> Patcher:
    """The patcher with these members alone: of conversions those run that have their targets."""
    parts: dict[str, Any] = {field: {} for field in MAPPINGS} | {"fusions": [], "extra_weight_conversions": []}
    for member in [*some, *conversions]:
        part = parts[member.field]
        part.update(member.within(patcher)) if isinstance(part, dict) else part.append(member.value)
    return patcher.replace(**parts, strict=strict, alternatives=(), fingerprints={}, transformers="")


def _owners(run: Run, patcher: Patcher, layer: str | None) -> Iterator[Member]:
    """The members that have put something where the error begins."""
    record = record_of(run.pair.ours) if layer is not None else None
    if record is None:
        return
    for item in sorted(record.modules, key=lambda item: -len(item.path)):
        if f"{layer}.".startswith(inside(item.path)):
            for field in MAPPINGS[:2]:
                for key, replacement in getattr(patcher, field).items():
                    if replacement is item.replacement:
                        yield Member(field, key)
            break
    kinds = {cls.__name__ for cls in type(run.pair.ours.get_submodule(str(layer))).__mro__}
    called = {name.rpartition(":")[2] for name, _, callers in record.functions if kinds & {*callers}}
    for key in patcher.function_mapping:
        if key.rpartition(":")[2] in called:
            yield Member("function_mapping", key)
    for fusion in record.fusions:
        if any(f"{layer}.".startswith(inside(each.path)) for each in record.modules if each.fusion == fusion):
            yield Member("fusions", fusion)
