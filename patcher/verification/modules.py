"""Modules by themselves: how exactly they compute in half precision, and what they draw at random in training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from patcher.compat.models import choose_experts_implementation, implementation
from patcher.verification.comparing import Pair, Reference, Stage, UncheckedError, error_text
from patcher.verification.passes import Pass, difference, floating_tensors, hooked, seeded
from patcher.verification.texts import parts_of

#: Operations whose result suffers when they are done in half precision, which is why modeling code upcasts for them.
_DELICATE = {"mean", "var", "sum", "rsqrt", "pow", "exp", "softmax", "log_softmax", "sin", "cos", "cumsum"}
#: How much less exact than stock's a module may be that does such an operation in half precision, and stock doesn't.
#: Rounding an intermediate value in addition to the result makes errors about 1.4 times as large (the square root of
#: 2); a module that keeps its upcasts is as exact as stock's.
PRECISION = 1.2
#: And how much less exact any module may be: sums of tiles, each of which is rounded, are 1.3 times less exact.
EXACTNESS = 2.5
#: Inputs are scaled up by these, for as long as stock computes something: its error is no more than a twentieth.
SCALES, ACCURATE = (1.0, 16.0, 256.0), 0.05
HALVES = (torch.bfloat16, torch.float16)
#: How often what is drawn at random is run, and how many standard errors of their difference two means may be apart:
#: six are exceeded by chance once in 500 million. Less than a fiftieth isn't looked at.
DRAWS, ERRORS, SHARE = 48, 6.0, 0.02

#: What a module was called with: the arguments by place, and by name.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def captured(stock: nn.Module, paths: Iterable[str], passes: Iterable[Pass]) -> dict[str, Call]:
    """For each path the largest inputs that the module there gets."""
    wanted = {stock.get_submodule(path): path for path in paths}
    sizes: dict[str, int] = {}
    calls: dict[str, Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        path, numbers = wanted[module], [0]
        recursively_apply(lambda tensor: numbers.append(tensor.numel()), (args, kwargs))
        if (size := sum(numbers)) > sizes.get(path, 0):
            sizes[path], calls[path] = size, copy.deepcopy((args, kwargs))

    # Before the call: what goes in may be written to, a cache for one.
    with hooked(((module, note) for module in wanted), before=True), torch.no_grad():
        for one in passes:
            one.of(stock)
    return calls


def run_alone(module: nn.Module, call: Call, seed: int = 0) -> list[torch.Tensor]:
    """What a module makes of its inputs, as stock gives them."""
    args, kwargs = copy.deepcopy(call)
    with seeded(seed):
        return list(floating_tensors(module(*args, **kwargs)))


# --- half precision


def precision_stage(
    pair: Pair, load: Callable[[torch.dtype], Pair], paths: Sequence[str], passes: Sequence[Pass], dtype: torch.dtype
) -> Stage:
    """Compare how exactly replaced modules compute in half precision, each run alone, with a float64 computation.

    The outputs of a model in half precision don't show it: those of right and wrong patches overlap. The error of a
    module relative to that of stock does, as the Euclidean distance of all but the worst quarter of the rows: there
    a router may choose another expert.
    """
    if not paths:
        raise UncheckedError("nothing is replaced")
    calls: dict[str, Call] = {}
    with pair.layers(few=True), suppress(Exception):  # some may be in other layers
        calls = captured(pair.stock, paths, passes)
    calls = calls if calls.keys() == set(paths) else captured(pair.stock, paths, passes)
    ratios: dict[str, float] = {}
    for half in [dtype] if dtype in HALVES else HALVES:
        try:
            loaded = pair if half is dtype else load(half)
        except UncheckedError:  # stock doesn't load in it
            continue
        for path, call in calls.items():
            ratio, problem = _error_beside_stock(loaded, pair.ours.get_submodule(path), path, call, half)
            if problem:
                text = f"alone, in {half}, {problem}: {pair.blame(path)}"
                return Stage("precision", False, (("error / stock's", ratio),), EXACTNESS, text)
            if ratio:
                ratios[path] = max(ratio, ratios.get(path, 1.0))
    if not ratios:
        raise UncheckedError("no replaced module could be run alone in half precision")
    figures = {"modules compared with float64": float(len(ratios)), "of": float(len(paths))}
    return Stage("precision", True, (("error / stock's", max(ratios.values())), *figures.items()), EXACTNESS)


@contextmanager
def eager(model: Any, what: str) -> Iterator[bool]:
    """Within, a model computes attention ("attn") or "experts" as its own code says: no other way of experts
    multiplies float64. Whether that is another way than its own, for attention than sdpa."""
    before = implementation(model, what)
    choose = model.set_attn_implementation if what == "attn" else partial(choose_experts_implementation, model)
    is_other = before == "sdpa" or (what == "experts" and before is not None)
    try:
        if is_other:
            choose("eager")
        yield is_other and implementation(model, what) == "eager"
    finally:
        if is_other:
            choose(str(before))


def _error_beside_stock(pair: Pair, alone: nn.Module, path: str, call: Call, dtype: torch.dtype) -> tuple[float, str]:
    """The largest error of the replaced module to stock's, 0 where it can't be run alone, and what is wrong with it.

    Args:
        alone: the replaced module as it is verified, not in half precision.
        call: the inputs of the module.
    """
    module, ours = pair.stock.get_submodule(path), pair.ours.get_submodule(path)
    # The config says which attention is computed, and stays that of the model.
    configs = [
        each.config for each in pair.stock.modules() if isinstance(getattr(each, "config", 0), PretrainedConfig)
    ]
    exact = copy.deepcopy(module, {id(each): each for each in configs if isinstance(each, PretrainedConfig)}).double()
    worst = 0.0
    for scale, beyond in pairwise(SCALES):
        given, larger = (cast(call, dtype, by) for by in (scale, beyond))
        done, done_by_stock = _Operations(), _Operations()
        try:
            with done_by_stock:
                theirs, of_larger = run_alone(module, given), run_alone(module, larger)
            with eager(pair.stock, "experts"):
                correct = run_alone(exact, cast(given, torch.float64))
        except Exception:  # it can't be run alone, or not in half precision
            break
        errors = list(map(_error, theirs, correct))
        small = all(off <= ACCURATE * float(right.norm()) for off, right in zip(errors, correct, strict=False))
        if scale > 1 and not (small and all(bool(each.isfinite().all()) for each in [*theirs, *of_larger])):
            break
        try:
            with done:
                mine = run_alone(ours, given)
        except Exception as error:
            with suppress(Exception):  # it may need what is around it
                run_alone(alone, call)
                return math.inf, f"it raises {error_text(error)}"
            break
        strict = 1.0
        for found, expected, right, off in zip(mine, theirs, correct, errors, strict=False):
            kinds = [f"{each.dtype} of the shape {tuple(each.shape)}" for each in (found, expected)]
            if kinds[0] != kinds[1]:
                return math.inf, f"it gives {kinds[0]} where stock gives {kinds[1]}"
            least = right.to(expected.dtype)
            strict = max(strict, _ratio(_error(found, right, 1.0), _error(expected, right, 1.0)))
            worst = max(worst, 1.0, _ratio(_error(found, right), max(off, _error(least, right))))
        lost = sorted((done.half - done_by_stock.half) & _DELICATE)
        if scale == 1 and lost and strict > PRECISION:
            what = f"it does {', '.join(lost)} in {dtype}, which stock doesn't"
            return strict, f"{what}: its error is {strict:.2g} times stock's"
        if worst > EXACTNESS:
            large = "" if scale == 1 else f" on inputs {scale:g} times as large"
            return worst, f"its error is {worst:.2g} times that of stock{large}"
    return worst, ""


def _ratio(mistake: float, error: float) -> float:
    return mistake / error if error else math.inf if mistake else 1.0


def _error(found: torch.Tensor, exact: torch.Tensor, share: float = 0.75) -> float:
    """The distance of such a share of the rows, without the worst."""
    rows = (found.double() - exact).reshape(-1, exact.shape[-1] if exact.dim() else 1).norm(dim=-1)
    kept = rows.sort().values[: max(1, math.ceil(rows.numel() * share))]
    return float(kept.norm()) if kept.isfinite().all() else math.inf


def cast(call: Call, dtype: torch.dtype, scale: float = 1.0) -> Call:
    """In another type, the first floating-point input scaled up; what the type doesn't reach is its largest."""
    bound = torch.finfo(dtype).max
    factors = chain([scale], iter(lambda: 1.0, 0.0))

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.double() * next(factors)).clamp(-bound, bound).to(dtype)

    is_floating = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()  # noqa: E731
    scaled: Call = recursively_apply(of, call, test_type=is_floating)
    return scaled


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that run in half precision."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.half: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in HALVES:
            self.half.add(func.overloadpacket.__name__.strip("_"))
        return result


