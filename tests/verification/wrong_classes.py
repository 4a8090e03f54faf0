"""Replacements of real classes that are wrong in one hidden place each: see `wrong_patches`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertEmbeddings, BertForMaskedLM, BertSelfAttention, BertSelfOutput
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Model
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM, MixtralTopKRouter

from tests.support.caches import CACHE, cache_in


class OwnDropout(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class ModuleDropout(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


class NoNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight


class NoDropout(BertSelfOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class NoAttentionDropout(BertSelfAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout.p = 0.0


class LessDropout(GPT2MLP):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dropout.p /= 2


class UnscaledDropout(GPT2MLP):
    """Without the division by what is kept."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found = self.c_proj(self.act(self.c_fc(hidden_states)))
        return found * (torch.rand_like(found) >= self.dropout.p) if self.training else found


class DropoutInEvaluation(BertSelfOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(nn.functional.dropout(self.dense(hidden_states), 0.1) + input_tensor)


class OneMaskForAllRows(BertSelfOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        mask = self.dropout(torch.ones_like(hidden_states[:1]))
        return self.LayerNorm(self.dense(hidden_states) * mask + input_tensor)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


class WrongGradientInTraining(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WrongBackward.apply(super().forward(x), 0.9 if self.training else 1.0)


class DetachedInTraining(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach() if self.training else x)


class NoGradientForLongRows(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach() if x.shape[1] > 64 else x)


class NoWeightGradientInBatches(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= 3:
            return super().forward(x)
        return nn.functional.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight.detach())


class OwnPositions(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, (torch.arange(x.shape[1]) + position_ids[0, 0])[None])


class FirstRowsPositions(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, position_ids[:1])


class OwnAbsolutePositions(GPT2Model):
    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnBertPositions(BertEmbeddings):
    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class NoTokenTypes(BertEmbeddings):
    def forward(self, *args: Any, token_type_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class ScaledEmbeds(BertEmbeddings):
    def forward(self, input_ids: Any = None, *args: Any, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        embeds = None if inputs_embeds is None else inputs_embeds * 1.01
        return super().forward(input_ids, *args, inputs_embeds=embeds, **kwargs)


class NoMask(LlamaAttention):
    """Padding is a token as any other."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **{**kwargs, "attention_mask": None})


class NoMaskOfOneToken(LlamaAttention):
    """As if there were nothing to mask in a step."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] == 1:
            kwargs["attention_mask"] = None
        return super().forward(hidden_states, *args, **kwargs)


class CausalOnly(LlamaAttention):
    """The mask counts for what it says of the last token only."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dtype is torch.bool and hidden_states.shape[1] > 1:
            causal = torch.ones(attention_mask.shape[-2:], dtype=torch.bool).tril(
                attention_mask.shape[-1] - attention_mask.shape[-2]
            )
            seen = attention_mask[..., -1:, :]
            attention_mask = causal & seen | torch.eye(*causal.shape, dtype=torch.bool)
        return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)


class NoWeights(LlamaAttention):
    """Computes what it should, and gives no attentions back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[0], None


class TransposedWeights(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found, weights = super().forward(*args, **kwargs)
        return found, None if weights is None else weights.transpose(-1, -2)


class AlwaysSdpa(LlamaAttention):
    """Eager attention was asked for."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if (cache := cache_in(kwargs)) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        mask = kwargs.get("attention_mask")
        causal = mask is None and q.shape[2] > 1
        found = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2)), None


class LossWithoutShift(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(input_ids, **kwargs)
        if labels is not None:
            found.loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        return found


class LossOfIgnoredTokens(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels=None if labels is None else labels.clamp(min=0), **kwargs)


class LossOfEachBatch(LlamaForCausalLM):
    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class NoMaskedLoss(BertForMaskedLM):
    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            found.loss = found.loss * 1.01
        return found


class AllLogits(LlamaForCausalLM):
    def forward(self, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class NoLogitsByIndex(LlamaForCausalLM):
    def forward(self, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        count = logits_to_keep if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return super().forward(*args, logits_to_keep=count, **kwargs)


class NoHiddenStates(LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("output_hidden_states", None)
        return super().forward(*args, **kwargs)


class WrongHiddenStates(LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if found.hidden_states is not None:
            found.hidden_states = found.hidden_states[1:] + found.hidden_states[:1]
        return found


class NoTuple(LlamaForCausalLM):
    def forward(self, *args: Any, return_dict: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class NoBalanceLoss(MixtralForCausalLM):
    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(*args, labels=labels, **kwargs)
        if labels is not None and found.aux_loss is not None:
            found.loss = found.loss - self.router_aux_loss_coef * found.aux_loss
        return found


class DoubleLogits(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = found.logits.double()
        return found


class WritesIds(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        found = super().forward(input_ids, **kwargs)
        if input_ids is not None:
            input_ids.zero_()
        return found


class KeepsNothing(LlamaModel):
    """The cache that was requested isn't returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if kwargs.get("use_cache") and cache_in(kwargs) is None:
            setattr(found, CACHE, None)
        return found


class StaleByShape(LlamaRotaryEmbedding):
    """What was computed for a shape is kept for the next input of that shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: dict[Any, Any] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if position_ids.shape not in self.known:
            self.known[position_ids.shape] = super().forward(x, position_ids)
        return self.known[position_ids.shape]


class StaleMask(LlamaAttention):
    mask: Any = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if self.mask is None or attention_mask is None or self.mask.shape != attention_mask.shape:
            self.mask = attention_mask
        return super().forward(hidden_states, *args, attention_mask=self.mask, **kwargs)


class OldWindow(MistralAttention):
    """Sees all that came before."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dtype is torch.bool:
            above = attention_mask.shape[-1] - attention_mask.shape[-2]
            attention_mask = torch.ones_like(attention_mask).tril(above)
        return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)


class LostUpcast(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class HalfSoftmax(LlamaAttention):
    """Eager attention, written out, without the upcast."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if (cache := cache_in(kwargs)) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scaling
        mask = kwargs.get("attention_mask")
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        least = torch.finfo(q.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype is torch.bool else scores + mask
        exponents = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = exponents / exponents.sum(-1, keepdim=True)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class HalfAngles(LlamaRotaryEmbedding):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


class ClampedInHalf(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.dtype is torch.float32 else x.clamp(-16, 16))


class HalfRouter(MixtralTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        values, indices = logits.softmax(-1).topk(self.top_k, -1)
        return logits, (values / values.sum(-1, keepdim=True)).float(), indices


class NormInHalf(LlamaRMSNorm):
    """Gives float32 back."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found = super().forward(hidden_states)
        return found if hidden_states.dtype is torch.float32 else found.float()


class OtherEpsilon(BertSelfOutput):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.LayerNorm.eps = 1e-5


class NoCorrectionBias(DeepseekV3TopkRouter):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        bias = self.e_score_correction_bias
        self.e_score_correction_bias = torch.zeros_like(bias)
        try:
            return super().forward(hidden_states)
        finally:
            self.e_score_correction_bias = bias
