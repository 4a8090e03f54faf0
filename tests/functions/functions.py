"""Functions to call in place of those of modeling code, of a module that another process can import."""

from __future__ import annotations

from typing import Any

import torch
from transformers import masking_utils
from transformers.models.llama import modeling_llama

#: what was called, in the order of the calls
CALLS: list[str] = []


def counted_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """The original, and a note of the call."""
    CALLS.append("rope")
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def counted_half(x: Any) -> Any:
    CALLS.append("half")
    return modeling_llama.rotate_half(x)


def doubled_half(x: Any) -> Any:
    """Other numbers than the original's, which it calls in its module."""
    return 2 * modeling_llama.rotate_half(x)


def plain_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Other numbers than the original's, and nothing that a compiler would stumble over."""
    return q * cos.unsqueeze(unsqueeze_dim), k * cos.unsqueeze(unsqueeze_dim)


def unturned(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """In images: no rotation at all."""
    return q, k


def writing_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Writes into what it is given."""
    return q.mul_(2), k


def counted_mask(*args: Any, **kwargs: Any) -> Any:
    CALLS.append("mask")
    return masking_utils.create_causal_mask(*args, **kwargs)


def counted_eager(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Any:
    CALLS.append("eager")
    return modeling_llama.eager_attention_forward(
        module, query, key, value, attention_mask, scaling, dropout=dropout, **kwargs
    )
