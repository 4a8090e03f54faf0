"""Tiny GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_gguf(model: Any, path: Path, quantization: Any = None) -> None:
    """Write a Llama.

    Args:
        quantization: a `gguf.GGMLQuantizationType` for the matrices, whose rows must be as long as its blocks.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, value in model.state_dict().items():
        array = value.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        if heads:  # halves of a head interleaved, as llama.cpp rotates them
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        name = names.get_name(key, try_suffixes=(".weight",))
        if quantization is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


#: Layers of Qwen3.5 by their names in a GGUF file, where all attention is full.
_QWEN35 = {
    "attn_norm": (64,),
    "attn_q": (128, 64),  # with the gate of the output
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "attn_output": (64, 64),
    "attn_q_norm": (16,),
    "attn_k_norm": (16,),
    "post_attention_norm": (64,),
    "ffn_gate": (96, 64),
    "ffn_up": (96, 64),
    "ffn_down": (64, 96),
}


def write_qwen35_gguf(path: Path) -> None:
    """Write a Qwen3.5 of random weights: an architecture that transformers reads by conversions."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "qwen35")
    numbers = {"context_length": 64, "embedding_length": 64, "feed_forward_length": 96, "block_count": 2}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
    numbers |= {"full_attention_interval": 1, "rope.dimension_count": 16}
    numbers |= {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 2}
    numbers |= {"ssm.inner_size": 16}
    for name, number in numbers.items():
        writer.add_uint32(f"qwen35.{name}", number)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35.rope.freq_base", 10000.0)
    writer.add_array("qwen35.rope.dimension_sections", [2, 3, 3, 0])
    writer.add_token_list([f"w{number}" for number in range(128)])
    shapes = {"token_embd": (128, 64), "output": (128, 64), "output_norm": (64,)}
    shapes |= {f"blk.{number}.{name}": shape for number in range(2) for name, shape in _QWEN35.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(len(shape) == 1, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