# --- gradients and training mode


def learned(pair: Pair, runs: Iterable[Pass], *, few: bool = True) -> Iterator[Reference]:
    """What these passes give, and the gradients of all parameters of weighted sums of it, in the layout of the
    checkpoint."""
    parameters = list(pair.stock.parameters())
    if not all(parameter.is_floating_point() for parameter in parameters):
        raise UncheckedError("the weights aren't floating-point numbers")
    if any(parameter.is_meta for parameter in parameters):
        raise UncheckedError("weights that are offloaded get no gradients")
    return pair.references((replace(one, learns=True) for one in runs), few=few)


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
    # What is drawn at random in training, by the config: the path of each probability that isn't zero.
    dropouts = {
        f"{path}{name}": float(value)
        for path, part in parts_of(pair.stock.config)
        for name, value in vars(part).items()
        if ("drop" in name or "jitter" in name) and type(value) in (int, float) and 0 < value <= 1
    }
    exact = load(dict.fromkeys(dropouts, 0.0)) if dropouts else pair
    stage = Stage("training", True)
    with in_training(exact.stock, exact.ours):
        drawn = [difference(passes[0].of(exact.stock, other), passes[0].of(exact.stock)) for other in (1, 2)]
        if any(gap.absolute for gap in drawn):  # some of it isn't in the config
            dropouts[""] = 0.0
        else:
            references = chain(learned(exact, passes[:1], few=False), learned(exact, passes[1:]))
            stage = exact.compare("training", references, tolerance)
    for name in dropouts if stage.passed else ():
        alone = {other: value if other == name else 0.0 for other, value in dropouts.items() if other}
        problem = _drawn_otherwise(load(alone) if len(dropouts) > 1 else pair, passes, classes, tolerance)
        if problem:
            what = f"with {name}={dropouts[name]:g} " if name else ""
            return Stage("training", False, stage.figures, None, f"{what}{problem}")
    return stage


