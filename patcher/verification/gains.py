"""What is a gain, and what is noise: rounds in which stock is measured twice, and each patcher beside both.

In a round everything is run once, in an order that is drawn. Where a patch does nothing, the two runs of stock and
that of the patch are three runs of one thing, and which of them bears the name of the patch is chance: so the mean of
its differences is compared with what comes out when the names are drawn anew in each round (a randomization test,
Fisher 1935; it assumes no distribution). With several comparisons the probability that one of them says something of
nothing is that of a single one (Holm 1979).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Key = TypeVar("Key")

#: How often a benchmark may say something of a patch that does nothing.
LEVEL = 0.05
#: What is less isn't worth a patch, wherever it comes from.
LEAST = 0.01
#: Deviations are cut at so many times their median: a moment in which the machine did something else isn't a gain.
_CUT = 3.0
_DRAWS = 20_000


class Gain(NamedTuple):
    """One thing that was measured, beside stock.

    Attributes:
        ratio: how many times what stock takes: the median of the rounds.
        again: the same of stock beside itself.
        chance: how often as much would be seen of a patch that does nothing.
        rounds: how often it was measured.
        differs: whether it is outside of the noise.
    """

    ratio: float
    again: float
    chance: float
    rounds: int
    differs: bool = False

    @property
    def verdict(self) -> str:
        """In a word: less is better."""
        return "no difference" if not self.differs else "better" if self.ratio < 1 else "worse"

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return self._asdict() | {"verdict": self.verdict}


def gain(rounds: Sequence[Sequence[float]]) -> Gain:
    """What rounds of (logarithm of stock's, of stock's again, of the patcher's) show by themselves.

    >>> found = gain([(0.0, 0.01, -0.2), (0.02, 0.0, -0.21), (0.01, 0.03, -0.19)] * 3)
    >>> round(found.ratio, 2), found.chance < 0.001
    (0.81, True)
    """
    values = torch.tensor(rounds, dtype=torch.float64)
    centred = values - values.mean(1, keepdim=True)
    most = _CUT * float(centred.abs().median()) or float(centred.abs().max())
    centred = centred.clamp(-most, most)
    drawn = torch.randint(0, 3, (len(rounds), _DRAWS), generator=torch.Generator().manual_seed(0))
    by_chance, found = centred.gather(1, drawn).sum(0).abs(), float(centred[:, 2].sum().abs())
    chance = (1 + int((by_chance >= found * (1 - 1e-9)).sum())) / (1 + _DRAWS)
    beside, again = ((values[:, 2] - values[:, :2].mean(1)), values[:, 1] - values[:, 0])
    ratios = [float(torch.tensor(statistics.median(each.tolist())).exp()) for each in (beside, again)]
    return Gain(ratios[0], ratios[1], chance, len(rounds))


def rounds_needed(patchers: int) -> int:
    """How many it takes until one of so many patchers can be outside of the noise.

    >>> rounds_needed(1), rounds_needed(3)
    (3, 4)
    """
    return next(rounds for rounds in range(1, 100) if 3.0**-rounds <= LEVEL / patchers)


def decided(gains: Mapping[Key, Gain]) -> dict[Key, Gain]:
    """All of a benchmark, with what is outside of the noise: improbable among so many comparisons, more than stock
    differs from itself, and more than a hundredth."""
    found = dict(gains)
    for place, key in enumerate(sorted(gains, key=lambda key: gains[key].chance)):
        each = gains[key]
        if each.chance > LEVEL / (len(gains) - place):
            break
        apart, again = (abs(ratio - 1) for ratio in (each.ratio, each.again))
        found[key] = each._replace(differs=apart > max(again, LEAST))
    return found
