"""Patches that compute what stock does in another order, or in another way: none of them may fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.models.bert.modeling_bert import BertOutput, BertSelfAttention, BertSelfOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter

from patcher import Patcher
from patcher.fusions import SequentialExperts
from tests.support.caches import cache_in
from tests.support.replacements import JOINED
from tests.support.tiny import tiny_jamba_config, tiny_llava_config, tiny_qwen2_moe_config, tiny_qwen2_vl_config
from tests.verification.wrong_patches import BERT, GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2


class Einsum(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.einsum("bld,hd->blh", x, self.gate_proj.weight)
        up = torch.einsum("bld,hd->blh", x, self.up_proj.weight)
        return torch.einsum("blh,dh->bld", gate * gate.sigmoid() * up, self.down_proj.weight)


class Float64Inside(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (each.weight.double() for each in (self.gate_proj, self.up_proj, self.down_proj))
        hidden = nn.functional.silu(x.double() @ gate.T) * (x.double() @ up.T)
        return (hidden @ down.T).to(x.dtype)


class Tiles(LlamaMLP):
    """The hidden width in tiles, which are summed up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tiles = (
            each.weight.split(24, dim) for each, dim in ((self.gate_proj, 0), (self.up_proj, 0), (self.down_proj, 1))
        )
        return sum(nn.functional.silu(x @ gate.T) * (x @ up.T) @ down.T for gate, up, down in zip(*tiles, strict=True))


