# ----------------------------------------------------------------------------------------
# GENERATED FILE: change the config that it is made from, not this file.
# Source:  transformers.models.mixtral.modeling_mixtral (transformers 5.23.0)
# About:   What the patcher 'Mixtral with experts as layers' does to the models of this
#          module.
# Made by: patcher codegen examples/codegen/mixtral/mixtral_patch_gen_config.py
# Differs: replace class MixtralExperts fcbf0dde; override method (4 times); add helper (5
#          times); add code behind the imports; add import (11 times); rename MixtralModel;
#          add base ConvertedCheckpoints of MixtralPreTrainedModel; drop import
#          use_experts_implementation
# ----------------------------------------------------------------------------------------
# The source was itself generated, from src/transformers/models/mixtral/modular_mixtral.py.
# Copyright 2023 Mistral AI and the HuggingFace Inc. team. All rights reserved.
#
# This code is based on EleutherAI's GPT-NeoX library and the GPT-NeoX
# and OPT implementations in this library. It has been modified from its
# original forms to accommodate minor architectural differences compared
# to GPT-NeoX and OPT used by the Meta AI team that trained the model.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_kernel_forward_from_hub, use_kernelized_func
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs
from transformers.models.mixtral.configuration_mixtral import MixtralConfig

# [ADDED IMPORTS]
from copy import deepcopy
from itertools import accumulate
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

# [ADDED CODE]
# Why: the models here have names of their own, by which transformers finds their conversions
OWN_NAME = "SequentialExpertsC7AE"
CONVERTED = ("MixtralExperts",)
STOCK_CONVERSIONS = ("mixtral",)


# ======================================================================
# [HELPERS]
# ======================================================================
class ExpertLayers(nn.Module):
    """The layers of an expert. It is called, so that hooks on it run."""

    def forward(self, rows, run):
        return run(self, rows)


class ListedExperts(nn.Module):
    """Experts as modules: the children whose names are indices. It is indexed as a list."""

    def __len__(self):
        return sum(name.isdigit() for name in self._modules)

    def __iter__(self):
        return iter([self[index] for index in range(len(self))])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = int(index)
        name = str(position + len(self) if position < 0 else position)
        if name not in self._modules or name.startswith("-"):
            raise IndexError(f"expert {position} of {len(self)}")
        return self._modules[name]

    def every_expert_runs(self) -> bool:
        """Whether experts without tokens run on zero rows too, so that their gradients are zero and not None."""
        is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # since torch 2.7
        if is_exporting() or any(hasattr(parameter, "placements") for parameter in self.parameters()):
            return True
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())


