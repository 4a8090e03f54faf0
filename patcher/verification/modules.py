"""Replaced modules by themselves: on what their stock counterparts are given, in half precision, and scaled up."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from patcher.compat.models import choose_experts_implementation, implementation
from patcher.verification.comparing import Pair, Stage, UncheckedError, error_text
from patcher.verification.numerics import floating_tensors, hooked, is_floating
from patcher.verification.passes import Pass, seeded

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
    with pair.layers(few=True), suppress(Exception):
        there = dict(pair.stock.named_modules())
        calls = captured(pair.stock, [path for path in paths if path in there], passes)
    if calls.keys() != set(paths):
        calls = captured(pair.stock, paths, passes)
    compared: set[str] = set()
    worst = 1.0
    for half in [dtype] if dtype in HALVES else HALVES:
        try:
            loaded = pair if half is dtype else load(half)
        except UncheckedError:  # stock doesn't load in it
            continue
        for path, call in calls.items():
            for ratio, problem in _ratios(loaded, pair.ours.get_submodule(path), path, call, half):
                if problem:
                    text = f"alone, in {half}, {problem}: {pair.blame(path)}"
                    return Stage("precision", False, (("error / stock's", ratio),), EXACTNESS, text)
                compared.add(path)
                worst = max(worst, ratio)
    if not compared:
        raise UncheckedError("no replaced module could be run alone in half precision")
    figures = (("error / stock's", worst), ("modules compared with float64", float(len(compared))))
    return Stage("precision", True, (*figures, ("of", float(len(paths)))), EXACTNESS)


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


def _ratios(pair: Pair, alone: nn.Module, path: str, call: Call, dtype: torch.dtype) -> Iterator[tuple[float, str]]:
    """The error of the replaced module to stock's for each scale, and what is wrong with it.

    Args:
        alone: the replaced module as it is verified, not in half precision.
        call: the inputs of the module.
    """
    module, ours = pair.stock.get_submodule(path), pair.ours.get_submodule(path)
    # The config says which attention is computed, and stays that of the model.
    configs = [
        part.config for part in pair.stock.modules() if isinstance(getattr(part, "config", None), PretrainedConfig)
    ]
    exact = copy.deepcopy(module, {id(config): config for config in configs}).double()
    for scale, beyond in pairwise(SCALES):
        given, larger = (cast(call, dtype, by) for by in (scale, beyond))
        done, done_by_stock = _Operations(), _Operations()
        try:
            with done_by_stock:
                theirs, of_larger = run_alone(module, given), run_alone(module, larger)
            with eager(pair.stock, "experts"):
                correct = run_alone(exact, cast(given, torch.float64))
        except Exception:  # it can't be run alone, or not in half precision
            return
        errors = list(map(_error, theirs, correct))
        finite = all(bool(tensor.isfinite().all()) for tensor in [*theirs, *of_larger])
        accurate = finite and all(
            error <= ACCURATE * float(tensor.norm()) for error, tensor in zip(errors, correct, strict=False)
        )
        if scale > 1 and not accurate:
            return
        try:
            with done:
                mine = run_alone(ours, given)
        except Exception as error:
            with suppress(Exception):  # it may need what is around it
                run_alone(alone, call)
                yield math.inf, f"it raises {error_text(error)}"
            return
        worst = strict = 1.0
        for found, expected, right, off in zip(mine, theirs, correct, errors, strict=False):
            kinds = [f"{each.dtype} of the shape {tuple(each.shape)}" for each in (found, expected)]
            if kinds[0] != kinds[1]:
                yield math.inf, f"it gives {kinds[0]} where stock gives {kinds[1]}"
                return
            least = right.to(expected.dtype)
            strict = max(strict, _ratio(_distance(found, right), _distance(expected, right)))
            worst = max(worst, _ratio(_error(found, right), max(off, _error(least, right))))
        lost = sorted((done.half - done_by_stock.half) & _DELICATE)
        if scale == 1 and lost and strict > PRECISION:
            problem = (
                f"it does {', '.join(lost)} in {dtype}, which stock doesn't: its error is {strict:.2g} times stock's"
            )
            yield strict, problem
            return
        large = "" if scale == 1 else f" on inputs {scale:g} times as large"
        yield worst, "" if worst <= EXACTNESS else f"its error is {worst:.2g} times that of stock{large}"


def _ratio(mistake: float, error: float) -> float:
    return mistake / error if error else math.inf if mistake else 1.0


def cast(call: Call, dtype: torch.dtype, scale: float = 1.0) -> Call:
    """In another type, the first floating-point input scaled up; what the type doesn't reach is its largest."""
    bound = torch.finfo(dtype).max
    first = True

    def of(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal first
        factor, first = scale if first else 1.0, False
        return (tensor.double() * factor).clamp(-bound, bound).to(dtype)

    scaled: Call = recursively_apply(of, call, test_type=is_floating)
    return scaled


def _distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.dist(found.double(), exact))


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The distance of all but the worst quarter of the rows."""
    rows = (found.double() - exact).reshape(-1, exact.shape[-1] if exact.dim() else 1).norm(dim=-1)
    kept = rows.sort().values[: max(1, math.ceil(rows.numel() * 0.75))]
    return float(kept.norm()) if kept.isfinite().all() else math.inf


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
