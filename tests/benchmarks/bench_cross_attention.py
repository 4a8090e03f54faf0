"""What `kv` gains in cross attention: the first step of a decoder, which projects the encoder's output. Ratios.

    python -m tests.benchmarks.bench_cross_attention [REPETITIONS]

Models of the sizes of Whisper tiny and of BART base, with random weights: what is measured doesn't depend on them. The
first step fills the cache of the cross attention, so it is where keys and values are projected, all positions of the
encoder at once; later steps take them from there, with and without `kv`. Besides, the two projections by themselves.
With many positions the time goes into the product, and two of them take as long as one of both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.benchmarks.measuring import line, median, ratio, taking_turns
from tests.support.caches import CACHE

THREADS = 2


def models() -> dict[str, tuple[Any, int]]:
    """What is measured -> a model, and how many positions its encoder gives."""
    from transformers import BartConfig, BartForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

    whisper = {"d_model": 384, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    whisper |= dict.fromkeys(("encoder_layers", "decoder_layers"), 4)
    whisper |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6)
    bart = {"d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 8192}
    bart |= dict.fromkeys(("encoder_layers", "decoder_layers"), 6)
    bart |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12)
    return {
        "Whisper tiny": (WhisperForConditionalGeneration(WhisperConfig(**whisper)), 1500),
        "BART base, 512 tokens": (BartForConditionalGeneration(BartConfig(**bart)), 512),
        "BART base, 16 tokens": (BartForConditionalGeneration(BartConfig(**bart)), 16),
    }


def first_step(model: Any, states: torch.Tensor) -> Callable[[], None]:
    """A prompt of four tokens, with nothing in the cache."""
    from transformers import DynamicCache, EncoderDecoderCache

    tokens = torch.arange(40, 44)[None]

    def step() -> None:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with torch.no_grad():
            model.model.decoder(input_ids=tokens, encoder_hidden_states=states, **{CACHE: cache})

    return step


def projections(model: Any, states: torch.Tensor) -> Callable[[], None]:
    """Keys and values of one layer, as its forward computes them."""
    attention = model.model.decoder.layers[0].encoder_attn
    shape = (*states.shape[:-1], -1, attention.head_dim)

    def both() -> None:
        with torch.no_grad():
            if hasattr(attention, "kv_proj"):
                parts = attention.kv_proj(states).split(attention.kv_proj_sizes, dim=-1)
            else:
                parts = attention.k_proj(states), attention.v_proj(states)
            for part in parts:
                part.view(shape).transpose(1, 2).contiguous()  # as attention reads it

    return both


def main(repetitions: int = 20, only: str = "") -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from patcher import Patcher

    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, threads))
    try:
        for name, (model, positions) in models().items():
            if only not in name:
                continue
            for dtype in (torch.float32, torch.bfloat16):
                stock = model.eval().to(dtype)
                both = {"stock": stock, "kv": Patcher(fusions="kv").apply(stock)}
                states = torch.randn(1, positions, model.config.d_model, dtype=dtype)
                for what, made in {"first step of the decoder": first_step, "projections": projections}.items():
                    runs = {which: partial(made(one, states)) for which, one in both.items()}
                    times = taking_turns(runs, repetitions, warm_up=3)
                    where = f"{name}, {str(dtype).removeprefix('torch.')}, {what}"
                    line(f"{where}, stock", f"{median(times, 'stock'):.2f} ms")
                    line(f"{where}, with kv / stock", f"{ratio(times, 'kv', 'stock'):.3f}")
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