class TilesOfTokens(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return torch.cat([super(TilesOfTokens, self).forward(tile) for tile in rows.split(32)]).view_as(x)


class Checkpointed(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if cache_in(kwargs) is not None:
            return super().forward(hidden_states, **kwargs)
        return checkpoint(super().forward, hidden_states, use_reentrant=False, **kwargs)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        share = gate.sigmoid()
        return grads[0] * up * (share + gate * share * (1 - share)), grads[0] * gate * share


class OwnBackward(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_Silu.apply(self.gate_proj(x), self.up_proj(x)))


class Copies(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found, weights = super().forward(hidden_states.clone(), *args, **kwargs)
        return found.transpose(0, 1).contiguous().transpose(0, 1), weights


def _states(self: Any, hidden_states: torch.Tensor, embeddings: Any, cache: Any) -> Any:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *embeddings)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    return q, k, v


class _ByHand:
    """What sdpa does, written out, for masks of both kinds."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        q, k, v = _states(self, hidden_states, position_embeddings, cache_in(kwargs))
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scaling
        if attention_mask is None:
            length = k.shape[-2]
            attention_mask = torch.ones(q.shape[-2], length, dtype=torch.bool).tril(length - q.shape[-2])
        if attention_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class SdpaByHand(_ByHand, LlamaAttention):
    pass


class SdpaByHandWithWindow(_ByHand, MistralAttention):
    pass


class HeadByHead(LlamaAttention):
    """Sdpa a head at a time; what asks for weights gets stock's."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.config._attn_implementation == "eager":
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        q, k, v = _states(self, hidden_states, position_embeddings, cache_in(kwargs))
        causal = attention_mask is None and q.shape[2] > 1
        heads = [
            nn.functional.scaled_dot_product_attention(
                q[:, head], k[:, head // self.num_key_value_groups], v[:, head // self.num_key_value_groups],
                None if attention_mask is None else attention_mask[:, 0], is_causal=causal,
            )
            for head in range(q.shape[1])
        ]  # fmt: skip
        return self.o_proj(torch.stack(heads, 2).flatten(2)), None


class NormInFloat64(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.double()
        x = x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        return self.weight * x.to(hidden_states.dtype)


class NormByTorch(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = nn.functional.rms_norm(hidden_states.float(), self.weight.shape, eps=self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class ComplexAngles(LlamaRotaryEmbedding):
    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        turns = torch.polar(torch.ones_like(angles), angles)
        parts = (torch.cat([each, each], -1) * self.attention_scaling for each in (turns.real, turns.imag))
        return tuple(each.to(x.dtype) for each in parts)


class Adapter(LlamaMLP):
    """A low-rank adapter that adds nothing yet."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lora_a = nn.Linear(config.hidden_size, 4, bias=False)
        self.lora_b = nn.Linear(4, config.hidden_size, bias=False)
        self.lora_dropout = nn.Dropout(0.1)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_b(self.lora_a(self.lora_dropout(x)))


class LogitsInChunks(LlamaForCausalLM):
    """The head on a few rows of the hidden states at a time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head.forward = self._head

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([nn.functional.linear(part, self.lm_head.weight) for part in x.split(16, dim=1)], 1)


class DropoutOfItsOwn(BertSelfOutput):
    """Draws other numbers, of the same distribution."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        x = self.dense(hidden_states)
        if self.training:
            kept = torch.rand_like(x) < 1 - self.dropout.p
            x = x * kept / (1 - self.dropout.p)
        return self.LayerNorm(x + input_tensor)


class DropoutFromTheEnd(BertOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states).flip(1)).flip(1) + input_tensor)


class EagerBert(BertSelfAttention):
    """Drops what eager attention drops, in another order of heads."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scaling
        if attention_mask is not None and attention_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        elif attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        weights = self.dropout(weights.flip(1)).flip(1)
        return (weights @ v).transpose(1, 2).flatten(2), weights


class TransposedMLP(GPT2MLP):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(hidden_states, self.c_fc.weight.T, self.c_fc.bias)
        x = nn.functional.linear(self.act(x), self.c_proj.weight.T, self.c_proj.bias)
        return nn.functional.dropout(x, self.dropout.p, self.training)


class AllExperts(MixtralExperts):
    """Every expert computes every token."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        gate, up = torch.einsum("td,ehd->teh", hidden_states, self.gate_up_proj).chunk(2, -1)
        each = torch.einsum("teh,edh->ted", self.act_fn(gate) * up, self.down_proj)
        weights = torch.zeros(*each.shape[:2], dtype=top_k_weights.dtype).scatter(1, top_k_index, top_k_weights)
        return torch.einsum("ted,te->td", each.float(), weights.float()).to(hidden_states.dtype)


class SigmoidRouter(MixtralTopKRouter):
    """The chosen alone: the others cancel out."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        values, indices = logits.float().topk(self.top_k, -1)
        return logits, values.softmax(-1), indices


RIGHT: dict[str, tuple[PretrainedConfig, Patcher]] = {
    "einsum": (LLAMA, Patcher({"LlamaMLP": Einsum})),
    "float64 inside": (LLAMA, Patcher({"LlamaMLP": Float64Inside})),
    "tiles": (LLAMA, Patcher({"LlamaMLP": Tiles})),
    "tiles of tokens": (LLAMA, Patcher({"LlamaMLP": TilesOfTokens})),
    "checkpointed": (LLAMA, Patcher({"LlamaMLP": Checkpointed})),
    "checkpointed layers": (LLAMA, Patcher({"LlamaDecoderLayer": CheckpointedLayer})),
    "a backward of its own": (LLAMA, Patcher({"LlamaMLP": OwnBackward})),
    "copies": (LLAMA, Patcher({"LlamaAttention": Copies})),
    "sdpa by hand": (LLAMA, Patcher({"LlamaAttention": SdpaByHand})),
    "sdpa by hand with a window": (MISTRAL, Patcher({"MistralAttention": SdpaByHandWithWindow})),
    "sdpa head by head": (LLAMA, Patcher({"LlamaAttention": HeadByHead})),
    "a norm in float64": (LLAMA, Patcher({"LlamaRMSNorm": NormInFloat64})),
    "torch's norm": (LLAMA, Patcher({"LlamaRMSNorm": NormByTorch})),
    "complex angles": (LLAMA, Patcher({"LlamaRotaryEmbedding": ComplexAngles})),
    "an adapter": (LLAMA, Patcher({"LlamaMLP": Adapter}, new_weights="lora_[ab]")),
    "logits in chunks": (LLAMA, Patcher({"LlamaForCausalLM": LogitsInChunks})),
    "gate and up in one": (LLAMA, JOINED),
    "dropout of its own": (BERT, Patcher({"BertSelfOutput": DropoutOfItsOwn})),
    "dropout from the end": (BERT, Patcher({"BertOutput": DropoutFromTheEnd})),
    "dropout of attention in another order": (BERT, Patcher({"BertSelfAttention": EagerBert})),
    "linear for Conv1D": (GPT2, Patcher({"GPT2MLP": TransposedMLP})),
    "every expert": (MIXTRAL, Patcher({"MixtralExperts": AllExperts})),
    "a softmax of the chosen": (MIXTRAL, Patcher({"MixtralTopKRouter": SigmoidRouter})),
    "fused projections of Llama": (LLAMA, Patcher(fusions=["qkv", "gate_up"])),
    "fused projections of Mistral": (MISTRAL, Patcher(fusions=["qkv", "gate_up"])),
    "fused projections of Qwen2": (QWEN2, Patcher(fusions=["qkv", "gate_up"])),
    "fused projections of BERT": (BERT, Patcher(fusions="qkv")),
    "experts one after another": (MIXTRAL, Patcher(fusions="sequential_experts")),
    "experts of all tokens": (MIXTRAL, Patcher(fusions=SequentialExperts(all_tokens=True))),
    "experts and a shared one": (tiny_qwen2_moe_config(), Patcher(fusions=["qkv", "gate_up", "sequential_experts"])),
    "patches": (tiny_llava_config(), Patcher(fusions=["qkv", "patch_embeddings"])),
    "patches in three dimensions": (tiny_qwen2_vl_config(), Patcher(fusions="patch_embeddings")),
    "Mamba, experts and attention": (tiny_jamba_config(), Patcher(fusions=["qkv", "gate_up"])),
}
