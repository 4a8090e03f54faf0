"""Checkpoints compared as files, and a model that has something for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen3VLMoeConfig

from tests.support.tiny import DECODER_SIZES, IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START


def same_checkpoint(one: Path, other: Path) -> bool:
    """Whether two folders hold the same safetensors files, byte for byte, and there are some."""
    names = sorted(path.name for path in one.glob("*.safetensors"))
    same_names = names == sorted(path.name for path in other.glob("*.safetensors"))
    return bool(names) and same_names and all((one / n).read_bytes() == (other / n).read_bytes() for n in names)


def tiny_qwen3_vl_moe_config(**changes: Any) -> Qwen3VLMoeConfig:
    """Conv3d patches, grouped queries, experts in the first layer of the text tower and a gated MLP in the second."""
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    text = DECODER_SIZES | experts | {"head_dim": 16, "rope_parameters": rope}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    tokens |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return Qwen3VLMoeConfig(**{"vision_config": vision, "text_config": text} | tokens | changes)
