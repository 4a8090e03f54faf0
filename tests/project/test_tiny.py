"""The tiny models do what the other tests rely on: distinct values, an exact round trip, sound outputs."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.support import fresh, tiny

CONFIGS = [
    pytest.param(tiny.tiny_llama_config(), id="llama"),
    pytest.param(tiny.tiny_qwen2_moe_config(), id="qwen2_moe"),
    pytest.param(tiny.tiny_mixtral_config(), id="mixtral"),
    pytest.param(tiny.tiny_jamba_config(), id="jamba"),
    pytest.param(tiny.tiny_bert_config(), id="bert"),
    pytest.param(tiny.tiny_gpt2_config(), id="gpt2"),
    pytest.param(tiny.tiny_llava_config(), id="llava"),
    pytest.param(tiny.tiny_qwen2_vl_config(), id="qwen2_vl"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_no_two_parameters_are_alike(config: PretrainedConfig) -> None:
    model = tiny.build_tiny(config)

    for parameter in model.parameters():
        assert parameter.unique().numel() > 0.9 * parameter.numel()
    for one, other in combinations(model.parameters(), 2):
        assert one.shape != other.shape or not torch.equal(one, other)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_saved_and_loaded_is_built(config: PretrainedConfig, max_shard_size: str, tmp_path: Path) -> None:
    built = tiny.build_tiny(config)
    folder = tiny.save_tiny(config, tmp_path, max_shard_size=max_shard_size)
    loaded = type(built).from_pretrained(folder)
    inputs = tiny.tiny_inputs(config)

    logits = loaded(**inputs).logits

    assert torch.equal(logits, built(**inputs).logits)
    assert 0.3 < logits.std() < 3
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (max_shard_size == "100KB")


@pytest.mark.parametrize("config", [tiny.tiny_llava_config(), tiny.tiny_qwen2_vl_config()], ids=["llava", "qwen2_vl"])
@torch.no_grad()
def test_images_matter(config: PretrainedConfig) -> None:
    model = tiny.build_tiny(config)
    inputs = tiny.tiny_inputs(config)

    with_another_image = model(**inputs | {"pixel_values": -inputs["pixel_values"]}).logits

    assert not torch.allclose(model(**inputs).logits, with_another_image, atol=0.1)


def test_dtype_and_seed(tmp_path: Path) -> None:
    config = tiny.tiny_llama_config()
    bf16 = AutoModelForCausalLM.from_pretrained(tiny.save_tiny(config, tmp_path, dtype=torch.bfloat16))

    assert {parameter.dtype for parameter in bf16.parameters()} == {torch.bfloat16}
    one, same, other = (tiny.build_tiny(config, seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@torch.no_grad()
def test_remote_code_model_loads_its_own_code(tmp_path: Path) -> None:
    folder = tiny.remote_code_model(tmp_path / "remote", layers=3)

    model, loading_info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )

    assert type(model).__module__.startswith("transformers_modules.")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == len(model.model.layers) == 3
    assert not any(loading_info.values())
    assert 0.1 < model(torch.arange(10)[None]).logits.std() < 3


def test_configs_import_no_modeling_code() -> None:
    # So that a test can see what happens to a modeling module that is first imported while a model is built.
    code = "import sys, tests.support.tiny as t; t.tiny_llama_config(); t.tiny_llava_config(); print(*sys.modules)"
    assert not [name for name in fresh.run(code).stdout.split() if ".modeling_llama" in name]