def converted(model, state_dict, conversions, renamed_first):
    """Convert a state dict: renamings, then at most one converter for each key, or the converter first."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    before, after = (renamings, []) if renamed_first else ([], renamings)
    result, collected = {}, {}
    for key in sorted(state_dict, key=dot_natural_key):
        name, pattern = rename_source_key(key, before, converters)
        if pattern is None:
            result[rename_source_key(name, after, [])[0]] = state_dict[key]
        else:
            converter = collected.setdefault(name, deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, state_dict[key])
    for name, converter in collected.items():
        for target, tensor in converter.convert(name, model=model, config=model.config).items():
            result[rename_source_key(target, after, [])[0]] = tensor[0] if isinstance(tensor, list) else tensor
    return result


class OriginalCheckpoints:
    """Models that load, resume from and save checkpoints of the original model."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a checkpoint of the original."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check_conversions()
        return loaded

    def check_conversions(self):
        """Raise for converted parameters in a model that has no conversions."""
        converted, around = {globals()[name] for name in CONVERTED}, {}  # model -> whether it has conversions
        for path, module in self.named_modules():
            if isinstance(module, OriginalCheckpoints):
                around[path] = type(module).__name__.startswith(OWN_NAME) and type(module).__module__ == __name__
            owners = [owner for owner in around if f"{path}.".startswith(f"{owner}." if owner else "")]
            if type(module) in converted and not any(around[owner] for owner in owners):
                name = type(self.get_submodule(owners[-1])).__name__
                reason = f"has no conversions, which go by names, for its {type(module).__name__}"
                raise NotImplementedError(f"{name} {reason}: load another model of this file, or the original one.")

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Load a checkpoint of the original too, as `Trainer` does when it resumes."""
        names = self.state_dict().keys()
        if others := {key: tensor for key, tensor in state_dict.items() if key not in names}:
            own = {key: tensor for key, tensor in state_dict.items() if key in names}
            state_dict = own | self.in_own_layout(others)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def in_own_layout(self, state_dict):
        """Convert a checkpoint of the original, as a load does."""
        conversions = get_model_conversion_mapping(self, add_legacy=False)
        return converted(self, state_dict, conversions, renamed_first=True)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Raise for layers of the original, such as those of an adapter, which torch would ignore."""
        names, unknown = {name for name, _ in self.named_modules()}, {}  # layer -> its first key
        for key in state_dict:
            for layer in accumulate(key.removeprefix(prefix).split(".")[:-1], "{}.{}".format):
                if layer not in names:
                    unknown.setdefault(layer, key)
        conversions = get_model_conversion_mapping(self, add_legacy=False) if unknown else []
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        for layer, key in unknown.items():
            if rename_source_key(f"{layer}.weight", [], converters)[1] is not None:
                raise RuntimeError(f"{key} is for a layer of the original model only: load it into that.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def in_original_layout(self, state_dict):
        """Reverse the conversions of the load, for a checkpoint of the original."""
        conversions = getattr(self, "_weight_conversions", None)
        known = get_model_conversion_mapping(self, add_legacy=False)
        if conversions is None:  # it wasn't loaded
            self.check_conversions()
            conversions = [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
        else:  # also those of layers that the checkpoint didn't have
            converters = [conversion for conversion in known if isinstance(conversion, WeightConverter)]
            conversions = conversions + [
                item for item in converters if type(item.operations[0]).__module__ == __name__
            ]
        conversions = [conversion.reverse_transform() for conversion in reversed(conversions)]
        return converted(self, state_dict, conversions, renamed_first=False)

    def in_original_order(self, state_dict):
        """Sort a checkpoint by its names, as the original does when it saves."""
        return {key: state_dict[key] for key in sorted(state_dict, key=dot_natural_key)}

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, **kwargs):
        """Save a checkpoint of the original."""
        is_offloaded = {"cpu", "disk"}.intersection(getattr(self, "hf_device_map", {}).values())
        is_special = is_offloaded or getattr(self, "peft_config", None) or hasattr(self, "_patcher_record")
        if kwargs.get("save_original_format", True) and not is_special:
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = remove_tied_weights_from_state_dict(state_dict, self)
            state_dict = self.in_original_order(self.in_original_layout(state_dict))
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__).removeprefix(OWN_NAME)
        if is_main_process and name != type(self).__name__:  # the config has the name of the original class
            self.config.architectures = [name]
            self.config.save_pretrained(save_directory)

    @classmethod
    def prepare_distribute_model(cls, *args, **kwargs):
        """Raise for a load on several processes, as the plans of the original have names of its layers."""
        reason = "is of a generated file, whose layers a distributed_config or tp_plan of the original doesn't fit"
        raise NotImplementedError(f"{cls.__name__} {reason}. Load it whole, or load the original model.")


