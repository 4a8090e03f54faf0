"""Whether a patched model learns what stock does: gradients, training mode, and dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from transformers import PretrainedConfig

from patcher.verification.comparing import Pair, Reference, Stage, UncheckedError
from patcher.verification.modules import captured, run_alone
from patcher.verification.numerics import difference
from patcher.verification.passes import Pass
from patcher.verification.texts import parts_of

#: How often what is drawn at random is run, and how many standard errors of their difference two means may be apart:
#: six are exceeded by chance once in 500 million. Less than a fiftieth isn't looked at.
DRAWS, ERRORS, SHARE = 48, 6.0, 0.02


@contextmanager
def in_training(*models: Any) -> Iterator[None]:
    """Within, models are in training mode; afterwards they, and what they count in it, are as before."""
    buffers = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    try:
        for model in models:
            model.train()
        yield
    finally:
        for model in models:
            model.eval()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def learned(pair: Pair, runs: Iterable[Pass], *, few: bool = True) -> Iterator[Reference]:
    """What these passes give, and the gradients of all parameters of weighted sums of it, in the layout of the
    checkpoint."""
    parameters = list(pair.stock.parameters())
    if not all(parameter.is_floating_point() for parameter in parameters):
        raise UncheckedError("the weights aren't floating-point numbers")
    if any(parameter.is_meta for parameter in parameters):
        raise UncheckedError("weights that are offloaded get no gradients")
    return pair.references((replace(one, learns=True) for one in runs), few=few)


# --- training mode -------------------------------------------------------------------------------------------------


def dropouts_of(config: PretrainedConfig) -> dict[str, float]:
    """What is drawn at random in training, by the config: the path of each probability that isn't zero."""
    return {
        f"{path}{name}": float(value)
        for path, part in parts_of(config)
        for name, value in vars(part).items()
        if ("drop" in name or "jitter" in name) and isinstance(value, int | float) and 0 < value <= 1
        if not isinstance(value, bool)
    }


def training_stage(
    pair: Pair,
    load: Callable[[dict[str, float]], Pair],
    passes: Sequence[Pass],
    classes: Sequence[str],
    tolerance: float,
) -> Stage:
    """Compare outputs and gradients in training mode, first without anything that is drawn at random, which then has
    to be equal; then with each dropout that the config has, alone.

    A patch may draw in another order than stock. So where the same seed doesn't give the same, the distributions of
    the outputs of each replaced module are compared: see `spread`.

    Args:
        load: both models again, with other values in the config.
        classes: the path of one module for each pair of classes.
    """
    dropouts = dropouts_of(pair.stock.config)
    exact = load(dict.fromkeys(dropouts, 0.0)) if dropouts else pair
    with in_training(exact.stock, exact.ours):
        drawn = [difference(passes[0].of(exact.stock, other), passes[0].of(exact.stock)) for other in (1, 2)]
        if not any(gap.absolute for gap in drawn):
            references = chain(learned(exact, passes[:1], few=False), learned(exact, passes[1:]))
            stage = exact.compare("training", references, tolerance)
            if not stage.passed:
                return stage
        else:  # some of it isn't in the config
            stage = Stage("training", True)
            dropouts |= {"": 0.0}
    for name in dropouts:
        alone = {other: value if other == name else 0.0 for other, value in dropouts.items() if other}
        problem = _drawn_alike(load(alone) if len(dropouts) > 1 else pair, passes, classes, tolerance)
        if problem:
            what = f"with {name}={dropouts[name]:g} " if name else ""
            return Stage("training", False, stage.figures, None, f"{what}{problem}")
    return stage


def _drawn_alike(pair: Pair, passes: Sequence[Pass], classes: Sequence[str], tolerance: float) -> str:
    """What is wrong with the random numbers of training mode, "" if nothing."""
    calls = captured(pair.stock, classes, passes)
    with in_training(pair.stock, pair.ours), torch.no_grad():
        if pair.compare("training", pair.references(passes, few=False), tolerance).passed:
            return ""
        for path in classes:
            try:
                stock, ours = (model.get_submodule(path) for model in (pair.stock, pair.ours))
                runs = [[run_alone(each, calls[path], seed)[0] for seed in range(DRAWS)] for each in (stock, ours)]
                stock.eval()
                problem = spread(run_alone(stock, calls[path])[0], *runs)
                stock.train()
            except Exception:  # it can't be run alone
                pair.stock.train()
                runs = [[passes[0].of(model, seed)[0] for seed in range(DRAWS)] for model in (pair.stock, pair.ours)]
                problem = spread(torch.stack(runs[0]).mean(0), *runs)
            if problem:
                return f"{problem}; {pair.blame(path)}"
    return ""


def spread(center: torch.Tensor, stock: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> str:
    """How dropout acts otherwise on an output than in stock, "" if it doesn't: the mean size of the output, the
    variance around the output without dropout, and how much of that all rows, and all places of a row, share.

    >>> draws = lambda p, size: [torch.nn.functional.dropout(torch.ones(4, 8, 16), p) * size for _ in range(48)]
    >>> center, _ = torch.ones(4, 8, 16), torch.manual_seed(0)
    >>> spread(center, draws(0.1, 1), draws(0.1, 1))
    ''
    >>> spread(center, draws(0.1, 1), draws(0.1, 0.9))
    "in training mode the size of the output is 0.9 times stock's"
    >>> spread(center, draws(0.1, 1), draws(0, 1))
    "in training mode the variance of the output is 0 times stock's"
    """
    features: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "size of the output": lambda x: (x * center).sum() / center.square().sum(),
        "variance of the output": lambda x: (x - center).square().mean(),
        "variance that all rows share": lambda x: (x - center).mean(0).square().mean(),
        "variance that a row shares": lambda x: (x - center).flatten(1, -2).mean(1).square().mean(),
    }
    for what, feature in features.items():
        if center.dim() < 3 and "share" in what:
            continue
        theirs, mine = (torch.stack([feature(x.double()) for x in each]) for each in (stock, ours))
        error = ((theirs.var() + mine.var()) / DRAWS).sqrt()
        apart = (mine.mean() - theirs.mean()).abs()
        if not apart <= max(ERRORS * float(error), SHARE * float(theirs.mean().abs())):
            ratio = float(mine.mean() / theirs.mean())
            return f"in training mode the {what} is {ratio:.2g} times stock's"
    return ""
