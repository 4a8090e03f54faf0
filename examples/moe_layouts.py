"""Other layouts for a mixture of experts: experts as plain Linear layers, fused attention, or an experiment.

    python examples/moe_layouts.py

The model is a tiny random Qwen2-MoE with grouped-query attention, so that this runs anywhere in seconds; the same
patchers work on the real one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Concatenate,
    PreTrainedModel,
    Qwen2MoeConfig,
    WeightConverter,
    logging,
)
from transformers.activations import ACT2FN
from transformers.models.qwen2_moe.modeling_qwen2_moe import apply_rotary_pos_emb

from patcher import Patcher, report


class Expert(nn.Module):
    """An expert of three Linear layers, which quantizers support."""

    def __init__(self, config: Qwen2MoeConfig):
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class LinearExperts(nn.ModuleList):
    """All experts of a layer, run one after the other, instead of two stacked parameters."""

    def __init__(self, config: Qwen2MoeConfig):
        super().__init__(Expert(config) for _ in range(config.num_experts))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        # (tokens, hidden), (tokens, k) and (tokens, k) -> (tokens, hidden)
        result = torch.zeros_like(hidden_states)
        for index, expert in enumerate(self):
            token, slot = torch.where(top_k_index == index)
            if token.numel():
                weighted = expert(hidden_states[token]) * top_k_weights[token, slot, None]
                result.index_add_(0, token, weighted.to(result.dtype))
        return result


class FusedAttention(nn.Module):
    """Attention with one projection for queries, keys and values, of different sizes because heads are grouped."""

    def __init__(self, config: Qwen2MoeConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.sizes = [
            config.num_attention_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
        ]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)  # (batch, length, heads, head_dim)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # its name before transformers 5.24
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if attention_mask is not None:
            attention_mask = attention_mask[..., : key.shape[-2]]
        states = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and query.shape[-2] > 1,
            enable_gqa=True,
        )
        return self.o_proj(states.transpose(1, 2).flatten(-2)), None


class GatedExperts(LinearExperts):
    """An experiment: the output of the experts times a learned scale that is initialized to one."""

    def __init__(self, config: Qwen2MoeConfig):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * self.scale


def join_qkv(kind: str) -> WeightConverter:
    sources = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
    return WeightConverter(sources, [f"self_attn.qkv_proj.{kind}"], operations=[Concatenate(dim=0)])


# Stock transformers stacks the experts of a checkpoint while loading; these patterns drop that conversion.
UNSTACKED = [r"experts\.gate_up_proj", r"experts\.down_proj"]

LINEAR_EXPERTS = Patcher({"Qwen2MoeExperts": LinearExperts}, UNSTACKED, name="experts as Linear layers")

FUSED_QKV = Patcher(
    {"Qwen2MoeAttention": FusedAttention},
    extra_weight_conversions=[join_qkv("weight"), join_qkv("bias")],
    name="one projection in the attention",
)

BOTH = LINEAR_EXPERTS | FUSED_QKV

EXPERIMENT = Patcher(
    {"Qwen2MoeExperts": GatedExperts}, UNSTACKED, new_weights=r"\.experts\.scale$", name="a scale on the experts"
)

PATCHERS = {"both": BOTH, "linear experts": LINEAR_EXPERTS, "fused qkv": FUSED_QKV, "experiment": EXPERIMENT}


def tiny_checkpoint(folder: Path) -> Path:
    """A random Qwen2-MoE with four query heads on two key-value heads."""
    config = Qwen2MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that a missing one changes outputs
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def compare(model: PreTrainedModel, stock: PreTrainedModel) -> tuple[float, bool]:
    """Return the largest difference of the logits, and whether greedy generation gives the same tokens."""
    inputs = torch.arange(24).view(2, 12)
    with torch.no_grad():
        difference = (model(inputs).logits - stock(inputs).logits).abs().max().item()
    tokens, expected = (m.generate(inputs, max_new_tokens=8, do_sample=False) for m in (model, stock))
    return difference, torch.equal(tokens, expected)


def saves_the_original(model: PreTrainedModel, checkpoint: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder, "model.safetensors"))
    original = load_file(checkpoint / "model.safetensors")
    return {key for key in saved if not key.endswith(".scale")} == original.keys() and all(
        torch.equal(saved[key], original[key]) for key in original
    )


def main() -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder, "qwen2-moe"))
        stock = AutoModelForCausalLM.from_pretrained(checkpoint)
        for patcher in PATCHERS.values():
            model = AutoModelForCausalLM.from_pretrained(checkpoint, patcher=patcher)
            print(report(model))
            difference, same_tokens = compare(model, stock)
            print(f"logits differ by at most {difference:.1e}, same greedy tokens: {same_tokens}")
            print(f"saves the original checkpoint: {saves_the_original(model, checkpoint)}\n")


if __name__ == "__main__":
    main()