class ConvertedCheckpoints(OriginalCheckpoints):
    """Models of an original that converts checkpoints itself, so these aren't sorted by their own names."""

    def conversions_of_original(self, kind):
        """Return the conversions of a kind that make parameters of the original of a checkpoint."""
        mappings = (get_checkpoint_conversion_mapping(key) or () for key in STOCK_CONVERSIONS)
        conversions = [item for mapping in mappings for item in mapping if isinstance(item, kind)]
        return [item for item in conversions if not item.source_patterns[0].startswith("^")]

    def in_own_layout(self, state_dict):
        """Convert parameters of the original too, by way of the names of a checkpoint."""
        converters = self.conversions_of_original(WeightConverter)
        renaming = [item for item in converters if item.source_patterns != item.target_patterns]
        back = [item.reverse_transform() for item in reversed(renaming)]
        return super().in_own_layout(converted(self, state_dict, back, renamed_first=False))

    def in_original_order(self, state_dict):
        """Sort a checkpoint by the original's parameters, as the original does when it saves."""
        renamings, converters = map(self.conversions_of_original, (WeightRenaming, WeightConverter))
        targets = {pattern: item.target_patterns for item in converters for pattern in item.source_patterns}

        def position(key):
            name, pattern = rename_source_key(key, renamings, converters)
            first, *others = targets.get(pattern, [""])
            names = [name, *(name.replace(first, other) for other in others)]
            return min(map(dot_natural_key, names)), [*targets, None].index(pattern), dot_natural_key(key)

        return {key: state_dict[key] for key in sorted(state_dict, key=position)}


# ======================================================================
# [PATCHED CLASS] MixtralExperts
# ======================================================================
class MixtralExperts(ListedExperts):
    """Each expert as linear layers of its own, which are called one expert after the other."""

    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.intermediate_size
        for number in range(self.num_experts):
            expert = ExpertLayers()
            expert.gate_proj = nn.Linear(self.hidden_dim, self.intermediate_dim, bias=False)
            expert.up_proj = nn.Linear(self.hidden_dim, self.intermediate_dim, bias=False)
            expert.down_proj = nn.Linear(self.intermediate_dim, self.hidden_dim, bias=False)
            self.add_module(str(number), expert)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        # (experts, choices, tokens). An index of `len(self)` isn't an expert.
        mask = nn.functional.one_hot(top_k_index, len(self) + 1).permute(2, 1, 0)[: len(self)]
        # Indices on the CPU, as each lookup of an expert would wait for an accelerator. Not in a method of its own,
        # which torch.compile would trace as a separate graph.
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero() if not self.every_expert_runs() else None
        for expert_idx in range(len(self)) if hit is None else hit.flatten().cpu():
            position, token = torch.where(mask[expert_idx])
            rows = self[expert_idx](hidden_states[token], self.run_expert) * top_k_weights[token, position, None]
            output.index_add_(0, token, rows.to(output.dtype))
        return output.to(hidden_states.dtype)

    def run_expert(self, expert, hidden_states):
        hidden_states = self.act_fn(expert.gate_proj(hidden_states)) * expert.up_proj(hidden_states)
        return expert.down_proj(hidden_states)


class MixtralTopKRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_local_experts
        self.hidden_dim = config.hidden_size
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim))

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight)  # (seq_len, num_experts)
        router_probs = torch.nn.functional.softmax(router_logits.float(), dim=-1)
        router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)  # (seq_len, top_k)
        router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


class MixtralSparseMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.jitter_noise = config.router_jitter_noise
        self.gate = MixtralTopKRouter(config)
        self.experts = MixtralExperts(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        if self.training and self.jitter_noise > 0:
            hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        _, top_k_weights, top_k_index = self.gate(hidden_states)
        hidden_states = self.experts(hidden_states, top_k_index, top_k_weights)
        hidden_states = hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return hidden_states


@use_kernel_forward_from_hub("RMSNorm")
class MixtralRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps: float = 1e-6) -> None:
        """
        MixtralRMSNorm is equivalent to T5LayerNorm
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class MixtralRotaryEmbedding(nn.Module):
    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings

        self.config = config

        self.rope_type = self.config.rope_parameters["rope_type"]
        rope_init_fn: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = rope_init_fn(self.config)

        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.original_inv_freq = nn.Buffer(inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: MixtralConfig, **kwargs) -> tuple[torch.Tensor, float]:
        """
        Computes the inverse frequencies according to the original RoPE implementation
        Args:
            config ([`~transformers.PreTrainedConfig`]):
                The model configuration.
        Returns:
            Tuple of (`torch.Tensor`, `float`), containing the inverse frequencies for the RoPE embeddings and the
            post-processing scaling factor applied to the computed cos/sin (unused in this type of RoPE).
        """
        base = config.rope_parameters["rope_theta"]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

        attention_factor = 1.0  # Unused in this type of RoPE
        # Compute the inverse frequencies
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        return inv_freq, attention_factor

    @torch.no_grad()
    @dynamic_rope_update  # power user: used with advanced RoPE types (e.g. dynamic rope)
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling

        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


@use_kernel_forward_from_hub("rotary_pos_emb")
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Applies Rotary Position Embedding to the query and key tensors.

    Args:
        q (`torch.Tensor`): The query tensor.
        k (`torch.Tensor`): The key tensor.
        cos (`torch.Tensor`): The cosine part of the rotary embedding.
        sin (`torch.Tensor`): The sine part of the rotary embedding.
        unsqueeze_dim (`int`, *optional*, defaults to 1):
            The 'unsqueeze_dim' argument specifies the dimension along which to unsqueeze cos[position_ids] and
            sin[position_ids] so that they can be properly broadcasted to the dimensions of q and k. For example, note
            that cos[position_ids] and sin[position_ids] have the shape [batch_size, seq_len, head_dim]. Then, if q and
            k have the shape [batch_size, heads, seq_len, head_dim], then setting unsqueeze_dim=1 makes
            cos[position_ids] and sin[position_ids] broadcastable to the shapes of q and k. Similarly, if q and k have
            the shape [batch_size, seq_len, heads, head_dim], then set unsqueeze_dim=2.
    Returns:
        `tuple(torch.Tensor)` comprising of the query and key tensors rotated using the Rotary Position Embedding.
    """
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """
    This is the equivalent of torch.repeat_interleave(x, dim=1, repeats=n_rep). The hidden states go from (batch,
    num_key_value_heads, seqlen, head_dim) to (batch, num_attention_heads, seqlen, head_dim)
    """
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
):
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)

    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask

    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()

    return attn_output, attn_weights


@use_kernelized_func(apply_rotary_pos_emb)
class MixtralAttention(nn.Module):
    """Multi-headed attention from 'Attention Is All You Need' paper"""

    def __init__(self, config: MixtralConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[FlashAttentionKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        if past_key_values is not None:
            key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )

        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=getattr(self.config, "sliding_window", None),  # main diff with Llama
            **kwargs,
        )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


class MixtralDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: MixtralConfig, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size

        self.self_attn = MixtralAttention(config, layer_idx)

        self.mlp = MixtralSparseMoeBlock(config)
        self.input_layernorm = MixtralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MixtralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


# ======================================================================
# [MODIFIED CLASS] MixtralPreTrainedModel
# Methods patched: _init_weights
# ======================================================================
@auto_docstring
class MixtralPreTrainedModel(ConvertedCheckpoints, PreTrainedModel):
    config: MixtralConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MixtralDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "router_logits": OutputRecorder(MixtralTopKRouter, index=0),
        "hidden_states": MixtralDecoderLayer,
        "attentions": MixtralAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, MixtralExperts):
            pass
        elif isinstance(module, MixtralTopKRouter):
            init.normal_(module.weight, mean=0.0, std=std)


