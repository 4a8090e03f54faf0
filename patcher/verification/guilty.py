"""Which member of a patcher is wrong: the one that fails alone, or without which the others pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from patcher.loading.record import record_of
from patcher.patterns import inside
from patcher.spec.patcher import Patcher
from patcher.verification.checks import Run
from patcher.verification.comparing import Stage
from patcher.verification.members import members_of, only

Fails = Callable[[Sequence[Patcher]], bool]


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
        return f"{self.member}: {why}" + (
            "" if self.layer is None else f", from {self.layer or 'the model itself'} on"
        )


def guilty_of(run: Run, patcher: Patcher, stages: Sequence[Stage]) -> Guilty | None:
    """The member that makes the first failing stage fail; None where it isn't a single one.

    A bisection: the patched model is loaded about log2(members) times, and each is run on the input on which the
    outputs were wrong, or through the stage that failed.
    """
    failed = next(stage for stage in stages if not stage.passed)
    layer = failed.layers.begins if failed.layers else None
    members = members_of(patcher)
    conversions = [Patcher(extra_weight_conversions=each) for each in patcher.extra_weight_conversions]
    if len(members) + (not members) * len(conversions) == 1:
        return Guilty(repr((members or conversions)[0]), alone=True, layer=layer)
    if failed.name == "load" and conversions:
        return None  # a part of them may not load for other reasons

    def fails(some: Sequence[Patcher]) -> bool:
        more = {"fingerprints": {}, "transformers": "", "strict": failed.name == "load"}
        side = replace(run.mine, patcher=only(patcher, [*some, *conversions], **more))
        with warnings.catch_warnings():  # of what has no effect without the others
            warnings.simplefilter("ignore")
            return run.fails(side, failed.name)

    if conversions and fails(()):  # conversions of stock modules, whatever is replaced
        members, conversions = conversions, []
    last = next((each for each in _owners(run, members, layer) if fails([each])), None)
    alone = last is not None
    if last is None:
        last = members[_first_failing(members, fails) - 1]
        alone = fails([last])
        if not alone and fails([each for each in members if each is not last]):
            return None
    return Guilty(repr(last), alone, layer)


def _first_failing(members: Sequence[Patcher], fails: Fails) -> int:
    """How many of the first ones fail, where all of them do and none doesn't."""
    passing, failing = 0, len(members)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if fails(members[:middle]):
            failing = middle
        else:
            passing = middle
    return failing


def _owners(run: Run, members: Sequence[Patcher], layer: str | None) -> Iterator[Patcher]:
    """The members that have put something where the error begins."""
    record = record_of(run.pair.ours) if layer is not None else None
    if record is None:
        return
    around = [item for item in record.modules if f"{layer}.".startswith(inside(item.path))]
    nearest = max(around, key=lambda item: len(item.path), default=None)
    fused = {item.fusion for item in around}
    kinds = {cls.__name__ for cls in type(run.pair.ours.get_submodule(str(layer))).__mro__}
    called = {name.rpartition(":")[2] for name, _, callers in record.functions if kinds & {*callers}}
    for member in members:
        classes = [*member.class_mapping.values(), *member.module_mapping.values()]
        functions = {key.rpartition(":")[2] for key in member.function_mapping}
        if (nearest and nearest.replacement in classes) or functions & called or fused & {*member.fusions}:
            yield member
