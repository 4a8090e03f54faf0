"""What `siblings` gains in a forward: multi-head latent attention and a gated delta net, beside stock. Ratios.

    python -m tests.benchmarks.bench_siblings [REPETITIONS]

A DeepSeek-V3 without experts and a Qwen3-Next without experts, four layers each with the width of a small model and
random weights in bfloat16. Decoding is one token a row after 128 in the cache; a prompt has 128 tokens.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3NextConfig

from tests.benchmarks.forwards import prefill
from tests.benchmarks.measuring import line, median, ratio, taking_turns
from tests.support.caches import CACHE

THREADS = 2
CACHED = PROMPT = 128
SECONDS = 60.0
SUBJECTS: dict[str, PretrainedConfig] = {
    "DeepSeek-V3, latent attention": DeepseekV3Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        first_k_dense_replace=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=384,
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        architectures=["DeepseekV3ForCausalLM"],
    ),
    "Qwen3-Next, gated delta net": Qwen3NextConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        mlp_only_layers=[0, 1, 2, 3],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        architectures=["Qwen3NextForCausalLM"],
    ),
}


def decoding(model: Any, batch: int, cached: int) -> Callable[[], None]:
    """One token a row after those before: a state that is recurrent can't be set back."""
    tokens = torch.arange(batch * cached).view(batch, cached) % model.config.vocab_size
    with torch.no_grad():
        cache = model(tokens, use_cache=True, logits_to_keep=1)[CACHE]

    def step() -> None:
        with torch.no_grad():
            model(tokens[:, :1], **{CACHE: cache})

    return step


def forwards(name: str, folder: Path, repetitions: int) -> None:
    from transformers import AutoModelForCausalLM

    from patcher import Patcher

    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    models: dict[str, Any] = {"stock": stock, "siblings": Patcher(fusions=["siblings"]).apply(stock)}
    kinds = [(f"a step of decoding, batch {rows}", decoding, rows, CACHED) for rows in (1, 8)]
    kinds += [(f"a prompt of {PROMPT} tokens", prefill, 1, PROMPT)]
    for what, make, rows, length in kinds:
        runs = {key: make(model, rows, length) for key, model in models.items()}
        times = taking_turns(runs, 20 * repetitions, warm_up=1, limit=SECONDS)
        line(f"{name}, bfloat16, {what}, stock", f"{median(times, 'stock'):.1f} ms")
        line("  with siblings / stock", f"{ratio(times, 'siblings', 'stock'):.3f}")


def main(repetitions: int = 5) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import logging

    from tests.benchmarks.models import write_checkpoint

    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, threads))
    try:
        for name, config in SUBJECTS.items():
            with tempfile.TemporaryDirectory() as folder:
                forwards(name, write_checkpoint(config, Path(folder), torch.bfloat16), repetitions)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
