"""Telling gains from noise, in rounds that measure stock twice, and each patcher once.

A round runs everything in random order. The runs of stock and of a patch that does nothing are three runs of the same,
and labelled by chance: so the mean of the patch's differences is compared with means for labels that are drawn anew in
each round (a randomization test, Fisher 1935; it assumes no distribution). The error rate of several comparisons
together is that of a single one (Holm 1979).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Key = TypeVar("Key")

#: The error rate of a benchmark for patches that do nothing.
LEVEL = 0.05
#: A smaller difference isn't worth a patch.
LEAST = 0.01
#: Deviations are clipped at this many times their median: other work of the machine isn't a gain.
_CUT = 3.0
_DRAWS = 20_000


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


def gain(rounds: Sequence[Sequence[float]]) -> Gain:
    """Compare rounds of logarithms (of stock, of the second stock, of the patcher).

    >>> result = gain([(0.0, 0.01, -0.2), (0.02, 0.0, -0.21), (0.01, 0.03, -0.19)] * 3)
    >>> round(result.ratio, 2), result.chance < 0.001
    (0.81, True)
    """
    values = torch.tensor(rounds, dtype=torch.float64)
    centred = values - values.mean(1, keepdim=True)
    most = _CUT * float(centred.abs().median()) or float(centred.abs().max())
    centred = centred.clamp(-most, most)
    labels = torch.randint(0, 3, (len(rounds), _DRAWS), generator=torch.Generator().manual_seed(0))
    by_chance, measured = centred.gather(1, labels).sum(0).abs(), float(centred[:, 2].sum().abs())
    chance = (1 + int((by_chance >= measured * (1 - 1e-9)).sum())) / (1 + _DRAWS)
    ratio, again = (
        math.exp(statistics.median(logarithms.tolist()))
        for logarithms in (values[:, 2] - values[:, :2].mean(1), values[:, 1] - values[:, 0])
    )
    return Gain(ratio, again, chance, len(rounds))


def decided(gains: Mapping[Key, Gain]) -> dict[Key, Gain]:
    """Mark the gains that are more than noise: improbable among all comparisons, larger than the difference of stock
    from itself, and larger than a hundredth."""
    results = dict(gains)
    for index, key in enumerate(sorted(gains, key=lambda key: gains[key].chance)):
        result = gains[key]
        if result.chance > LEVEL / (len(gains) - index):
            break
        difference, again = (abs(ratio - 1) for ratio in (result.ratio, result.again))
        results[key] = result._replace(differs=difference > max(again, LEAST))
    return results
