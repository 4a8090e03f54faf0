"""Of noise a benchmark says nothing, however it is made; of a gain it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from patcher.verification.benchmark import _ENOUGH
from patcher.verification.gains import LEAST, Gain, decided, gain

PATCHERS, ROUNDS, RUNS = 3, 8, 120


def calm(shape: tuple[int, ...]) -> torch.Tensor:
    return 0.01 * torch.randn(shape)


def bursts(shape: tuple[int, ...]) -> torch.Tensor:
    """Now and then something else runs, and takes up to twice the time."""
    return calm(shape) + torch.rand(shape) * (torch.rand(shape) < 0.1) * 0.7


def drifting(shape: tuple[int, ...]) -> torch.Tensor:
    """The machine gets slower from round to round, for all alike, and is luckier with some places in memory."""
    return calm(shape) + 0.05 * torch.randn(shape[0], 1).cumsum(0) + 0.02 * (torch.rand(shape) < 0.5)


def heavy(shape: tuple[int, ...]) -> torch.Tensor:
    return 0.02 * torch.distributions.StudentT(1.5).sample(shape)


NOISES = [calm, bursts, drifting, heavy]


def a_benchmark(noise: Callable[[tuple[int, ...]], torch.Tensor], gains: tuple[float, ...]) -> dict[int, Gain]:
    """What is decided of patchers that are that much faster."""
    times = noise((ROUNDS, 2 + len(gains)))
    found = {}
    for place, each in enumerate(gains):
        mine = times[:, 2 + place] - each
        found[place] = gain([(float(a), float(b), float(c)) for a, b, c in zip(*times[:, :2].T, mine, strict=True)])
    return decided(found)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
def test_nothing_is_said_of_nothing_more_than_once_in_twenty(noise: Callable[[tuple[int, ...]], torch.Tensor]) -> None:
    said = sum(any(one.differs for one in a_benchmark(noise, (0.0,) * PATCHERS).values()) for _ in range(RUNS))
    # By chance more than 13 of 120 where one in twenty is right: once in 300 times.
    assert said <= 13


@pytest.mark.parametrize("noise", [calm, bursts, drifting], ids=lambda noise: noise.__name__)
def test_a_gain_is_seen(noise: Callable[[tuple[int, ...]], torch.Tensor]) -> None:
    found = [a_benchmark(noise, (0.15, 0.0, -0.15)) for _ in range(20)]
    assert sum(each[0].verdict == "better" for each in found) >= 12
    assert sum(each[2].verdict == "worse" for each in found) >= 12
    assert sum(each[1].differs for each in found) <= 3


def test_what_is_certain_and_small_isn_t_worth_a_patch() -> None:
    rows = [(0.0, 1e-5 * place, -LEAST / 2 + 1e-6 * place) for place in range(20)]
    one = decided({"": gain(rows)})[""]
    assert one.chance < 0.001
    assert one.verdict == "no difference"


def test_what_stock_differs_from_itself_by_is_noise() -> None:
    rows = [(0.0, 0.3 + 1e-3 * (place % 3), -0.1) for place in range(20)]
    assert decided({"": gain(rows)})[""].verdict == "no difference"


@pytest.mark.parametrize("patchers", [1, 7, 36])
def test_six_rounds_are_enough(patchers: int) -> None:
    rows = [(0.0, 0.001 * (-1) ** place, -0.3) for place in range(_ENOUGH)]
    nothing = {place: gain([(0.0, 0.0, 0.0)] * _ENOUGH) for place in range(1, patchers)}
    assert decided({0: gain(rows), **nothing})[0].differs
