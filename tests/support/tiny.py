"""Tiny random models of real architectures, for tests: a few 10,000 parameters, loaded in milliseconds.

    >>> from tests.support.tiny import save_tiny, tiny_llama_config
    >>> folder = save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path)  # doctest: +SKIP

Every parameter gets random values of its own, norms and biases too: with the usual ones and zeros there, a weight
that was swapped or is missing would go unnoticed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    BertConfig,
    CLIPVisionConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLMoeConfig,
)

from tests.support.remote_code import remote_code_model as remote_code_model  # one place to import tiny models from
from tests.support.shared import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Queries have 64 rows, keys and values 32: unequal, so that splitting a joined projection evenly is always wrong.
DECODER_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 120, 121, 122, 123


def tiny_llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**DECODER_SIZES | changes)


def tiny_qwen3_config(**changes: Any) -> Qwen3Config:
    """Each head of queries and keys has a norm."""
    return Qwen3Config(**DECODER_SIZES | {"head_dim": 16} | changes)


def tiny_qwen2_moe_config(**changes: Any) -> Qwen2MoeConfig:
    """Four experts and a shared one in every layer, biases on q, k and v."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "qkv_bias": True}
    experts |= {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1}
    return Qwen2MoeConfig(**DECODER_SIZES | experts | changes)


def tiny_mixtral_config(**changes: Any) -> MixtralConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return MixtralConfig(**DECODER_SIZES | experts | changes)


def tiny_jamba_config(**changes: Any) -> JambaConfig:
    """Four layers: Mamba with an MLP, Mamba with experts, attention with an MLP, Mamba with experts."""
    layers = {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    mamba = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8}
    return JambaConfig(**DECODER_SIZES | layers | experts | mamba | changes)


def tiny_bert_config(**changes: Any) -> BertConfig:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return BertConfig(**sizes | {"num_attention_heads": 4, "max_position_embeddings": 64} | changes)


def tiny_gpt2_config(**changes: Any) -> GPT2Config:
    """``Conv1D`` layers (weights transposed) and a native joined ``c_attn``; the head is tied, as GPT-2's is."""
    sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2Config(**sizes | {"bos_token_id": 1, "eos_token_id": 2} | changes)


def tiny_llava_config(**changes: Any) -> LlavaConfig:
    """A CLIP vision tower (images of 28 x 28, four patches) and a Llama text tower."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=32,
    )
    towers = {"vision_config": vision, "text_config": tiny_llama_config()}
    return LlavaConfig(**towers | {"image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False} | changes)


def tiny_qwen2_vl_config(**changes: Any) -> Qwen2VLConfig:
    """A vision tower with a Conv3d patch embedding (patches of 2 x 4 x 4), and a Qwen2 text tower."""
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    towers = {"vision_config": vision, "text_config": DECODER_SIZES | {"rope_parameters": rope}}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "tie_word_embeddings": False}
    tokens |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return Qwen2VLConfig(**towers | tokens | changes)


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


def build_tiny(
    config: PretrainedConfig,
    *,
    model_class: Any = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of ``config`` with random parameters, in eval mode.

    ``model_class`` is a model class or an Auto class; by default the model with the usual language head.
    """
    if model_class is None:
        model_class = _auto_class(config)
    # Auto classes have `from_config` only, model classes `_from_config` only.
    make = getattr(model_class, "from_config", None) or model_class._from_config
    model = make(config, dtype=dtype)
    randomize(model, seed=seed)
    return model.eval()


def save_tiny(config: PretrainedConfig, folder: Path, **options: Any) -> Path:
    """Copy what :func:`shared.checkpoint` makes of a config and options to ``folder``, to do with as one likes.

    Whoever only reads it takes that one.
    """
    return Path(shutil.copytree(checkpoint(config, **options), folder, dirs_exist_ok=True))


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter random values of its own, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            values *= parameter.shape[-1] ** -0.5
        else:
            values *= 0.1
            if name.endswith("weight"):  # of a norm
                values += 1
        parameter.copy_(values)


def tiny_inputs(config: PretrainedConfig, *, batch: int = 2, length: int = 12, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for ``forward``: token ids, a mask, and for a vision-language model an image a row."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 100, (batch, length), generator=generator)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if config.model_type == "llava":
        input_ids[:, 1:5] = IMAGE_TOKEN
        inputs["pixel_values"] = torch.randn(batch, 3, 28, 28, generator=generator)
    elif config.model_type == "qwen2_vl":
        # 4 x 4 patches an image, of which 2 x 2 become one token.
        input_ids[:, 1] = VISION_START
        input_ids[:, 2:6] = IMAGE_TOKEN
        input_ids[:, 6] = VISION_END
        inputs["pixel_values"] = torch.randn(batch * 16, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
        inputs["mm_token_type_ids"] = (input_ids == IMAGE_TOKEN).int()
    return inputs


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word: `w0` to `w127`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(DECODER_SIZES["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w3")


def _auto_class(config: PretrainedConfig) -> Any:
    # Imported here: the Auto classes import a lot, and some tests only need a config.
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

    if "vision_config" in config.sub_configs:
        return AutoModelForImageTextToText
    return AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM
