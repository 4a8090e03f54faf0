"""Small configs, and inputs, of the models whose files are tried."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from tests.support import tiny

DECODER = tiny.DECODER_SIZES
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
ENCODER_DECODER = tiny.ENCODER_DECODER_SIZES
T5: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
IMAGES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 28}
IMAGES |= {"num_attention_heads": 2, "patch_size": 14}

TOKENS = torch.arange(3, 27).view(2, 12)
PIXELS = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
BOTH_SIDES = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
SOUND = {
    "input_features": torch.randn(2, 80, 64, generator=torch.Generator().manual_seed(0)),
    "decoder_input_ids": TOKENS[:, :5],
}
IMAGE = {"pixel_values": PIXELS}
PAIRS = {"pixel_values": PIXELS, "input_ids": TOKENS}


def text_config(name: str, **changes: Any) -> PretrainedConfig:
    config: PretrainedConfig = getattr(transformers, name)(**DECODER | changes)
    return config


def clip() -> PretrainedConfig:
    text = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 32, "eos_token_id": 26}
    return transformers.CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=32)
