"""A small config of an architecture, by one table of attribute names."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

_WIDTHS = (
    "hidden_size d_model n_embd dim emb_dim embed_dim model_dim word_embed_proj_dim embedding_size embedding_dim "
    "encoder_hidden_size decoder_hidden_size out_hidden_size output_hidden_size text_hidden_size projection_dim "
    "attention_hidden_size adapter_in_dim adapter_input_size adapter_out_dim decoder_hidden_dim feature_size "
    "fpn_hidden_size mask_feature_size"
)
_FEED_FORWARD = (
    "intermediate_size ffn_dim d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim n_inner mlp_hidden_size mlp_dim "
    "dim_feedforward"
)
_EXPERT_WIDTHS = (
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size expert_dim"
)
_HEAD_WIDTHS = (
    "d_kv head_dim global_head_dim attention_head_dim kv_channels d_head kv_lora_rank q_lora_rank o_lora_rank "
    "v_head_dim qk_head_dim hidden_size_per_layer_input"
)
COUNTS_OF_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers encoder_depth decoder_depth"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "encoder_num_attention_heads decoder_num_attention_heads attention_heads"
)
_KEY_VALUE_HEADS = (
    "num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads num_kv_heads "
    "num_global_key_value_heads"
)
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"
_CHOSEN_EXPERTS = "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"

#: What makes a model small. Queries have 4 heads, keys and values 2, wherever a config lets them differ.
SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), 64),
    **dict.fromkeys(_FEED_FORWARD.split(), 96),
    **dict.fromkeys(_EXPERT_WIDTHS.split(), 32),
    **dict.fromkeys(_HEAD_WIDTHS.split(), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(COUNTS_OF_LAYERS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_KEY_VALUE_HEADS.split(), 2),
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys(_CHOSEN_EXPERTS.split(), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "num_hash_layers": 0,
    "tie_word_embeddings": False,
    # positions and tokens
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id", "begin_suppress_tokens", "suppress_tokens")),
    **dict.fromkeys(("image_token_id", "image_token_index"), 120),
    **dict.fromkeys(("video_token_id", "video_token_index"), 121),
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 124),
    # images
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "in_channels": 3,
    "num_labels": 4,
    "num_image_tokens": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "num_frames": 4,
    "frames_per_clip": 4,
    "crop_size": 32,
    "tubelet_size": [2, 8, 8],
    "num_queries": 5,
    # A sliding window or a chunk that is shorter than the input would only test the mask.
    "sliding_window": 64,
    "use_mambapy": True,
}


def small_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """A config as small as it can be.

    >>> from transformers import Qwen3Config
    >>> config = small_config(Qwen3Config)
    >>> config.hidden_size, config.num_hidden_layers, config.num_key_value_heads
    (64, 2, 2)

    Sizes of one architecture that depend on each other in a way that no name tells aren't known: of such a one the
    caller has a config.

    Raises:
        Exception: what the config says of sizes that don't fit together.
    """
    return config_class(**_small(config_class()))


def _small(default: PretrainedConfig) -> dict[str, Any]:
    """Arguments for a config like this one: what the table has for it, and for the configs inside of it."""
    known, renamed = default.to_dict(), type(default).attribute_map
    arguments: dict[str, Any] = {}
    for name, value in SMALL.items():
        computed = isinstance(getattr(type(default), renamed.get(name, name), None), property)
        if name in known | renamed and not computed and _of_a_type(getattr(default, name, None), value):
            arguments[name] = value
    if "qk_rope_head_dim" in arguments:  # of the part with rotary embeddings alone: it follows
        arguments.pop("head_dim", None)
    for name, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            arguments[name] = _small(part) | {"model_type": part.model_type}
    return arguments


def _of_a_type(one: Any, other: Any) -> bool:
    return one is None or other is None or type(one) is type(other)
