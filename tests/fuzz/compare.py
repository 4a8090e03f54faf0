"""A generated forward, stock beside fused: outputs, the input, gradients, and what writing into results changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.gate_up import GateUp
from patcher.fusions.kv import KV
from patcher.fusions.qkv import QKV
from tests.support.fusing import fuse
from tests.support.written_modules import written_module


@dataclass(frozen=True)
class Result:
    """What became of one program: `same`, `refused`, `wrong`, or `invalid` where stock itself fails."""

    status: str
    reason: str = ""


def module_of(source: str, path: Path) -> nn.Module:
    """An object of the class `Odd` of a source, in a file of its own, so that its source can be read."""
    module = written_module(source, path)
    torch.manual_seed(0)
    odd: nn.Module = module.Odd()
    # In double precision what differs is wrong; but autocast leaves that alone.
    return odd if "autocast" in source else odd.double()


def compared(source: str, path: Path) -> Result:
    """Fuse a program where it can be, and compare."""
    stock = module_of(source, path)
    family: Any = GateUp() if hasattr(stock, "gate_proj") else QKV()
    if isinstance(family, QKV) and not family.is_fusable(stock):
        family = KV()  # of which queries may have another input
    if not family.is_fusable(stock):
        return Result("refused", family.refusal(stock))
    valid = False
    for mode in ("eval", "no_grad", "grad", "written", "extra"):
        ran = _run(stock, mode)
        if isinstance(ran, Exception):
            continue
        valid = True
        fused = copy.deepcopy(stock)
        fused = fuse(family, fused, fused_class_of(family, fused))
        found = _run(fused, mode)
        if isinstance(found, Exception):
            return Result("wrong", f"{mode}: {type(found).__name__}: {found}")
        if difference := _difference(ran, found):
            return Result("wrong", f"{mode}: {difference}")
    return Result("same") if valid else Result("invalid")


@contextmanager
def _restored_modes() -> Iterator[None]:
    enabled, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_autocast_enabled("cpu", autocast)
        while torch.is_autocast_cache_enabled() and torch.autocast_decrement_nesting() > 0:
            pass
        torch.clear_autocast_cache()


def _run(module: nn.Module, mode: str) -> dict[str, torch.Tensor] | Exception:
    """What can be seen of a call: the results, the input afterwards, gradients, weights, results after a write."""
    trains = mode in ("grad", "written")
    module = copy.deepcopy(module).train(trains)
    generator = torch.Generator().manual_seed(1)
    dtype = next(module.parameters()).dtype
    leaf = torch.randn(2, 3, 8, generator=generator, dtype=dtype)
    given = {"extra": torch.randn(2, 3, 8, generator=generator, dtype=dtype)} if mode == "extra" else {}
    seen: dict[str, torch.Tensor] = {}
    try:
        with _restored_modes():
            if not trains:
                torch.set_grad_enabled(False)
            leaf.requires_grad_(trains)
            x = leaf * 1
            outputs = module(x, **given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            seen |= {f"output {number}": one.detach().clone() for number, one in enumerate(outputs)}
            seen["input"] = x.detach().clone()
            if mode in ("eval", "written"):
                for one in outputs:
                    one.mul_(0.5)
                seen |= {f"output {number} after writes": one.detach().clone() for number, one in enumerate(outputs)}
        if trains:
            seen |= _gradients(module, leaf, outputs)
    except Exception as error:
        return error
    return seen | {f"weight {name}": value for name, value in _parts(module).items()}


def _gradients(module: nn.Module, leaf: torch.Tensor, outputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    loss = sum((one * one).sum() for one in outputs)
    if not loss.requires_grad:
        return {"no gradients": torch.ones(())}
    try:
        loss.backward()
    except RuntimeError as error:
        return {"no backward": error}  # type: ignore[dict-item]
    gradients = {"input": leaf.grad, **_parts(module, gradient=True)}
    return {f"gradient {name}": value for name, value in gradients.items() if value is not None}


def _parts(module: nn.Module, gradient: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of a module, or their gradients, under stock's names."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        value = parameter.grad if gradient else parameter
        joined = getattr(module, "_joined", None)
        if value is None:
            continue
        whole, _, kind = name.rpartition(".")
        if joined is not None and whole == joined.name:
            pieces = value.split(getattr(module, joined.sizes), dim=0)
            found |= {f"{part}.{kind}": piece for part, piece in zip(joined.projections, pieces, strict=True)}
        elif joined is not None and name.removesuffix("_bias") in joined.biased:
            found[f"{name.removesuffix('_bias')}.bias"] = value
        else:
            found[name] = value
    return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype == torch.float64:
        return torch.allclose(one, other, atol=1e-9, rtol=1e-7, equal_nan=True)
    # Under autocast both are rounded, sums of them at different places.
    return torch.allclose(one, other, atol=5e-2 * max(one.abs().max().item(), 1.0), rtol=0, equal_nan=True)


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    if "no backward" in expected:  # nothing to compare: stock itself can't train
        expected = {name: value for name, value in expected.items() if name != "no backward"}
        found = {name: value for name, value in found.items() if name in expected}
    if error := found.get("no backward"):
        return f"backward raises {error}"
    for name in sorted(expected.keys() | found.keys()):
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            # A projection that wasn't called has no gradient; in the joined one its rows are zeros.
            value = other if one is None else one
            if value is not None and (not name.startswith("gradient") or value.abs().max() > 1e-6):
                return f"{name} is only in {'the fused' if one is None else 'stock'}"
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{name} has another shape or type: {one.shape}, {one.dtype}; {other.shape}, {other.dtype}"
        elif not _alike(one, other):
            return f"{name} is off by {(one - other).abs().max():.2g}"
    return ""
