"""Single modules: how exactly they compute in half precision, and the random numbers that they draw in training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, repeat
from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from patcher.compat.models import choose_experts_implementation, implementation
from patcher.verification.comparing import Pair, Reference, Stage, UncheckedError, error_text
from patcher.verification.passes import Pass, difference, floating_tensors, hooked, kind_of, seeded
from patcher.verification.texts import parts_of

#: Operations that lose precision in half precision, for which modeling code upcasts.
_DELICATE = {"mean", "var", "sum", "rsqrt", "pow", "exp", "softmax", "log_softmax", "sin", "cos", "cumsum"}
#: The largest error, in errors of the stock module, of one that does such an operation in half precision where the
#: stock one doesn't. Rounding an intermediate value in addition to the result makes errors about 1.4 times as
#: large (the square root of 2); a module that keeps its upcasts is as exact as the stock one.
PRECISION = 1.2
#: The same of any module: sums of tiles, each of which is rounded, are 1.3 times less exact.
EXACTNESS = 2.5
#: Inputs are also scaled down, so that a constant that is added to them counts: the epsilon of a norm.
SMALL = 2.0**-10
#: Inputs are scaled up by these, as long as the error of the stock module is no more than a twentieth.
SCALES, ACCURATE = (1.0, 16.0, 256.0), 0.05
HALVES = (torch.bfloat16, torch.float16)
#: How often random numbers are drawn, and how many standard errors of their difference two means may be apart: six are
#: exceeded by chance once in 500 million. Less than a fiftieth is ignored.
DRAWS, ERRORS, SHARE = 48, 6.0, 0.02

#: The arguments of a module by position, and by name.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def captured(stock: nn.Module, paths: Iterable[str], passes: Iterable[Pass]) -> dict[str, Call]:
    """Return the largest inputs of each module."""
    modules = {stock.get_submodule(path): path for path in paths}
    sizes: dict[str, int] = {}
    calls: dict[str, Call] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        path, counts = modules[module], [0]
        recursively_apply(lambda tensor: counts.append(tensor.numel()), (args, kwargs))
        if (size := sum(counts)) > sizes.get(path, 0):
            sizes[path], calls[path] = size, copy.deepcopy((args, kwargs))

    # Before the call, which may write into its inputs, such as a cache.
    with hooked(((module, record) for module in modules), before=True), torch.no_grad():
        for run in passes:
            with suppress(Exception):  # texts may be longer than it takes
                run.of(stock)
    return calls


def run_alone(module: nn.Module, call: Call, seed: int = 0) -> list[torch.Tensor]:
    """Return the outputs of a module for captured inputs."""
    args, kwargs = copy.deepcopy(call)
    with seeded(seed):
        return list(floating_tensors(module(*args, **kwargs)))


# --- half precision


def precision_stage(
    pair: Pair,
    load: Callable[[torch.dtype], Pair],
    paths: Sequence[str],
    passes: Sequence[Pass],
    dtype: torch.dtype,
    tolerance: float,
) -> Stage:
    """Compare the errors of replaced modules in half precision, each run alone, with those of the stock ones.

    The outputs of a model in half precision don't show it: those of right and wrong patches overlap. The errors of
    single modules, beside a float64 computation, do. An error is the Euclidean distance of all but the worst quarter
    of the rows, in which a router may choose another expert. Before, both are run on small inputs in the dtype itself.
    """
    if not paths:
        raise UncheckedError("no module runs other code")
    calls: dict[str, Call] = {}
    with pair.layers(few=True), suppress(Exception):  # some may be in other layers
        calls = captured(pair.stock, paths, passes)
    calls = calls if calls.keys() == set(paths) else captured(pair.stock, paths, passes)
    for path, call in calls.items() if dtype not in HALVES else ():
        if (gap := _gap_on_small_inputs(pair, path, call)) > tolerance:
            text = f"alone, on inputs {1 / SMALL:g} times as small, it differs by {gap:.2g}: {pair.blame(path)}"
            return Stage("precision", False, (("max relative", gap),), tolerance, text)
    ratios: dict[str, float] = {}
    for half in [dtype] if dtype in HALVES else HALVES:
        try:
            loaded = pair if half is dtype else load(half)
        except UncheckedError:  # it can't be loaded in this dtype
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
    """Compute attention ("attn") or "experts" eagerly: no other implementation of experts takes float64.

    Yields whether that changes anything.
    """
    before = implementation(model, what)
    choose = model.set_attn_implementation if what == "attn" else partial(choose_experts_implementation, model)
    changes = before == "sdpa" or (what == "experts" and before is not None)
    try:
        if changes:
            choose("eager")
        yield changes and implementation(model, what) == "eager"
    finally:
        if changes:
            choose(str(before))


def _error_beside_stock(pair: Pair, alone: nn.Module, path: str, call: Call, dtype: torch.dtype) -> tuple[float, str]:
    """Return the largest ratio of errors, 0 if the module can't be run alone, and a message if it is too large.

    Args:
        alone: the replaced module as it is verified, not in half precision.
        call: the inputs of the module.
    """
    module, ours = pair.stock.get_submodule(path), pair.ours.get_submodule(path)
    # The config chooses the attention, and stays that of the model.
    configs = [getattr(part, "config", None) for part in pair.stock.modules()]
    kept = {id(config): config for config in configs if isinstance(config, PretrainedConfig)}
    exact_module = copy.deepcopy(module, kept).double()
    worst = 0.0
    for scale, next_scale in pairwise(SCALES):
        inputs, larger = (cast(call, dtype, factor) for factor in (scale, next_scale))
        operations, expected_operations = _Operations(), _Operations()
        try:
            with expected_operations:
                expected, of_larger = run_alone(module, inputs), run_alone(module, larger)
            with eager(pair.stock, "experts"):
                exact = run_alone(exact_module, cast(inputs, torch.float64))
        except Exception:  # it can't be run alone, or not in half precision
            break
        errors = list(map(_error, expected, exact))
        small = all(gap <= ACCURATE * float(right.norm()) for gap, right in zip(errors, exact, strict=False))
        if scale > 1 and not (small and all(bool(output.isfinite().all()) for output in [*expected, *of_larger])):
            break
        try:
            with operations:
                outputs = run_alone(ours, inputs)
        except Exception as error:
            with suppress(Exception):  # it may need what is around it
                run_alone(alone, call)
                return math.inf, f"it raises {error_text(error)}"
            break
        strict = 1.0
        for output, theirs, right, gap in zip(outputs, expected, exact, errors, strict=False):
            if (output.dtype, output.shape) != (theirs.dtype, theirs.shape):
                return math.inf, f"it returns {kind_of(output)} where stock returns {kind_of(theirs)}"
            rounding = _error(right.to(theirs.dtype), right)
            strict = max(strict, _ratio(_error(output, right, 1.0), _error(theirs, right, 1.0)))
            worst = max(worst, 1.0, _ratio(_error(output, right), max(gap, rounding)))
        lost = sorted((operations.half - expected_operations.half) & _DELICATE)
        if scale == 1 and lost and strict > PRECISION:
            what = f"it does {', '.join(lost)} in {dtype}, which stock doesn't"
            return strict, f"{what}: its error is {strict:.2g} times stock's"
        if worst > EXACTNESS:
            large = "" if scale == 1 else f" on inputs {scale:g} times as large"
            return worst, f"its error is {worst:.2g} times that of stock{large}"
    return worst, ""


def _gap_on_small_inputs(pair: Pair, path: str, call: Call) -> float:
    """Return the largest relative difference of an output, 0 if the modules can't be run alone on small inputs."""
    small: Call = recursively_apply(lambda tensor: tensor * SMALL, call, test_type=_is_floating)
    with suppress(Exception):
        stock, ours = (run_alone(model.get_submodule(path), small) for model in (pair.stock, pair.ours))
        finite = [(mine, right) for mine, right in zip(ours, stock, strict=True) if right.isfinite().all()]
        return max(_ratio(_error(mine, right), float(right.norm())) for mine, right in finite)
    return 0.0


