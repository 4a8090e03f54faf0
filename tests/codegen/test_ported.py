"""A config that was written for another generator: its import line changes, and it works."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3
from typer.testing import CliRunner

from patcher.cli.codegen import app
from tests.codegen.ported_kernels import ExternalMLP
from tests.support import tiny

CONFIG = "tests.codegen.ported"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ported")
    done = CliRunner().invoke(app, [CONFIG, "-o", str(folder), "--diff", "-v"])
    assert done.exit_code == 0, done.output
    for line in (
        "  replace class Qwen3RMSNorm: Use fused kernel\n",
        "  replace function apply_rotary_pos_emb: Use fused RoPE\n",
        "  override method Qwen3Attention.forward: Add Ulysses SP\n",
        "  modify init Qwen3Attention\n",
        "  external Qwen3MLP\n",
        f"wrote {folder / 'patched_modeling_qwen3_gpu.py'} and patched_modeling_qwen3_gpu.diff\n",
    ):
        assert line in done.output
    return folder


@pytest.fixture(scope="module")
def ported(folder: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("patched_modeling_qwen3_gpu")
    del sys.modules["patched_modeling_qwen3_gpu"]


def test_every_patch_is_in_the_file_with_its_comments(folder: Path) -> None:
    text = (folder / "patched_modeling_qwen3_gpu.py").read_text("utf-8")
    for lines in (
        "from torch.distributed import all_gather, all_reduce\n",
        "from transformers.cache_utils import Cache, DynamicCache\n",
        "# [PATCHED CLASS] Qwen3RMSNorm\n# Why: Use fused kernel\n# from ",
        "        # Optimized implementation with comments preserved\n",
        "# [PATCHED FUNCTION] apply_rotary_pos_emb\n# Why: Use fused RoPE\n",
        "# [MODIFIED CLASS] Qwen3Attention\n# Methods patched: ",
        "        # Comments here will be preserved in the generated output!\n",
        "        # BEGIN ULYSSES SEQUENCE PARALLEL MODIFICATIONS\n",
    ):
        assert lines in text
    assert "class Qwen3ForTokenClassification" not in text
    assert "@config." not in text
    diff = (folder / "patched_modeling_qwen3_gpu.diff").read_text("utf-8")
    assert "\n-from ...activations import ACT2FN\n" in diff
    assert "\n+# [PATCHED CLASS] Qwen3RMSNorm\n" in diff


def test_the_file_computes_what_the_original_does(ported: Any) -> None:
    config = Qwen3Config(**tiny.DECODER_SIZES, head_dim=16, attn_implementation="eager")
    stock, model = modeling_qwen3.Qwen3ForCausalLM(config).eval(), ported.Qwen3ForCausalLM(config).eval()
    model.load_state_dict(stock.state_dict())
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=1e-4)
    assert [layer.self_attn.custom_attr for layer in model.model.layers] == list(range(config.num_hidden_layers))
    assert {type(layer.mlp) for layer in model.model.layers} == {ExternalMLP}
