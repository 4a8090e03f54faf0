"""A generated file at work: every kind of patch in one real modeling file, imported and run beside the original."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher.codegen import write
from tests.codegen.every_kind import config


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("runtime")
    path: Path = write(config, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module(path.stem)
    del sys.modules[path.stem]


def tiny() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )


IDS = torch.randint(1, 99, (2, 7), generator=torch.Generator().manual_seed(1))


def test_every_patch_is_in_effect_and_the_logits_stay(patched: ModuleType) -> None:
    stock = modeling_llama.LlamaForCausalLM(tiny()).eval()
    model = patched.LlamaForCausalLM(tiny()).eval()
    model.load_state_dict(stock.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-4, atol=1e-4)
    layers = model.model.layers
    assert [layer.self_attn.mark for layer in layers] == [0, 10]
    assert [layer.mlp.calls for layer in layers] == [1, 1]
    assert isinstance(layers[0].mlp, patched.OriginalLlamaMLP)
    assert patched.LlamaRMSNorm is nn.RMSNorm
    assert patched.rotate_half.__module__ == patched.__name__


def test_a_class_with_an_ellipsis_for_a_body_gets_its_method(patched: ModuleType) -> None:
    model = patched.LlamaForSequenceClassification(tiny()).eval()
    with torch.no_grad():
        assert model(IDS).shape == (2, 2)


def test_what_is_left_out_is_gone_from_all(patched: ModuleType) -> None:
    assert not hasattr(patched, "LlamaForTokenClassification")
    assert sorted([*patched.__all__, "LlamaForTokenClassification"]) == sorted(modeling_llama.__all__)


def test_the_original_is_untouched(patched: ModuleType) -> None:
    assert modeling_llama.LlamaMLP is LlamaMLP
    assert not hasattr(modeling_llama.LlamaAttention, "_original_init")
