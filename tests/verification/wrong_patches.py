"""Patches that are wrong in one hidden place each, of real classes: what `patcher.verify` has to see.

Most compute as stock does but where a condition holds: there the result is off by two percent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, LongformerConfig, MistralConfig, PretrainedConfig, Qwen2Config
from transformers.models.bert.modeling_bert import (
    BertLayer,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
)
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from patcher import Patcher
from tests.support.caches import cache_in
from tests.support.small_configs import small_configs
from tests.support.tiny import (
    DECODER_SIZES,
    tiny_bert_config,
    tiny_gpt2_config,
    tiny_llama_config,
    tiny_mixtral_config,
)
from tests.verification.wrong_classes import (
    AllLogits,
    AlwaysSdpa,
    CausalOnly,
    ClampedInHalf,
    DetachedInTraining,
    DoubleLogits,
    DropoutInEvaluation,
    FirstRowsPositions,
    HalfAngles,
    HalfRouter,
    HalfSoftmax,
    KeepsNothing,
    LessDropout,
    LossOfEachBatch,
    LossOfIgnoredTokens,
    LossWithoutShift,
    LostUpcast,
    ModuleDropout,
    NoAttentionDropout,
    NoBalanceLoss,
    NoCorrectionBias,
    NoDropout,
    NoGradientForLongRows,
    NoHiddenStates,
    NoLogitsByIndex,
    NoMask,
    NoMaskedLoss,
    NoMaskOfOneToken,
    NormInHalf,
    NoTokenTypes,
    NoTuple,
    NoWeightGradientInBatches,
    NoWeights,
    OldWindow,
    OneMaskForAllRows,
    OtherEpsilon,
    OwnAbsolutePositions,
    OwnBertPositions,
    OwnDropout,
    OwnPositions,
    ScaledEmbeds,
    StaleByShape,
    StaleMask,
    TransposedWeights,
    UnscaledDropout,
    WritesIds,
    WrongGradientInTraining,
    WrongHiddenStates,
)


def no_dropout(module: Any, *args: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
    return modeling_llama.eager_attention_forward(module, *args, dropout=0.0, **kwargs)


def inexact_in_half(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    output, weights = modeling_llama.eager_attention_forward(module, query, *args, **kwargs)
    return output * (1.05 if output.dtype is torch.bfloat16 else 1), weights


LLAMA = tiny_llama_config(max_position_embeddings=512)
GPT2 = tiny_gpt2_config()
BERT = tiny_bert_config()
MIXTRAL = tiny_mixtral_config()
MISTRAL = MistralConfig(**DECODER_SIZES | {"max_position_embeddings": 8192, "sliding_window": 4096})
QWEN2 = Qwen2Config(**DECODER_SIZES)
LONGFORMER = LongformerConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, pad_token_id=1,
    max_position_embeddings=1026, attention_window=[512, 512], architectures=["LongformerForMaskedLM"],
)  # fmt: skip


@dataclass(frozen=True)
class Wrong:
    """A patcher, the config of a model that it is wrong for, the stages one of which says so, and what it says."""

    config: PretrainedConfig
    patcher: Patcher
    stages: str
    says: str = "differs from stock"
    options: dict[str, Any] = field(default_factory=dict)


Condition = Callable[[Any, torch.Tensor, dict[str, Any]], bool]


def off(base: type[nn.Module], when: Condition, change: Callable[[Any], Any] = lambda x: x * 1.02) -> Any:
    """A subclass whose first result is changed where the condition holds, of the module, its first input and the
    keyword arguments."""

    class Off(base):  # type: ignore[misc, valid-type]
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else next(iter(kwargs.values()))
            wrong = when(self, x, kwargs)
            self.calls += 1
            found = super().forward(*args, **kwargs)
            if not wrong:
                return found
            return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

    return Off


def of_llama(name: str, replacement: type[nn.Module], stages: str, says: str = "differs from stock") -> Wrong:
    return Wrong(LLAMA, Patcher({name: replacement}), stages, says)


def kept(kwargs: dict[str, Any]) -> int:
    """How many tokens the cache holds."""
    cache = cache_in(kwargs)
    return 0 if cache is None else cache.get_seq_length()


WRONG: dict[str, Wrong] = {
    # training mode
    "dropout of its own": of_llama("LlamaMLP", OwnDropout, "training"),
    "a dropout module of its own": of_llama("LlamaMLP", ModuleDropout, "training"),
    "another factor in training": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: m.training), "training",
        r"model\.layers\.0\.mlp"),
    "another factor in a layer's training": of_llama("LlamaDecoderLayer",
        off(LlamaDecoderLayer, lambda m, x, k: m.training and m.self_attn.layer_idx == 0), "training"),
    "no dropout": Wrong(BERT, Patcher({"BertSelfOutput": NoDropout}), "training"),
    "no dropout of attention": Wrong(BERT, Patcher({"BertSelfAttention": NoAttentionDropout}), "training"),
    "no dropout in a function": Wrong(tiny_llama_config(attention_dropout=0.5),
        Patcher(function_mapping={"eager_attention_forward": no_dropout}), "training", "LlamaAttention, which calls",
        {"attn_implementation": "eager"}),
    "half the dropout": Wrong(GPT2, Patcher({"GPT2MLP": LessDropout}), "training"),
    "dropout without scaling": Wrong(GPT2, Patcher({"GPT2MLP": UnscaledDropout}), "training"),
    "one dropout mask for all rows": Wrong(BERT, Patcher({"BertSelfOutput": OneMaskForAllRows}), "training"),
    "dropout in evaluation": Wrong(BERT, Patcher({"BertSelfOutput": DropoutInEvaluation}), "outputs"),
    "a layer's training": Wrong(BERT, Patcher({"BertLayer": off(BertLayer, lambda m, x, k: m.training)}), "training"),
    # gradients
    "a wrong gradient in training": of_llama("LlamaMLP", WrongGradientInTraining, "training"),
    "a detached input in training": of_llama("LlamaMLP", DetachedInTraining, "training"),
    "no gradient of long rows": of_llama("LlamaMLP", NoGradientForLongRows, "gradients training"),
    "no gradient in batches": of_llama("LlamaMLP", NoWeightGradientInBatches, "gradients training"),
    "wrong without gradients": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: not torch.is_grad_enabled()),
        "outputs"),
    "wrong with gradients": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: torch.is_grad_enabled()),
        "gradients training"),
    # positions
    "positions of its own": of_llama("LlamaRotaryEmbedding", OwnPositions, "outputs arguments", "other positions"),
    "positions of the first row": of_llama("LlamaRotaryEmbedding", FirstRowsPositions, "outputs arguments"),
    "absolute positions of its own": Wrong(GPT2, Patcher({"GPT2Model": OwnAbsolutePositions}), "outputs arguments"),
    "an encoder's positions": Wrong(BERT, Patcher({"BertEmbeddings": OwnBertPositions}), "outputs arguments"),
    # batches and lengths
    "five rows": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: x.shape[0] == 5), "outputs", "batch of 5"),
    "over three rows": Wrong(QWEN2,
        Patcher({"Qwen2Attention": off(Qwen2Attention, lambda m, x, k: x.shape[0] > 3)}), "outputs"),
    "over sixteen rows": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: x.shape[0] > 16), "outputs"),
    "over 64 tokens": Wrong(MIXTRAL, Patcher({"MixtralExperts": off(MixtralExperts, lambda m, x, k: len(x) > 64)}),
        "outputs"),
    "over 100 tokens": of_llama("LlamaAttention", off(LlamaAttention, lambda m, x, k: x.shape[1] > 100), "outputs"),
    "128 tokens": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: x.shape[1] == 128), "outputs"),
    "one token": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: x.shape[1] == 1), "outputs"),
    "past the window": Wrong(MISTRAL, Patcher({"MistralAttention": OldWindow}), "windows"),
    "past the window of steps": Wrong(MISTRAL, Patcher({"MistralAttention": off(MistralAttention,
        lambda m, x, k: x.shape[1] == 1 and kept(k) > m.config.sliding_window)}), "windows"),
    "past a window of each layer": Wrong(LONGFORMER, Patcher({"LongformerSelfAttention": off(LongformerSelfAttention,
        lambda m, x, k: x.shape[1] > 2 * m.one_sided_attn_window_size)}), "windows outputs"),
    # masks
    "no mask": of_llama("LlamaAttention", NoMask, "outputs"),
    "no mask in steps": of_llama("LlamaAttention", NoMaskOfOneToken, "outputs"),
    "the mask of the last token": of_llama("LlamaAttention", CausalOnly, "outputs arguments"),
    "padding on the left": Wrong(GPT2, Patcher({"GPT2Attention": off(GPT2Attention, lambda m, x, k: (
        (mask := k.get("attention_mask")) is not None and mask.dtype is torch.bool and not mask[..., -1, 0].all()))}),
        "outputs"),
    "padding on the right": of_llama("LlamaAttention", off(LlamaAttention, lambda m, x, k: (
        (mask := k.get("attention_mask")) is not None and mask.dtype is torch.bool and not mask[..., -1, -1].all())),
        "outputs"),
    # what is recorded
    "no attentions": of_llama("LlamaAttention", NoWeights, "recorded", "attentions"),
    "attentions on their side": of_llama("LlamaAttention", TransposedWeights, "recorded", "attentions"),
    "sdpa where eager was asked for": of_llama("LlamaAttention", AlwaysSdpa, "recorded"),
    "no hidden states": of_llama("LlamaModel", NoHiddenStates, "arguments recorded", "hidden_states"),
    "hidden states in another order": of_llama("LlamaModel", WrongHiddenStates, "arguments recorded", "hidden_states"),
    "another attention under eager": of_llama("LlamaAttention",
        off(LlamaAttention, lambda m, x, k: m.config._attn_implementation == "eager"), "recorded"),
    # loss, and other arguments
    "a loss without shift": of_llama("LlamaForCausalLM", LossWithoutShift, "arguments", "labels"),
    "a loss of ignored tokens": of_llama("LlamaForCausalLM", LossOfIgnoredTokens, "arguments", "labels"),
    "a loss of each batch": of_llama("LlamaForCausalLM", LossOfEachBatch, "arguments", "num_items_in_batch"),
    "another loss": Wrong(BERT, Patcher({"BertForMaskedLM": NoMaskedLoss}), "arguments", "labels"),
    "no balancing loss": Wrong(MIXTRAL, Patcher({"MixtralForCausalLM": NoBalanceLoss}), "arguments", "labels"),
    "all logits": of_llama("LlamaForCausalLM", AllLogits, "arguments", "logits_to_keep"),
    "no logits by index": of_llama("LlamaForCausalLM", NoLogitsByIndex, "arguments", "logits_to_keep"),
    "no token types": Wrong(BERT, Patcher({"BertEmbeddings": NoTokenTypes}), "arguments", "token_type_ids"),
    "embeddings that are given": Wrong(BERT, Patcher({"BertEmbeddings": ScaledEmbeds}), "arguments", "inputs_embeds"),
    "no tuple": of_llama("LlamaForCausalLM", NoTuple, "arguments", "return_dict"),
    "no cache": of_llama("LlamaModel", KeepsNothing, "outputs arguments"),
    "wrong without a cache": of_llama("LlamaAttention",
        off(LlamaAttention, lambda m, x, k: cache_in(k) is None), "outputs"),
    "wrong with an empty cache": of_llama("LlamaAttention",
        off(LlamaAttention, lambda m, x, k: cache_in(k) is not None and not kept(k)), "outputs"),
    # caches
    "the fortieth step": of_llama("LlamaAttention",
        off(LlamaAttention, lambda m, x, k: x.shape[1] == 1 and kept(k) >= 51), "outputs", "token by token"),
    "a prompt in chunks": of_llama("LlamaAttention",
        off(LlamaAttention, lambda m, x, k: x.shape[1] > 1 and kept(k) > 0), "outputs", "in chunks"),
    "a third chunk": of_llama("LlamaAttention",
        off(LlamaAttention, lambda m, x, k: x.shape[1] > 1 and kept(k) > 25), "outputs", "in chunks"),
    # what goes in and comes out
    "another type": of_llama("LlamaForCausalLM", DoubleLogits, "outputs", "torch.float64"),
    "its input is written": of_llama("LlamaForCausalLM", WritesIds, "outputs", "input_ids"),
    "random": of_llama("LlamaMLP",
        off(LlamaMLP, lambda m, x, k: True, lambda y: y + torch.randn_like(y) * 1e-3), "outputs"),
    # what is kept between calls
    "the second call": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: m.calls > 0), "outputs", "one after"),
    "the last mask of that shape": of_llama("LlamaAttention", StaleMask, "outputs"),
    "the last positions of that shape": of_llama("LlamaRotaryEmbedding", StaleByShape, "outputs"),
    # constants that most inputs don't show
    "another epsilon": Wrong(BERT, Patcher({"BertSelfOutput": OtherEpsilon}), "precision", "1024 times as small"),
    "a bias that starts at zero": Wrong(
        next(small_configs(DeepseekV3Config)), Patcher({"DeepseekV3TopkRouter": NoCorrectionBias}), "outputs"),
    # half precision, while float32 is verified
    "an upcast lost": of_llama("LlamaRMSNorm", LostUpcast, "precision", r"input_layernorm \(LostUpcast"),
    "an upcast of softmax lost": of_llama("LlamaAttention", HalfSoftmax, "precision", "HalfSoftmax"),
    "angles in half precision": of_llama("LlamaRotaryEmbedding", HalfAngles, "precision", "HalfAngles"),
    "clamped in half precision": of_llama("LlamaMLP", ClampedInHalf, "precision", "ClampedInHalf"),
    "a router in half precision": Wrong(MIXTRAL, Patcher({"MixtralTopKRouter": HalfRouter}), "precision"),
    "off in bfloat16": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: x.dtype is torch.bfloat16), "precision"),
    "a function off in bfloat16": Wrong(LLAMA,
        Patcher(function_mapping={"eager_attention_forward": inexact_in_half}), "precision", "LlamaAttention, which",
        {"attn_implementation": "eager"}),
    "off in float16": of_llama("LlamaMLP", off(LlamaMLP, lambda m, x, k: x.dtype is torch.float16), "precision"),
    "off in bfloat16 for what is large": of_llama("LlamaMLP",
        off(LlamaMLP, lambda m, x, k: x.dtype is torch.bfloat16 and bool(x.abs().max() > 40)), "precision"),
    "another type in half precision": of_llama("LlamaRMSNorm", NormInHalf, "precision"),
    **{f"{name} in bfloat16": Wrong(LLAMA, Patcher({cls: mine}), "precision", "begins in", {"dtype": torch.bfloat16})
       for name, cls, mine in [
           ("a norm without upcast", "LlamaRMSNorm", LostUpcast),
           ("a softmax without upcast", "LlamaAttention", HalfSoftmax),
           ("angles without upcast", "LlamaRotaryEmbedding", HalfAngles)]},
}  # fmt: skip