@auto_docstring
class SequentialExpertsC7AEMixtralModel(MixtralPreTrainedModel):
    def __init__(self, config: MixtralConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [MixtralDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = MixtralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = MixtralRotaryEmbedding(config=config)
        self.gradient_checkpointing = False

        # Initialize weights and apply final processing
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")

        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        if position_ids is None:
            past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        mask_function = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
        causal_mask = mask_function(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=causal_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )

        hidden_states = self.norm(hidden_states)

        return MoeModelOutputWithPast(  # only diff with Mistral is the output type, we need MoE
            last_hidden_state=hidden_states,
            past_key_values=past_key_values,
        )


MixtralModel = SequentialExpertsC7AEMixtralModel


def load_balancing_loss_func(
    gate_logits: torch.Tensor | tuple[torch.Tensor] | None,
    num_experts: int | None = None,
    top_k=2,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor | int:
    r"""
    Computes auxiliary load balancing loss as in Switch Transformer - implemented in Pytorch.

    See Switch Transformer (https://huggingface.co/papers/2101.03961) for more details. This function implements the loss
    function presented in equations (4) - (6) of the paper. It aims at penalizing cases where the routing between
    experts is too unbalanced.

    Args:
        gate_logits:
            Logits from the `gate`, should be a tuple of model.config.num_hidden_layers tensors of
            shape [batch_size X sequence_length, num_experts].
        num_experts:
            Number of experts
        top_k:
            The number of experts to route per-token, can be also interpreted as the `top-k` routing
            parameter.
        attention_mask (`torch.Tensor`, *optional*):
            The attention_mask used in forward function
            shape [batch_size X sequence_length] if not None.

    Returns:
        The auxiliary loss.
    """
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0

    # Accumulate assignment counts and probability sums layer by layer, normalizing at the end,
    # so peak memory stays O(seq_len * num_experts) regardless of the number of layers.
    compute_device = gate_logits[0].device
    # Use histc to avoid bincount's device-to-host sync.
    # GPU requires integers for determinism; CPU and MPS require floats for support and determinism.
    histc_dtype = torch.float32 if compute_device.type in ("cpu", "mps") else torch.int32
    tokens_per_expert_sum = torch.zeros(num_experts, dtype=torch.float32, device=compute_device)
    router_prob_sum = torch.zeros(num_experts, dtype=torch.float32, device=compute_device)
    total_rows = 0.0

    if attention_mask is not None:
        # The same flat mask applies to every layer's [batch_size * sequence_length] rows.
        flat_mask = attention_mask.reshape(-1).to(device=compute_device, dtype=torch.float32)

    for layer_gate in gate_logits:
        routing_weights = torch.nn.functional.softmax(layer_gate.to(compute_device), dim=-1)
        _, selected_experts = torch.topk(routing_weights, top_k, dim=-1)
        if attention_mask is None:
            # Count top-k assignments with fixed bounds to avoid a device-to-host sync.
            tokens_per_expert_sum = tokens_per_expert_sum + torch.histc(
                selected_experts.reshape(-1).to(histc_dtype), bins=num_experts, min=0, max=num_experts
            )
            # Sum of routing probabilities per expert
            router_prob_sum = router_prob_sum + routing_weights.float().sum(dim=0)
            total_rows = total_rows + routing_weights.shape[0]
        else:
            # Same reductions, weighted by the attention mask to exclude padding tokens
            tokens_per_expert_sum = tokens_per_expert_sum + torch.zeros(
                num_experts, dtype=torch.float32, device=compute_device
            ).scatter_add_(0, selected_experts.reshape(-1), flat_mask.repeat_interleave(top_k))
            router_prob_sum = router_prob_sum + (routing_weights.float() * flat_mask.unsqueeze(-1)).sum(dim=0)
            total_rows = total_rows + flat_mask.sum()

    tokens_per_expert = tokens_per_expert_sum / total_rows
    router_prob_per_expert = router_prob_sum / total_rows

    overall_loss = torch.sum(tokens_per_expert * router_prob_per_expert.unsqueeze(0))
    return overall_loss * num_experts


@auto_docstring
class MixtralForCausalLM(MixtralPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: MixtralConfig):
        super().__init__(config)
        self.model = MixtralModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_local_experts
        self.num_experts_per_tok = config.num_experts_per_tok

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeCausalLMOutputWithPast:
        r"""
        Example:

        ```python
        >>> from transformers import AutoTokenizer, MixtralForCausalLM

        >>> model = MixtralForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
        >>> tokenizer = AutoTokenizer.from_pretrained("mistralai/Mixtral-8x7B-v0.1")

        >>> prompt = "Hey, are you conscious? Can you talk to me?"
        >>> inputs = tokenizer(prompt, return_tensors="pt")

        >>> # Generate
        >>> generate_ids = model.generate(inputs.input_ids, max_length=30)
        >>> tokenizer.batch_decode(generate_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]
        "Hey, are you conscious? Can you talk to me?\nI'm not conscious, but I can talk to you."
        ```"""

        output_router_logits = (
            output_router_logits if output_router_logits is not None else self.config.output_router_logits
        )

        # decoder outputs consists of (dec_features, layer_state, dec_hidden, dec_attn)
        outputs: MoeModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )

        hidden_states = outputs.last_hidden_state
        hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
        logits = self.lm_head(hidden_states)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)

        aux_loss = None
        if output_router_logits:
            aux_loss = load_balancing_loss_func(
                outputs.router_logits,
                self.num_experts,
                self.num_experts_per_tok,
                attention_mask,
            )
            if labels is not None:
                loss += self.router_aux_loss_coef * aux_loss.to(loss.device)  # make sure to reside in the same device

        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )


