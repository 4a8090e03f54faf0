"""Calls that no longer fit what was patched, and calls that must not be reported."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from patcher.codegen import PatchConfig
from patcher.codegen.files.checker import check_calls
from patcher.codegen.generation.generator import build

SOURCE = """
import torch
from torch import nn


def rope(q, k, cos, sin, dim=1):
    return q, k


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()

    def forward(self, x, mask=None, **kwargs):
        return rope(x, x, 1, sin=2, dim=1)

    @staticmethod
    def scale(x, y):
        return x

    def helper(self, x):
        return self.scale(x, 1)


class Special(Attention):
    def forward(self, x, mask=None):
        return super().forward(x, mask, extra=1)

    def use(self):
        return self.helper(1), Attention.helper(self, 1)


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = Attention(config, layer_idx=layer_idx)

    def forward(self, x):
        return self.attn(x, mask=None, position=1)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, i) for i in range(2)])

    def forward(self, x, *args, **kwargs):
        for i, layer in enumerate(self.layers):
            x = layer(x)
        for layer in self.layers[:1]:
            x = layer(x, *args)
        first = self.layers[0]
        return first(x, **kwargs)
"""


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    (tmp_path / "modeling_calls.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "modeling_calls", raising=False)

    def check(method: str, target: str, text: str) -> list[str]:
        config = PatchConfig("modeling_calls", "out.py")
        getattr(config, method)(target, textwrap.dedent(text))
        generated = build(config)
        found = check_calls(generated)
        lines = generated.text.splitlines()
        for mismatch in found:  # the line is the call's
            assert mismatch.call.split("(")[0] in lines[mismatch.line - 1]
        return [f"{m.call}: {m.target}: {m.problem}" for m in found]

    return check


@pytest.mark.parametrize(
    ("method", "target", "text", "expected"),
    [
        ("replace_function", "rope", "def f(q, k, cos, sin, dim=1): pass", []),
        ("replace_function", "rope", "def f(*args, **kwargs): pass", []),
        (
            "replace_function",
            "rope",
            "def f(q, k, cos, sin): pass",
            ["rope(x, x, 1, sin=2, dim=1): rope: it has no parameter 'dim'"],
        ),
        (
            "replace_function",
            "rope",
            "def f(q, k, /, *, sin, dim): pass",
            ["rope(x, x, 1, sin=2, dim=1): rope: it takes 2 positional arguments, and is given 3"],
        ),
        (
            "replace_function",
            "rope",
            "def f(q, k, cos, sin, dim, more): pass",
            ["rope(x, x, 1, sin=2, dim=1): rope: 'more' is missing"],
        ),
        (
            "replace_function",
            "rope",
            "def f(q, sin, cos, k=1, dim=1): pass",
            ["rope(x, x, 1, sin=2, dim=1): rope: 'sin' is given twice"],
        ),
        (
            "replace_function",
            "rope",
            "def f(q, k, cos, *, sin, dim, needed): pass",
            ["rope(x, x, 1, sin=2, dim=1): rope: 'needed' is missing"],
        ),
        (
            "override_method",
            "Attention.forward",
            "def f(self, x): pass",
            [
                "super().forward(x, mask, extra=1): Attention.forward: "
                "it takes 1 positional arguments, and is given 2",
                "self.attn(x, mask=None, position=1): Attention.forward: it has no parameter 'mask'",
            ],
        ),
        ("override_method", "Attention.forward", "def f(self, x, mask=None, *, position=0, extra=0): pass", []),
        (
            "override_method",
            "Attention.scale",
            "def f(x): pass",
            ["self.scale(x, 1): Attention.scale: it takes 1 positional arguments, and is given 2"],
        ),
        (
            "override_method",
            "Attention.helper",
            "def f(self, x, y): pass",
            [
                "self.helper(1): Attention.helper: 'y' is missing",
                "Attention.helper(self, 1): Attention.helper: 'y' is missing",
            ],
        ),
        (
            "override_method",
            "Layer.forward",
            "def f(self, x, y): pass",
            ["layer(x): Layer.forward: 'y' is missing"],  # the other calls hold *args and **kwargs
        ),
        (
            "modify_init",
            "Attention",
            "def f(original_init, self, config): original_init(self, config, 1)",
            ["Attention(config, layer_idx=layer_idx): Attention.__init__: it has no parameter 'layer_idx'"],
        ),
        (
            "replace_class",
            "Layer",
            """
            class L(nn.Module):
                def __init__(self, config):
                    super().__init__()
            """,
            ["Layer(config, i): Layer.__init__: it takes 1 positional arguments, and is given 2"],
        ),
    ],
)
def test_calls(problems: Callable[..., list[str]], method: str, target: str, text: str, expected: list[str]) -> None:
    assert problems(method, target, text) == expected


def test_a_call_that_never_fitted_is_not_reported(problems: Callable[..., list[str]]) -> None:
    """A decorator may have taken the argument; that is how transformers passes return_dict."""
    text = "def f(self, x):\n    return self.helper(x, unknown=1)"
    assert problems("override_method", "Attention.helper", text) == []
