"""What decides a branch may be known of a module: its attributes, children that do nothing, how its layers are run."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DebertaV2Config, DebertaV2ForMaskedLM, PvtV2Config, PvtV2ForImageClassification

from patcher import Patcher
from patcher.fusions.fused_module import fuse, fused_class_of
from patcher.fusions.proof.calls import passes
from patcher.fusions.proof.tracing import Guards
from patcher.fusions.qkv import QKV
from tests.support.tiny import randomize
from tests.support.written_modules import written_module

PROJECTIONS = "q, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)"

#: name -> (forward, what the module says so that it can be fused, what it says so that it can't)
DECIDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a string": (
        f'y = x\nif self.kind == "rotary":\n    y = x + 1\n{PROJECTIONS}',
        {"kind": "relative"},
        {"kind": "rotary"},
    ),
    "a number": (f"y = x\nif self.ratio > 1:\n    y = x * self.ratio\n{PROJECTIONS}", {"ratio": 1}, {"ratio": 2}),
    "a fraction": (f"y = x\nif not self.share <= 0.5:\n    y = x + 1\n{PROJECTIONS}", {"share": 0.5}, {"share": 0.75}),
    "a child": (f"y = self.norm(x)\n{PROJECTIONS}", {"norm": nn.Identity()}, {"norm": nn.LayerNorm(64)}),
}


def attention(body: str, tmp_path: Path) -> nn.Module:
    source = (
        "from torch import nn\n\n\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)\n\n"
        "    def forward(self, x):\n"
        f"{textwrap.indent(body, ' ' * 8)}\n"
        "        return q.sum(-1) + k.sum(-1) + v.sum(-1)\n"
    )
    odd: nn.Module = written_module(source, tmp_path / "odd_modeling.py").Odd()
    randomize(odd)
    return odd


def say(module: nn.Module, said: dict[str, Any]) -> None:
    for name, value in said.items():
        setattr(module, name, value)


@pytest.mark.parametrize("name", DECIDED)
def test_what_a_module_says_of_itself_decides_a_branch(name: str, tmp_path: Path) -> None:
    body, fusable, other = DECIDED[name]
    stock = attention(body, tmp_path)
    say(stock, fusable)
    fused = copy.deepcopy(stock)

    fused = fuse(QKV(), fused, fused_class_of(QKV(), fused))
    inputs = torch.randn(2, 5, 64)

    torch.testing.assert_close(fused(inputs), stock(inputs))
    assert "qkv_proj" in dict(fused.named_children())
    for module in (stock, fused):  # what was said is checked at every call
        say(module, other)
    torch.testing.assert_close(fused(inputs), stock(inputs))


@pytest.mark.parametrize("name", DECIDED)
def test_what_a_module_says_of_itself_refuses_it(name: str, tmp_path: Path) -> None:
    body, _, other = DECIDED[name]
    stock = attention(body, tmp_path)
    say(stock, other)

    assert not QKV().is_fusable(stock)
    assert "not of the same value" in QKV().refusal(stock)


def test_modules_that_say_different_things_share_a_class_where_it_decides_nothing(tmp_path: Path) -> None:
    one = attention(f"y = x\nif self.number < 1:\n    print(x)\n{PROJECTIONS}", tmp_path)
    two = copy.deepcopy(one)
    say(one, {"number": 0})
    say(two, {"number": 1})

    assert fused_class_of(QKV(), one) is fused_class_of(QKV(), two)


@pytest.mark.parametrize(
    "body",
    [
        'y = x\ntry:\n    self.kind = "rotary"\nfinally:\n    pass\n'
        f'if self.kind == "rotary":\n    y = x + 1\n{PROJECTIONS}',
        "q = self.q_proj(x)\nfor _ in range(2):\n    k, v = self.k_proj(x), self.v_proj(x)\n    x[0] = 1",
        "q = self.q_proj(x)\nfor _ in range(2):\n    k, v = self.k_proj(x), self.v_proj(x)\n    x.add_(1)",
    ],
)
def test_what_code_that_is_not_followed_writes_into_is_another_value_after_it(body: str, tmp_path: Path) -> None:
    stock = attention(body, tmp_path)
    say(stock, {"kind": "relative"})

    assert not QKV().is_fusable(stock)


def test_inputs_whose_calls_alternate_are_refused(tmp_path: Path) -> None:
    stock = attention(
        "y = x + 1\nq = self.q_proj(x)\nother = self.q_proj(y)\nk, v = self.k_proj(x), self.v_proj(x)\n"
        "q = q + other + self.k_proj(y).sum() + self.v_proj(y).sum()",
        tmp_path,
    )

    assert "the calls of two inputs alternate" in QKV().refusal(stock)


#: how the layers of a list are called, with `state` as the parameter in question -> whether None may be expected
CALLED = {
    "one after the other": ("for layer in self.layers:\n    x = layer(x)", True),
    "with their numbers": ("for i, layer in enumerate(self.layers):\n    x = layer(x, None)", True),
    "by number": ("for i in range(2):\n    x = self.layers[i](x)", True),
    "taken by number": ("layer = self.layers[0]\nx = layer(x)", True),
    "passed on": ("for layer in self.layers:\n    x = layer(x, state=state)", True),
    "set where there is one": (
        "for layer in self.layers:\n    x = layer(x, state)\n    if state is not None:\n        state = x",
        True,
    ),
    "set behind": ("for layer in self.layers:\n    x = layer(x, state)\nstate = x", True),
    "set for the next": ("for layer in self.layers:\n    x = layer(x, state)\n    state = x", False),
    "set before": ("state = x\nfor layer in self.layers:\n    x = layer(x, state)", False),
    "given whatever else comes": ("for layer in self.layers:\n    x = layer(x, **kwargs)", True),
    "given all that comes": ("for layer in self.layers:\n    x = layer(*kwargs.values())", False),
    "given something": ("for layer in self.layers:\n    x = layer(x, state=x)", False),
}


@pytest.mark.parametrize("name", CALLED)
def test_how_the_layers_of_a_list_are_called_is_followed(name: str, tmp_path: Path) -> None:
    body, is_none = CALLED[name]
    source = (
        "from torch import nn\n\n\n"
        "class Layer(nn.Module):\n"
        "    def forward(self, x, state=None):\n"
        "        return x\n\n\n"
        "class Encoder(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList([Layer(), Layer()])\n\n"
        "    def forward(self, x, state=None, **kwargs):\n"
        f"{textwrap.indent(body, ' ' * 8)}\n"
        "        return x\n\n\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.encoder = Encoder()\n\n"
        "    def forward(self, x):\n"
        "        return self.encoder(x)\n"
    )
    modules = dict(written_module(source, tmp_path / "odd_modeling.py").Model().named_modules())

    reason = passes(modules, "encoder.layers.1", Guards(none=("state",)), certainly=True)

    assert (reason == "") is is_none, reason


def test_a_model_that_is_given_whatever_comes_may_be_given_anything(tmp_path: Path) -> None:
    source = (
        "from torch import nn\n\n\n"
        "class Decoder(nn.Module):\n"
        "    def forward(self, x, state=None):\n"
        "        return x\n\n\n"
        "class Wrapper(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.decoder = Decoder()\n\n"
        "    def forward(self, x, **kwargs):\n"
        "        return self.decoder(x, **kwargs)\n"
    )
    modules = dict(written_module(source, tmp_path / "odd_modeling.py").Wrapper().named_modules())

    reason = passes(modules, "decoder", Guards(none=("state",)), certainly=True)

    assert reason == "nothing shows that Wrapper doesn't pass state"


def test_layers_that_are_passed_nothing_on_are_fused() -> None:
    config = DebertaV2Config(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )

    resolution = Patcher(fusions="qkv").resolve(DebertaV2ForMaskedLM, config)

    assert list(resolution.fused) == [f"deberta.encoder.layer.{number}.attention.self" for number in range(2)]


def test_layers_of_one_class_are_fused_where_they_reduce_nothing() -> None:
    config = PvtV2Config(
        hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], sr_ratios=[8, 4, 2, 1]
    )

    resolution = Patcher(fusions="qkv").resolve(PvtV2ForImageClassification, config)

    assert len(resolution.fused) == 1
    assert len(resolution.refused) == 3
    assert all("not of the same value" in reason for reason in resolution.refused.values())
