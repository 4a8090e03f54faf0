"""Loads of a tiny Llama with parts on the disk: several devices, as far as a CPU alone has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
from packaging.version import Version
from transformers import LlamaForCausalLM

DEVICE_MAPS: dict[str, Any] = {
    "a layer on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "an mlp on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0.self_attn": "disk",
        "model.layers.0.mlp": "disk",
        "model.layers.0.input_layernorm": "cpu",
        "model.layers.0.post_attention_layernorm": "cpu",
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "auto": "auto",
}
if Version(accelerate.__version__) >= Version("1.11"):  # older ones refuse to
    DEVICE_MAPS["all on disk"] = {"": "disk"}


def offloaded(folder: Path, name: str, where: Path, **options: Any) -> Any:
    if name == "auto":
        options["max_memory"] = {"cpu": 300_000}
    return LlamaForCausalLM.from_pretrained(folder, device_map=DEVICE_MAPS[name], offload_folder=where, **options)
