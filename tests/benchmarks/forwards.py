"""What a language model does in benchmarks: a step of decoding, a prompt at once, and a step of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.caches import CACHE

__all__ = ["decode_step", "prefill", "training_step"]


def decode_step(model: Any, batch: int, cached: int) -> Callable[[], None]:
    """One token a row after `cached` others, again and again, as `generate` takes it."""
    from transformers import DynamicCache

    config, device, dtype = model.config, model.device, model.dtype
    cache = DynamicCache(config=config)
    # Computing a prompt for many rows takes minutes on a CPU, and its values don't matter.
    states = torch.randn(batch, config.num_key_value_heads, cached, config.head_dim, device=device, dtype=dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(states, states, layer)
    tokens = torch.full((batch, 1), 7, device=device)

    def step() -> None:
        with torch.no_grad():
            model(tokens, **{CACHE: cache})
        cache.crop(-1)

    return step


def prefill(model: Any, batch: int, length: int) -> Callable[[], None]:
    """A prompt of `length` tokens a row, and the first token after it."""
    tokens = torch.arange(batch * length, device=model.device).view(batch, length) % model.config.vocab_size

    def prompt() -> None:
        with torch.no_grad():
            model(tokens, logits_to_keep=1)

    return prompt


def training_step(model: Any, batch: int, length: int) -> Callable[[], None]:
    """A forward and a backward pass over `batch` rows of `length` tokens."""
    tokens = torch.arange(batch * length, device=model.device).view(batch, length) % model.config.vocab_size

    def step() -> None:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()

    return step
