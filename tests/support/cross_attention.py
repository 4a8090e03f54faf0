"""Models with cross attention, tiny: encoder-decoders, and a decoder that is given what an encoder made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.support.tiny import ENCODER_DECODER_SIZES, randomize, tiny_bert_config

__all__ = ["CASES", "Case", "save", "text"]

T5_SIZES: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 4}
CROSSED: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}


def text(*length: int) -> torch.Tensor:
    return torch.randint(3, 100, (2, *length), generator=torch.Generator().manual_seed(0))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Case:
    """A model with cross attention.

    Attributes:
        inputs: what its forward takes.
        cross: the cross attention of a layer, by its number; `own`: its self attention.
        generated: what it generates from.
    """

    cls: Any
    config: Callable[[], Any]
    inputs: dict[str, torch.Tensor]
    cross: str
    own: str
    generated: str = ""


CASES = {
    "Bart": Case(
        BartForConditionalGeneration,
        lambda: BartConfig(**ENCODER_DECODER_SIZES, max_position_embeddings=64),
        {"input_ids": text(9), "decoder_input_ids": text(5)},
        "model.decoder.layers.{}.encoder_attn",
        "model.decoder.layers.{}.self_attn",
        "input_ids",
    ),
    "T5": Case(
        T5ForConditionalGeneration,
        lambda: T5Config(**T5_SIZES, decoder_start_token_id=0),
        {"input_ids": text(9), "decoder_input_ids": text(5)},
        "decoder.block.{}.layer.1.EncDecAttention",
        "decoder.block.{}.layer.0.SelfAttention",
        "input_ids",
    ),
    "Whisper, keys without a bias": Case(
        WhisperForConditionalGeneration,
        lambda: WhisperConfig(**ENCODER_DECODER_SIZES, num_mel_bins=16, max_source_positions=20),
        {"input_features": numbers(16, 40), "decoder_input_ids": text(5)},
        "model.decoder.layers.{}.encoder_attn",
        "model.decoder.layers.{}.self_attn",
        "input_features",
    ),
    "BERT as a decoder": Case(
        BertLMHeadModel,
        lambda: BertConfig(**tiny_bert_config().to_diff_dict() | CROSSED),
        {"input_ids": text(5), "encoder_hidden_states": numbers(7, 64)},
        "bert.encoder.layer.{}.crossattention.self",
        "bert.encoder.layer.{}.attention.self",
    ),
}


def save(name: str, folder: Path) -> Path:
    """A checkpoint of a case, with random weights."""
    torch.manual_seed(0)
    model = CASES[name].cls(CASES[name].config()).eval()
    randomize(model)
    model.save_pretrained(folder)
    return folder
