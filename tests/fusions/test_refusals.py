"""Why a module of a model is left alone: by what it is, by what it shares, by how its parents use and call it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from patcher.fusions import Fusion, Rows
from patcher.fusions.finding import discover
from patcher.fusions.fused_module import fuse, fused_class_of
from patcher.fusions.kv import KV
from patcher.fusions.methods import NotUnderstoodError, methods_with, read_method
from patcher.fusions.proof.calls import passes
from patcher.fusions.proof.tracing import Guards
from patcher.fusions.qkv import QKV
from patcher.fusions.rewrite import compile_subclass
from tests.support.tiny import tiny_llama_config
from tests.support.written_modules import written_module

MODEL = """
import functools

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, other=None, third=None):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return torch.tanh(q + k + v)


class Cross(Attention):
    def forward(self, x, other=None, third=None):
        return torch.tanh(self.q_proj(x) + self.k_proj(other) + self.v_proj(other))


class Three(Attention):
    def forward(self, query, key, value):
        return torch.tanh(self.q_proj(query) + self.k_proj(key) + self.v_proj(value))


class Model(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.attn = Attention()
        self.second = nn.Identity()
        CHANGE
        self.post_init()

    def forward(self, x, y=None):
        BODY
"""


def model_of(tmp_path: Path, change: str = "pass", body: str = "return self.attn(x)") -> Any:
    source = MODEL.replace("CHANGE", change).replace("BODY", body.replace("\n", "\n        "))
    return written_module(source, tmp_path / "odd_modeling.py").Model(tiny_llama_config())


def test_the_model_is_fused_as_it_is(tmp_path: Path) -> None:
    assert list(discover(QKV(), model_of(tmp_path)).matches) == ["attn"]


#: what a parent does with a projection, besides calling its module -> whether it must be a module for that
USES = {
    "self.attn.q_proj.register_forward_hook(print)": True,
    "nn.init.zeros_(self.attn.k_proj.weight)": False,
    "print(self.attn.k_proj.bias, self.attn.v_proj.out_features)": False,
    "self.attn.v_proj(x)": False,
    "print(self.attn.v_proj)": True,
    "list(self.attn.q_proj.parameters())": True,
}


@pytest.mark.parametrize("use", USES)
def test_a_projection_that_a_parent_uses_as_a_module_stays_one(use: str, tmp_path: Path) -> None:
    found = discover(QKV(), model_of(tmp_path, body=f"{use}\nreturn self.attn(x)"))

    if USES[use]:
        assert re.fullmatch(
            r"Model\.forward\(\) takes self\.attn\.[qkv]_proj(\.\w+)?, which must stay .*", found.refused["attn"]
        )
    else:
        assert list(found.matches) == ["attn"]


#: what a model does to its attention -> why it is left alone
CHANGES = {
    "self.second = self.attn": "the module is at several places of the model",
    "self.second = self.attn.k_proj": "k_proj is shared with another module",
    "self.attn.k_proj.weight = self.attn.v_proj.weight": "k_proj.weight is tied",
    "self._keep_in_fp32_modules = ['k_proj']": "k_proj is kept in float32",
    "self._keep_in_fp32_modules_strict = {'qkv_proj'}": "q_proj is kept in float32",
    "self.attn.k_proj = nn.Linear(16, 8)": "q_proj, k_proj, v_proj take inputs of different sizes",
    "self.attn.k_proj.half()": "q_proj, k_proj, v_proj have different types",
    "self.attn.k_proj.requires_grad_(False)": "k_proj.weight is frozen, and others of q_proj.weight, k_proj.weight, v",
    "self.attn.k_proj.register_buffer('more', torch.zeros(1))": "k_proj has parameters of its own besides weight and",
    "self.attn.k_proj.register_forward_hook(print)": "k_proj has hooks",
    "self.attn.v_proj = nn.Bilinear(8, 8, 8)": "v_proj is a Bilinear, no nn.Linear",
    "self.attn.v_proj = None": "v_proj is absent",
    "self.attn.forward = functools.partial(Attention.forward, self.attn)": "its forward was replaced on the object",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_not_by_itself_is_left_alone(change: str, tmp_path: Path) -> None:
    found = discover(QKV(), model_of(tmp_path, change))

    assert found.refused["attn"].startswith(CHANGES[change])
    assert "attn" not in found.matches


def test_what_all_projections_are_kept_in_changes_nothing(tmp_path: Path) -> None:
    found = discover(QKV(), model_of(tmp_path, "self._keep_in_fp32_modules = ['_proj']"))

    assert list(found.matches) == ["attn"]


def test_what_is_frozen_as_a_whole_is_fused_frozen(tmp_path: Path) -> None:
    model = model_of(tmp_path, "self.attn.requires_grad_(False)")
    assert list(discover(QKV(), model).matches) == ["attn"]

    fused = fuse(QKV(), model.attn, fused_class_of(QKV(), model.attn))
    assert {name: part.requires_grad for name, part in fused.named_parameters()} == dict.fromkeys(
        ("qkv_proj.weight", "qkv_proj.bias"), False
    )


class Both(Fusion):
    """Of layers that differ in type, which no rule of its own says."""

    target_modules_patterns = (r"attn$",)

    def is_fusable(self, module: nn.Module) -> bool:
        return hasattr(module, "q_proj")

    def layouts(self, module: nn.Module) -> list[Rows]:
        return [Rows(["q_proj.weight", "k_proj.weight"], "qk_proj.weight")]


def test_parts_of_different_types_are_no_parts_of_one(tmp_path: Path) -> None:
    found = discover(Both(), model_of(tmp_path, "self.attn.k_proj.half()"))
    assert found.refused == {"attn": "q_proj.weight, k_proj.weight have different types"}


def test_a_module_without_such_projections_says_so() -> None:
    assert QKV().refusal(nn.Linear(2, 2)) == "it has no such projections"


#: the class, how its parent calls it -> why it is left alone; None where it is fused
CALLED = {
    ("Cross", "return self.attn(x, x, third=None)"): None,
    ("Cross", "return self.attn(x, y, third=None)"): "its inputs may be different tensors: Model passes x=x, other=y",
    ("Three", "return self.attn(x, x, x)"): None,
    (
        "Three",
        "return self.attn(x, y, y)",
    ): "its inputs may be different tensors: Model passes query=x, key=y, value=y",
    ("Three", "return self.attn(x * 2, x * 2, x * 2)"): "its inputs are computed one by one: Model passes an expr",
    ("Three", "return list(self.children())[0](x, x, x)"): "nothing shows that query, key, value are one tensor",
    ("Attention", "return self.attn(x, other=y)"): None,
}


@pytest.mark.parametrize(("name", "body"), CALLED)
def test_how_a_parent_calls_a_module_decides(name: str, body: str, tmp_path: Path) -> None:
    found = discover(QKV(), model_of(tmp_path, f"self.attn = {name}()", body))

    reason = CALLED[name, body]
    if reason is None:
        assert list(found.matches) == ["attn"]
    else:
        assert re.match(f".*({reason})", found.refused["attn"]), found.refused


def test_keys_and_values_of_one_argument_need_no_queries_of_it(tmp_path: Path) -> None:
    found = discover(KV(), model_of(tmp_path, "self.attn = Three()", "return self.attn(x, y, y)"))
    assert list(found.matches) == ["attn"]

    found = discover(KV(), model_of(tmp_path, "self.attn = Three()", "return self.attn(x, x, y)"))
    assert found.refused == {"attn": "its inputs may be different tensors: Model passes key=x, value=y"}


def test_a_parent_that_passes_something_is_cross_attention(tmp_path: Path) -> None:
    modules = dict(model_of(tmp_path, body="return self.attn(x, other=y + 1)").named_modules())

    assert passes(modules, "attn", Guards(none=("other",))) == "cross attention: Model passes other=y + 1"


def test_a_parent_whose_calls_are_not_found_is_not_certain(tmp_path: Path) -> None:
    modules = dict(model_of(tmp_path, body="return list(self.children())[0](x)").named_modules())

    reason = passes(modules, "attn", Guards(none=("other",)), certainly=True)

    assert reason == "nothing shows how it is called"


def test_a_function_without_source_is_no_method() -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x\n", scope)

    with pytest.raises(NotUnderstoodError, match="the source of forward can't be read"):
        read_method("forward", scope["forward"])


def test_a_lambda_is_no_method() -> None:
    forward: Any = lambda self, x: x  # noqa: E731

    with pytest.raises(NotUnderstoodError, match="the source of forward is no method"):
        read_method("forward", forward)


# --- methods that can't be read or written ---------------------------------------------------------------------------

METHODS = """
import functools
from torch import nn


def around(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args)
    return wrapped


def make(number):
    class Closed(nn.Module):
        def forward(self, x):
            return self.q_proj(x) + number
    return Closed


class Wrapped(nn.Module):
    def forward(self, x):
        return self.q_proj(x)


Wrapped.forward = around(Wrapped.forward)
Closed = make(1)


class Generating(nn.Module):
    def forward(self, x):
        yield self.q_proj(x)


class Short(nn.Module):
    def forward(self, x, y=None): return self.q_proj(x)
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Wrapped", "forward is wrapped by something that its source doesn't show"),
        ("Closed", "forward uses number of the function around it"),
        ("Generating", "forward is a generator"),
    ],
)
def test_a_method_that_is_not_what_its_source_shows_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    cls = getattr(written_module(METHODS, tmp_path / "odd_modeling.py"), name)

    with pytest.raises(NotUnderstoodError, match=reason):
        methods_with(cls, lambda node: True)


