"""What stock transformers makes of the checkpoints: written by a process that never imports patcher.

python -m tests.soak.stock FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, MobileBertConfig, PretrainedConfig

from tests.support import tiny
from tests.support.comparing import logits

#: name -> the config of a model; `sharded` in its folder is the same checkpoint in several files
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": tiny.tiny_llama_config(),
    "tied llama": tiny.tiny_llama_config(tie_word_embeddings=True),
    "mixtral": tiny.tiny_mixtral_config(),
    "qwen2_moe": tiny.tiny_qwen2_moe_config(),
    "bert": tiny.tiny_bert_config(),
    "qwen2_vl": tiny.tiny_qwen2_vl_config(),
    "gpt2": tiny.tiny_gpt2_config(),
    "mobilebert": MobileBertConfig(
        vocab_size=128,
        hidden_size=64,
        embedding_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intra_bottleneck_size=32,
        normalization_type="layer_norm",
        max_position_embeddings=64,
    ),
}
SHARDS = {"whole": "5GB", "sharded": "100KB"}


def class_names(model: torch.nn.Module) -> dict[str, str]:
    """path -> which class each module of a model is exactly."""
    return {path: f"{type(part).__module__}.{type(part).__qualname__}" for path, part in model.named_modules()}


def auto_class(config: PretrainedConfig) -> Any:
    return AutoModelForMaskedLM if config.model_type == "mobilebert" else tiny._auto_class(config)


def write(folder: Path) -> None:
    """For each config its checkpoint whole and in shards, as stock loads and saves it again, and what it computes."""
    for name, config in CONFIGS.items():
        tiny.save_tiny(config, folder / name / "made", model_class=auto_class(config))
        model = auto_class(config).from_pretrained(folder / name / "made")
        for shards, size in SHARDS.items():
            model.save_pretrained(folder / name / shards, max_shard_size=size)
        facts = {"logits": logits(model), "classes": class_names(model), "state_dict": model.state_dict()}
        torch.save(facts, folder / name / "facts.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(Path(sys.argv[1]))
    assert "patcher" not in sys.modules