def _ratio(error: float, expected: float) -> float:
    return error / expected if expected else math.inf if error else 1.0


def _error(output: torch.Tensor, exact: torch.Tensor, share: float = 0.75) -> float:
    """Return the distance of a share of the rows, without the worst ones."""
    rows = (output.double() - exact).reshape(-1, exact.shape[-1] if exact.dim() else 1).norm(dim=-1)
    kept = rows.sort().values[: max(1, math.ceil(rows.numel() * share))]
    return float(kept.norm()) if kept.isfinite().all() else math.inf


def cast(call: Call, dtype: torch.dtype, scale: float = 1.0) -> Call:
    """Cast inputs to another dtype, clamped to its range, the first one scaled up."""
    bound = torch.finfo(dtype).max
    factors = chain([scale], repeat(1.0))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.double() * next(factors)).clamp(-bound, bound).to(dtype)

    converted: Call = recursively_apply(convert, call, test_type=_is_floating)
    return converted


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of operations with results in half precision."""

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
    """Return references with the gradients of all parameters."""
    parameters = list(pair.stock.parameters())
    if not all(parameter.is_floating_point() for parameter in parameters):
        raise UncheckedError("the weights aren't floating-point numbers")
    if any(parameter.is_meta for parameter in parameters):
        raise UncheckedError("weights that are offloaded get no gradients")
    return pair.references((replace(run, learns=True) for run in runs), few=few)


@contextmanager
def in_training(*models: Any) -> Iterator[None]:
    """Put models into training mode, then back into eval mode with the buffers that they had."""
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
    """Compare outputs and gradients in training mode, first without dropout, then with each dropout of the config.

    A patch may draw random numbers in another order. So where outputs differ with the same seed, the distributions of
    the outputs of replaced modules are compared: see `spread`.

    Args:
        load: loads both models with other values in the config.
        classes: the path of one module for each pair of classes.
    """
    # The paths of the probabilities in the config.
    dropouts = {
        f"{path}{name}": float(value)
        for path, part in parts_of(pair.stock.config)
        for name, value in vars(part).items()
        if ("drop" in name or "jitter" in name) and type(value) in (int, float) and 0 < value <= 1
    }
    exact = load(dict.fromkeys(dropouts, 0.0)) if dropouts else pair
    stage = Stage("training", True)
    with in_training(exact.stock, exact.ours):
        gaps = [difference(passes[0].of(exact.stock, seed), passes[0].of(exact.stock)) for seed in (1, 2)]
        if any(gap.absolute for gap in gaps):  # a dropout that isn't in the config
            dropouts[""] = 0.0
        else:
            references = chain(learned(exact, passes[:1], few=False), learned(exact, passes[1:]))
            stage = exact.compare("training", references, tolerance)
    for name in dropouts if stage.passed else ():
        alone = {other: value if other == name else 0.0 for other, value in dropouts.items() if other}
        problem = _random_difference(load(alone) if len(dropouts) > 1 else pair, passes, classes, tolerance)
        if problem:
            what = f"with {name}={dropouts[name]:g} " if name else ""
            return Stage("training", False, stage.figures, None, f"{what}{problem}")
    return stage


def _random_difference(pair: Pair, passes: Sequence[Pass], classes: Sequence[str], tolerance: float) -> str:
    """Return a message if the random numbers of training mode have another distribution, else ""."""
    classes = classes or [""]  # then only the whole models can be compared
    calls = captured(pair.stock, classes, passes)
    with in_training(pair.stock, pair.ours), torch.no_grad():
        if pair.compare("training", pair.references(passes, few=False), tolerance).passed:
            return ""
        for path in classes:
            stock, ours = (model.get_submodule(path) for model in (pair.stock, pair.ours))
            try:
                runs = [[run_alone(one, calls[path], seed)[0] for seed in range(DRAWS)] for one in (stock, ours)]
                center = run_alone(stock.eval(), calls[path])[0]
            except Exception:  # it can't be run alone
                pair.stock.train()
                runs = [[passes[0].of(one, seed)[0] for seed in range(DRAWS)] for one in (pair.stock, pair.ours)]
                center = torch.stack(runs[0]).mean(0)
            stock.train()
            if problem := spread(center, *runs):
                return f"{problem}; {pair.blame(path)}"
    return ""


def spread(center: torch.Tensor, stock: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> str:
    """Return how the distribution of an output under dropout differs, "" if it doesn't.

    Compared are the mean size of the output, the variance around the output without dropout, and the parts of it that
    all rows, and all positions of a row, share.

    >>> draws = lambda p, size: [torch.nn.functional.dropout(torch.ones(4, 8, 16), p) * size for _ in range(48)]
    >>> center, _ = torch.ones(4, 8, 16), torch.manual_seed(0)
    >>> spread(center, draws(0.1, 1), draws(0.1, 1))
    ''
    >>> spread(center, draws(0.1, 1), draws(0.1, 0.9)).startswith("in training mode the size of the output is 0.")
    True
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
        theirs, mine = (torch.stack([feature(output.double()) for output in some]) for some in (stock, ours))
        error = ((theirs.var() + mine.var()) / DRAWS).sqrt()
        apart = (mine.mean() - theirs.mean()).abs()
        if not apart <= max(ERRORS * float(error), SHARE * float(theirs.mean().abs())):
            ratio = float(mine.mean() / theirs.mean())
            return f"in training mode the {what} is {ratio:.3g} times stock's"
    return ""