def test_a_class_made_of_text_has_no_source_to_go_by() -> None:
    scope: dict[str, Any] = {"nn": nn}
    text = "class Odd(nn.Module):\n    def forward(self, x):\n        return self.q_proj(x)\n"
    exec(text, scope)

    odd = scope["Odd"]()
    odd.q_proj, odd.k_proj, odd.v_proj = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    assert QKV().refusal(odd) == "no method of Odd calls q_proj, k_proj, v_proj by name"


def test_methods_of_several_files_are_not_put_into_one_class(tmp_path: Path) -> None:
    mine = written_module(METHODS, tmp_path / "odd_modeling.py").Short
    (tmp_path / "other").mkdir()
    other = written_module(METHODS, tmp_path / "other" / "odd_modeling.py").Short
    methods = [(method, method.source) for cls in (mine, other) for method in methods_with(cls, lambda node: True)]

    with pytest.raises(NotUnderstoodError, match="its methods come from different files"):
        compile_subclass("Odd", "Odd.", (mine,), methods)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return self.q_proj(query) + self.k_proj(key) + self.v_proj(value)", "two statements share a line"),
        ("\n        x = 1; return self.q_proj(query) + self.k_proj(key) + self.v_proj(value)", "two statements share"),
    ],
)
def test_statements_that_have_no_line_of_their_own_are_refused(body: str, reason: str, tmp_path: Path) -> None:
    source = MODEL.replace("CHANGE", "pass").replace("BODY", "return self.attn(x)")
    head = "    def forward(self, query, key, value):"
    source = re.sub(re.escape(head) + r"\n.*\n", lambda _: f"{head} {body}\n", source)

    assert reason in QKV().refusal(written_module(source, tmp_path / "odd_modeling.py").Three())
