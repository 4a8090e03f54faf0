"""Checkpoints for benchmarks: the sizes of real models, with values that cost nothing to make.

What is measured doesn't depend on the values, as long as none of them is special: no zeros, nothing that overflows.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, PretrainedConfig

__all__ = ["LLAMA_1B", "SMOLLM2_SIZES", "write_checkpoint"]

#: those of SmolLM2-135M
SMOLLM2_SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
#: Llama-3.2-1B
LLAMA_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)


@torch.no_grad()
def write_checkpoint(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> Path:
    """Save a model of the class that the config names first, as stock does; 1 B parameters take seconds."""
    assert config.architectures
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])._from_config(config, dtype=dtype)
    model.to_empty(device="cpu").tie_weights()
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name, parameter in model.named_parameters():
        flat = parameter.view(-1)
        flat.copy_(values.repeat(-(-flat.numel() // values.numel()))[: flat.numel()])
        if parameter.ndim > 1:
            parameter.mul_(parameter.shape[-1] ** -0.5)
        else:
            parameter.mul_(0.1).add_(name.endswith("weight"))  # of a norm
    model.save_pretrained(folder)
    del model, parameter, flat
    gc.collect()
    return folder