# ======================================================================
# [MODIFIED CLASS] MixtralForSequenceClassification
# Methods patched: __init__
# ======================================================================
class MixtralForSequenceClassification(GenericForSequenceClassification, MixtralPreTrainedModel):
    def __init__(self, config):
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = MixtralModel(config)
        self.score = nn.Linear(config.get_text_config().hidden_size, self.num_labels, bias=False)

        # Initialize weights and apply final processing
        self.post_init()


# ======================================================================
# [MODIFIED CLASS] MixtralForTokenClassification
# Methods patched: __init__
# ======================================================================
class MixtralForTokenClassification(GenericForTokenClassification, MixtralPreTrainedModel):
    def __init__(self, config):
        super(GenericForTokenClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = MixtralModel(config)
        if getattr(config, "classifier_dropout", None) is not None:
            classifier_dropout = config.classifier_dropout
        elif getattr(config, "hidden_dropout", None) is not None:
            classifier_dropout = config.hidden_dropout
        else:
            classifier_dropout = 0.1
        self.dropout = nn.Dropout(classifier_dropout)
        self.score = nn.Linear(
            config.get_text_config().hidden_size,
            config.num_labels,
            bias=getattr(config, "token_classification_bias", True),
        )

        # Initialize weights and apply final processing
        self.post_init()


# ======================================================================
# [MODIFIED CLASS] MixtralForQuestionAnswering
# Methods patched: __init__
# ======================================================================
class MixtralForQuestionAnswering(GenericForQuestionAnswering, MixtralPreTrainedModel):
    def __init__(self, config):
        super(GenericForQuestionAnswering, self).__init__(config)
        self.model = MixtralModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

        # Initialize weights and apply final processing
        self.post_init()


register_checkpoint_conversion_mapping(
    "SequentialExpertsC7AEMixtralModel",
    [
        WeightRenaming(".block_sparse_moe.", ".mlp."),
        WeightRenaming(r".experts.(\d+).w1.weight", r".experts.\1.gate_proj.weight"),
        WeightRenaming(r".experts.(\d+).w3.weight", r".experts.\1.up_proj.weight"),
        WeightRenaming(r".experts.(\d+).w2.weight", r".experts.\1.down_proj.weight"),
    ],
    overwrite=True,
)


__all__ = [
    "MixtralForCausalLM",
    "MixtralForQuestionAnswering",
    "MixtralModel",
    "MixtralPreTrainedModel",
    "MixtralForSequenceClassification",
    "MixtralForTokenClassification",
]
