"""Telling gains from noise, in rounds that measure stock twice, and each patcher once.

A round runs everything in random order. The runs of stock and of a patch that does nothing are three runs of the same:
so the patch is the fastest of them by chance, in one of three rounds (a sign test; it assumes no distribution). With
several comparisons each has a part of the error rate (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, exp
from statistics import median
from typing import Any, NamedTuple, TypeVar

Key = TypeVar("Key")

#: The error rate of a benchmark for patches that do nothing.
LEVEL = 0.05
#: A smaller difference isn't worth a patch.
LEAST = 0.01


class Gain(NamedTuple):
    """A measure of a patcher beside stock.

    Attributes:
        ratio: the median ratio to stock.
        again: that of the second stock to the first.
        chance: the probability of such a difference for a patch that does nothing.
        rounds: the number of rounds.
        differs: whether it is more than noise.
    """

    ratio: float
    again: float
    chance: float
    rounds: int
    differs: bool = False

    @property
    def verdict(self) -> str:
        """The verdict in a word; less is better."""
        return "no difference" if not self.differs else "better" if self.ratio < 1 else "worse"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return self._asdict() | {"verdict": self.verdict}


def gain(rounds: Sequence[tuple[float, float, float]]) -> Gain:
    """Compare rounds of logarithms (of stock, of the second stock, of the patcher).

    >>> result = gain([(0.0, 0.01, -0.2), (0.02, 0.0, -0.21), (0.01, 0.03, -0.19)] * 3)
    >>> round(result.ratio, 2), result.chance < 0.001
    (0.81, True)
    """
    count = len(rounds)
    fastest = sum(mine < min(stock, again) for stock, again, mine in rounds)
    slowest = sum(mine > max(stock, again) for stock, again, mine in rounds)
    ways = sum(comb(count, hits) * 2 ** (count - hits) for hits in range(max(fastest, slowest), count + 1))
    ratio = median(mine - (stock + again) / 2 for stock, again, mine in rounds)
    noise = median(again - stock for stock, again, _ in rounds)
    return Gain(exp(ratio), exp(noise), min(1.0, 2 * ways / 3**count), count)


def decided(gains: Mapping[Key, Gain]) -> dict[Key, Gain]:
    """Mark the gains that are more than noise: improbable among all comparisons, larger than the difference of stock
    from itself, and larger than a hundredth."""

    def differs(one: Gain) -> bool:
        return one.chance * len(gains) <= LEVEL and abs(one.ratio - 1) > max(abs(one.again - 1), LEAST)

    return {key: one._replace(differs=differs(one)) for key, one in gains.items()}