def _drawn_otherwise(pair: Pair, passes: Sequence[Pass], classes: Sequence[str], tolerance: float) -> str:
    """What is wrong with the random numbers of training mode, "" if nothing."""
    calls = captured(pair.stock, classes, passes)
    with in_training(pair.stock, pair.ours), torch.no_grad():
        if pair.compare("training", pair.references(passes, few=False), tolerance).passed:
            return ""
        for path in classes:
            stock, ours = (model.get_submodule(path) for model in (pair.stock, pair.ours))
            try:
                runs = [[run_alone(each, calls[path], seed)[0] for seed in range(DRAWS)] for each in (stock, ours)]
                center = run_alone(stock.eval(), calls[path])[0]
            except Exception:  # it can't be run alone
                pair.stock.train()
                runs = [[passes[0].of(each, seed)[0] for seed in range(DRAWS)] for each in (pair.stock, pair.ours)]
                center = torch.stack(runs[0]).mean(0)
            stock.train()
            if problem := spread(center, *runs):
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
    }
    if center.dim() > 2:
        features["variance that all rows share"] = lambda x: (x - center).mean(0).square().mean()
        features["variance that a row shares"] = lambda x: (x - center).flatten(1, -2).mean(1).square().mean()
    for what, feature in features.items():
        theirs, mine = (torch.stack([feature(x.double()) for x in each]) for each in (stock, ours))
        error = ((theirs.var() + mine.var()) / DRAWS).sqrt()
        apart = (mine.mean() - theirs.mean()).abs()
        if not apart <= max(ERRORS * float(error), SHARE * float(theirs.mean().abs())):
            ratio = float(mine.mean() / theirs.mean())
            return f"in training mode the {what} is {ratio:.2g} times stock's"
    return ""
