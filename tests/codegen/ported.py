"""A config as it is written for the generator that ours takes its method names from; only the import line is ours.

Every call is one that the documentation of that generator shows, with the keywords and in the order that it has there.
"""

import torch
import torch.nn as nn
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from patcher.codegen import PatchConfig, create_patch_from_external

# Define the configuration
config = PatchConfig(
    source_module="transformers.models.qwen3.modeling_qwen3",
    target_file="patched_modeling_qwen3_gpu.py",
    description="Qwen3 GPU patches",
)

# Add imports needed by your patches
config.add_import("torch.distributed", names=["all_gather", "all_reduce"])

# Exclude classes you don't need
config.exclude_from_output("Qwen3ForTokenClassification")


@config.replace_class("Qwen3RMSNorm", description="Use fused kernel")
class OptimizedRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        # Optimized implementation with comments preserved
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@config.replace_function("apply_rotary_pos_emb", description="Use fused RoPE")
def optimized_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q), turned(k)


@config.override_method("Qwen3Attention.forward", description="Add Ulysses SP")
def ulysses_attention_forward(
    self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
):
    # Your modified forward pass
    # Comments here will be preserved in the generated output!
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query_states = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key_states = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, *position_embeddings)  # noqa: F821
    if past_key_values is not None:
        key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)
    # ==========================================================================
    # BEGIN ULYSSES SEQUENCE PARALLEL MODIFICATIONS
    # ==========================================================================
    # These comments will appear in the generated file
    attn_output, attn_weights = eager_attention_forward(
        self, query_states, key_states, value_states, attention_mask, scaling=self.scaling, **kwargs
    )
    return self.o_proj(attn_output.flatten(2)), attn_weights


@config.modify_init("Qwen3Attention")
def modified_init(original_init, self, config, layer_idx):
    original_init(self, config, layer_idx)
    self.custom_attr = layer_idx


patch = create_patch_from_external(
    target="Qwen3MLP",
    replacement_module="tests.codegen.ported_kernels",
    replacement_name="ExternalMLP",
)
config.patches.append(patch)
