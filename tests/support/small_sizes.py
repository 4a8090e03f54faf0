"""What makes the config of any architecture small: values of some by their model type, beside those by names."""

from __future__ import annotations

from typing import Any

from patcher.verification.sides import SMALL

__all__ = ["COUNTS_OF_LAYERS", "FEW", "PARTICULAR", "PARTS_SET", "SMALL"]

#: The names of numbers of layers.
COUNTS_OF_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers encoder_depth decoder_depth"
)

#: Names of numbers of layers, heads and experts: what shrinks a model whose widths depend on each other.
FEW = frozenset(
    f"{COUNTS_OF_LAYERS} num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts vocab_size "
    "vocab_size_per_layer_input".split()
)

#: What the config around a part sets in it and a small one keeps.
PARTS_SET = frozenset(
    "out_features out_indices return_idx backbone features_only model_args architecture arch".split()
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}

_ASSISTANT: dict[str, Any] = {"backbone_hidden_size": 64, "text_config.num_hidden_layers": 4}
_ASSISTANT |= {"text_config.layer_types": ["sliding_attention", "full_attention"] * 2}
_ASSISTANT |= {"text_config.num_kv_shared_layers": 2}
_SERIES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
}
_SERIES["feature_size"] = 7  # what these are together
#: kernel, stride and padding
_INTRACLASS: dict[str, Any] = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]} | {
    f"{name}_{ratio}ratio": [[rows or size, columns or size], [1, 1], [(rows or size) // 2, (columns or size) // 2]]
    for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
    for name, rows, columns in (
        ("vertical_long_to_small_conv", 0, 1),
        ("horizontal_small_to_long_conv", 1, 0),
        ("symmetric_conv_long", 0, 0),
    )
}

#: Sizes of one architecture that depend on each other in a way that no name tells; of a config inside: `part.name`.
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 32},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "emu3": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 119}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0, "text_config.vocab_size_per_layer_input": 0},
    "gemma4_unified_assistant": _ASSISTANT,
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "2/4"},
    "muse_spark": {"audio_config.out_hidden_size": 64},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "nemotron3_diarization": {"head_config.audio_hidden_size": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe": {"head_config.audio_hidden_size": 64},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dia": {"delay_pattern": [0, 1, 2]},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0]}
    | {"intermediate_size": [96, 96]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16, "zero_expert_num": 1},
    "mamba2": {"num_heads": 8},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "perceiver": {"d_latents": 64, "num_self_attends_per_block": 2, "num_self_attention_heads": 1}
    | {"num_cross_attention_heads": 1, "train_size": [32, 32]},
    "qwen4_exp_text": {"indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_n_heads": 2}
    | {"indexer_kv_heads": 1, "indexer_head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48)},
    "xmod": {"default_language": "en_XX"},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2, "depths": [1] * 7},
    "molmo2": {"vision_config.image_size": [32, 32], "adapter_config.vision_feature_layer": [0, 1]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    # of timm, which has models for tests of all sizes in one
    "timm_wrapper": {"architecture": "test_vit"},
    "timm_backbone": {"backbone": "test_resnet"},
    "fast_vlm": {"vision_config.architecture": "fastvit_mci3"},
    "gemma3n": {"vision_soft_tokens_per_image": 101},
    "gemma3n_vision": {"architecture": "test_vit", "hidden_size": 64},
    "perception_lm": {"vision_config.architecture": "test_vit", "vision_config.model_args": {"embed_dim": 64}},
    "edgetam_vision_model": {"backbone_config.architecture": "repvit_m1", "backbone_config.num_classes": 4}
    | {"backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]},
    # heads of which the config by itself says nothing
    "sapiens2": {"head_config.upsample_out_channels": [16, 16], "head_config.conv_out_channels": [16]},
    "pp_ocrv5_server_det": {"intraclass_block_config": _INTRACLASS, "kernel_list": [3, 2, 2]},
    "pp_ocrv6_medium_det": {"intraclass_block_config": _INTRACLASS, "kernel_list": [3, 2, 2]},
    "vitmatte": {"fusion_hidden_sizes": [32, 16, 16, 8], "convstream_hidden_sizes": [8, 16, 32]}
    | {"backbone_config.out_features": ["stage2"], "backbone_config.out_indices": [2]},
    "upernet": {"auxiliary_in_channels": 64},
    # series of time
    "autoformer": _SERIES | {"label_length": 4, "moving_average": 3},
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "timesfm": {"patch_length": 8, "context_length": 64, "horizon_length": 16},
    "timesfm2_5": {"patch_length": 8, "context_length": 64, "horizon_length": 16},
    "patchtst": {"patch_length": 4, "patch_stride": 4},
    # others
    "eomt": {"num_blocks": 1},
    "eomt_dinov3": {"num_blocks": 1},
    "lxmert": {"l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 32},
    "muse_glimmer_assistant": {"num_hidden_layers": 2, "target_layer_ids": [0, 1]}
    | {"layer_types": ["sliding_attention"] * 2, "block_size": 4},
    "qwen3_omni_moe": {"talker_config.spatial_merge_size": 2},
    "seggpt": {"image_size": [64, 32], "pretrain_image_size": 32, "intermediate_hidden_state_indices": [0, 1]}
    | {"merge_index": 0},
}
