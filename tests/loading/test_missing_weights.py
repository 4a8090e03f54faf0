"""A checkpoint without experts, or other fused layers: they start as those of stock do from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from patcher import Patcher, original_state_dict
from tests.support.tiny import build_tiny, tiny_mixtral_config, tiny_qwen2_moe_config, tiny_qwen2_vl_config
from tests.support.tiny_experts import tiny_gpt_oss_config, tiny_llama4_config
from tests.verification.models import WHISPER

CONFIGS = [tiny_mixtral_config(), tiny_qwen2_moe_config(), tiny_gpt_oss_config(), tiny_llama4_config()]
GONE: dict[str, Callable[[str], bool]] = {
    "all experts": lambda key: ".experts." in key,
    "those of a layer": lambda key: "layers.1." in key and ".experts." in key,
    "one stack of each": lambda key: ".experts.down_proj" in key,
    "a layer": lambda key: "layers.1." in key,
    "all but the norms": lambda key: "norm" not in key,
}


def loaded(config: PretrainedConfig, state: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any, torch.Tensor]:
    """A model, what is said of the load, and what is drawn after it."""
    torch.manual_seed(5)
    made = type(build_tiny(config)).from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **options
    )
    model, info = made
    return model, info, torch.rand(3)


@pytest.mark.parametrize("fusions", [["sequential_experts"], ["sequential_experts", "qkv"]], ids=len)
@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_they_start_as_those_of_stock(config: Any, gone: str, fusions: list[str]) -> None:
    state = {key: value for key, value in build_tiny(config).state_dict().items() if not GONE[gone](key)}
    stock, expected, after = loaded(config, state)
    model, found, later = loaded(config, state, patcher=Patcher(fusions=fusions))
    values = original_state_dict(model)
    assert [key for key, value in stock.state_dict().items() if not torch.equal(values[key], value)] == []
    assert torch.equal(later, after)
    own = {name for name, _ in model.named_parameters() if name not in values}
    assert found["missing_keys"] <= expected["missing_keys"] | own
    assert len(found["missing_keys"]) >= len(expected["missing_keys"])


#: The queries and values of Whisper have a bias, and its keys have none.
OTHERS: list[tuple[Any, str, Callable[[str], bool]]] = [
    *((WHISPER, fusion, lambda key: "layers.1." in key) for fusion in ("qkv", "kv", "siblings")),
    (WHISPER, "qkv", lambda key: key.endswith("q_proj.bias")),
    (tiny_mixtral_config(), "qkv", lambda key: "layers.1.self_attn" in key),
    (tiny_qwen2_vl_config(), "patch_embeddings", lambda key: "patch_embed" in key),
]


@pytest.mark.parametrize(("config", "fusion", "is_gone"), OTHERS)
def test_other_fused_layers_too(config: Any, fusion: str, is_gone: Callable[[str], bool]) -> None:
    state = {key: value for key, value in build_tiny(config).state_dict().items() if not is_gone(key)}
    junk = [torch.full((size,), 7.7) for _ in range(500) for size in (32, 64)]
    del junk  # what isn't initialised is not zero by chance
    stock, _, after = loaded(config, state)
    model, _, later = loaded(config, state, patcher=Patcher(fusions=fusion))
    values = original_state_dict(model)
    assert [key for key, value in stock.state_dict().items() if not torch.equal(values[key], value)] == []
    assert torch.equal(later, after)
