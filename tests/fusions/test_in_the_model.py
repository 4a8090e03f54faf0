"""Why a module of a model is left alone: by what it is, by what it shares, by how its parents use and call it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SamConfig, SamModel

from patcher.fusions import Fusion, Rows
from patcher.fusions.callers import Caller
from patcher.fusions.finding import discover
from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.kv import KV
from patcher.fusions.qkv import QKV
from tests.support.fusing import fuse
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


class Positions(Attention):
    def forward(self, x, other=None, third=None):
        if third is not None:
            plain = other
            other = other + third
        return torch.tanh(self.q_proj(x) + self.k_proj(other) + self.v_proj(plain))


class Model(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.attn = Attention()
        self.second = nn.Identity()
        self.by_itself = True
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
    "self.attn.k_proj.half()": "q_proj.weight, k_proj.weight, v_proj.weight have different types",
    "self.attn.k_proj.requires_grad_(False)": "k_proj.weight is frozen, and others of q_proj.weight, k_proj.weight, v",
    "self.attn.k_proj.register_buffer('more', torch.zeros(1))": "k_proj has parameters of its own besides weight and",
    "self.attn.k_proj.register_forward_hook(print)": "k_proj has hooks",
    "self.attn.v_proj = nn.Bilinear(8, 8, 8)": "v_proj is a Bilinear, not an nn.Linear",
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
    ("Cross", "return self.attn(x, y, third=None)"): r"cross attention: Model passes other=y \(odd_modeling\.py:\d+\)",
    ("Cross", "return self.attn(x, x) + self.attn(x, y)"): "cross attention: Model passes other=",
    ("Three", "return self.attn(x, x, x)"): None,
    ("Three", "return self.attn(key=x, value=x, query=x)"): None,
    ("Three", "return self.attn(x, y, y)"): "nothing shows that key, query, value are one tensor",
    ("Three", "return self.attn(x * 2, x * 2, x * 2)"): "nothing shows that key, query, value are one tensor",
    ("Three", "return list(self.children())[0](x, x, x)"): "nothing shows that key, query, value are one tensor",
    ("Attention", "return self.attn(x, other=y)"): None,
    # Of branches the one that runs, by what the parent says of itself.
    ("Three", "if self.by_itself:\n    return self.attn(x, x, x)\nreturn self.attn(x, y, y)"): "nothing shows that",
    ("Three", "if self.by_itself:\n    return self.attn(x, x, x)\nelse:\n    return self.attn(x, y, y)"): None,
    ("Three", "if not self.by_itself:\n    return self.attn(x, x, x)\nelse:\n    return self.attn(x, y, y)"): (
        "nothing shows that"
    ),
}


@pytest.mark.parametrize(("name", "body"), CALLED)
def test_how_a_parent_calls_a_module_decides(name: str, body: str, tmp_path: Path) -> None:
    found = discover(QKV(), model_of(tmp_path, f"self.attn = {name}()", body))

    reason = CALLED[name, body]
    if reason is None:
        assert list(found.matches) == ["attn"]
    else:
        assert re.match(reason, found.refused["attn"]), found.refused


def test_each_module_is_decided_by_its_own_parent() -> None:
    """The first layer of SAM's decoder adds no positions: its attention is given one tensor, by a flag of it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    mask_decoder = {**sizes, "mlp_dim": 16, "iou_head_hidden_dim": 16}
    vision = {**sizes, "image_size": 32, "patch_size": 8, "output_channels": 16, "window_size": 2}
    with torch.device("meta"):
        model = SamModel(
            SamConfig(
                vision_config={**vision, "global_attn_indexes": [1], "num_pos_feats": 8},
                prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 8},
                mask_decoder_config=mask_decoder,
            )
        )
    for _ in range(2):  # what was found out about one holds for those that are alike
        found = discover(QKV(), model)
        assert list(found.matches) == ["mask_decoder.transformer.layers.0.self_attn"]
        assert found.refused["mask_decoder.transformer.layers.1.self_attn"].startswith("nothing shows that")


def test_keys_and_values_of_one_argument_need_no_queries_of_it(tmp_path: Path) -> None:
    found = discover(KV(), model_of(tmp_path, "self.attn = Three()", "return self.attn(x, y, y)"))
    assert list(found.matches) == ["attn"]

    found = discover(KV(), model_of(tmp_path, "self.attn = Three()", "return self.attn(x, x, y)"))
    assert found.refused["attn"].startswith("nothing shows that key, value are one tensor (odd_modeling.py:")


def test_keys_with_positions_are_not_given_what_values_are(tmp_path: Path) -> None:
    """As in the cross attention of TableTransformer."""
    found = discover(KV(), model_of(tmp_path, "self.attn = Positions()", "return self.attn(x, y, x)"))

    assert found.refused["attn"].startswith("they are given different variables: k_proj other, v_proj plain (odd_")


def test_what_a_parent_passes_is_told(tmp_path: Path) -> None:
    modules = dict(model_of(tmp_path, body="return self.attn(x, other=y + 1)").named_modules())
    assert Caller(modules, "attn").passes("other") == "Model passes other=y + 1"

    (tmp_path / "unseen").mkdir()
    modules = dict(model_of(tmp_path / "unseen", body="return list(self.children())[0](x)").named_modules())
    assert Caller(modules, "attn").passes("other") == ""
    assert not Caller(modules, "attn")._passes_nothing("other")
