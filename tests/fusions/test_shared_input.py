"""Projections that are asked at run time what they are given: cross attention, tools around, other joined layers."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.qkv import QKV
from tests.support.fusing import fuse
from tests.support.written_modules import written_module

SOURCE = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8, bias=BIASED), nn.Linear(8, 4)
        self.v_proj = nn.Linear(8, 4)

    def forward(self, x, other=None):
        current = x if other is None else other
        q = self.q_proj(x)
        k, v = self.k_proj(current), self.v_proj(current)
        return torch.tanh(q.mean(-2) @ torch.cat([k, v], dim=-1).transpose(-1, -2))
"""


@pytest.fixture(params=[True, False], ids=["biases", "biases of some"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    source = SOURCE.replace("BIASED", str(request.param))
    torch.manual_seed(0)
    module = written_module(source, tmp_path / "odd_modeling.py")
    monkeypatch.setitem(sys.modules, "odd_modeling", module)
    stock = module.Attention()
    fused: Any = fuse(QKV(), copy.deepcopy(stock), fused_class_of(QKV(), stock))
    assert "self.shared_input()" in type(fused)._rewritten["forward"]
    return stock, fused


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, other = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))
    return x.requires_grad_(), other.requires_grad_()


def given(x: torch.Tensor, other: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """For self attention, by identity only; and for cross attention."""
    return [(x,), (x, x), (x, other), (x, x.clone()), (x, x.view(1, 3, 8))]


def calls_of(module: nn.Module) -> list[int]:
    counted = [0]
    module.register_forward_pre_hook(lambda *_: counted.__setitem__(0, counted[0] + 1))
    return counted


def test_self_attention_is_one_product_and_cross_attention_is_right(pair: tuple[Any, Any]) -> None:
    stock, fused = pair
    calls = calls_of(fused.qkv_proj)
    for arguments in given(*inputs()):
        before = calls[0]
        torch.testing.assert_close(fused(*arguments), stock(*arguments), atol=1e-6, rtol=1e-5)
        assert calls[0] - before == (1 if arguments[-1] is arguments[0] else 3)
    assert not {"_input", "_parts"} & vars(fused).keys()  # nothing of a call stays


def test_gradients_are_those_of_stock(pair: tuple[Any, Any]) -> None:
    stock, fused = pair
    for number in range(5):
        found = []
        for module in (stock, fused):
            module.zero_grad()
            again = [each.detach().clone().requires_grad_() for each in inputs()]
            result = module(*given(*again)[number])
            result.square().sum().backward()
            found.append([each.grad for each in again])
        for mine, theirs in zip(found[1], found[0], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
        rows = torch.cat([getattr(stock, name).weight.grad for name in ("q_proj", "k_proj", "v_proj")])
        torch.testing.assert_close(fused.qkv_proj.weight.grad, rows, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_torch_change_nothing(mode: Any, pair: tuple[Any, Any]) -> None:
    stock, fused = pair
    x, other = (each.detach() for each in inputs())
    with mode():
        for arguments in given(x, other):
            mine, theirs = fused(*arguments), stock(*arguments)
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, atol=1e-6 if mine.dtype == torch.float32 else 2e-2, rtol=1e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_give_the_gradients_of_stock(reentrant: bool, pair: tuple[Any, Any]) -> None:
    from torch.utils.checkpoint import checkpoint

    for number in range(5):
        found = []
        for module in pair:
            again = [each.detach().clone().requires_grad_() for each in inputs()]
            result: Any = checkpoint(module, *given(*again)[number], use_reentrant=reentrant)
            result.square().sum().backward()
            found.append([each.grad for each in again if each.grad is not None])
        torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


def test_threads_have_calls_of_their_own(pair: tuple[Any, Any]) -> None:
    stock, fused = pair
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        for arguments in 10 * given(*inputs(seed)):
            if not torch.allclose(fused(*arguments), stock(*arguments), atol=1e-6):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


@pytest.mark.libraries
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_to_one_graph(backend: str, pair: tuple[Any, Any]) -> None:
    stock, fused = pair
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    for arguments in given(*inputs()):
        torch.testing.assert_close(compiled(*arguments), stock(*arguments), atol=1e-6, rtol=1e-5)
        compiled(*arguments).sum().backward()
    torch._dynamo.reset()


@pytest.mark.libraries
@pytest.mark.parametrize("strict", [True, False])
def test_it_exports_for_each_way_to_call_it(strict: bool, pair: tuple[Any, Any]) -> None:
    stock, fused = pair
    x, other = (each.detach() for each in inputs())
    for arguments in ((x,), (x, other)):
        program = torch.export.export(fused, arguments, strict=strict)
        torch.testing.assert_close(program.module()(*arguments), stock(*arguments), atol=1e-6, rtol=1e-5)


class Quantized(nn.Linear):
    """As quantizers make them: another class, whose weight has another form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) / 2, self.bias)


class Adapted(nn.Module):
    """As adapters wrap them: it has no weight of its own, and adds to what is computed."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def parts(whole: nn.Module, stock: Any, fused: Any) -> Any:
    """Stock whose projections are the rows of what took the place of the joined layer."""

    class Rows(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor) -> Any:
            rows = whole(x).split(fused.qkv_proj_sizes, dim=-1)[self.number]
            bias = getattr(fused, f"{('q', 'k', 'v')[self.number]}_proj_bias", None)
            return rows if bias is None else rows + bias

    made = copy.deepcopy(stock)
    made.q_proj, made.k_proj, made.v_proj = Rows(0), Rows(1), Rows(2)
    return made


@pytest.mark.parametrize("kind", ["quantized", "adapted"])
def test_what_takes_the_place_of_the_joined_layer_computes_every_part(kind: str, pair: tuple[Any, Any]) -> None:
    stock, fused = pair
    whole: nn.Module
    if kind == "quantized":
        whole = Quantized(8, 16, bias=fused.qkv_proj.bias is not None)
        whole.weight = nn.Parameter((fused.qkv_proj.weight.detach() * 2).to(torch.float16), requires_grad=False)
        whole.bias = fused.qkv_proj.bias
    else:
        whole = Adapted(fused.qkv_proj)
    fused.qkv_proj = whole
    expected = parts(whole, stock, fused)

    for arguments in given(*inputs()):
        torch.testing.assert_close(fused(*arguments), expected(*arguments), atol=1e-6, rtol=1e-5)
