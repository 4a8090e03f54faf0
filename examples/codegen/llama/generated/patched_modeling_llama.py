# ----------------------------------------------------------------------------------------
# GENERATED FILE: change the config that it is made from, not this file.
# Source:  transformers.models.llama.modeling_llama (transformers 5.23.0)
# About:   What the patcher 'Llama with qkv joined' does to the models of this module.
# Made by: patcher codegen examples/codegen/llama/llama_patch_gen_config.py
# Differs: fuse LlamaAttention 81785ecb; override method
#          LlamaDecoderLayer.__init__ 89d93888, LlamaForSequenceClassification.__init__,
#          LlamaForQuestionAnswering.__init__, LlamaForTokenClassification.__init__; add
#          helper FusedLlamaAttention, JoinRows, OriginalCheckpoints, Refit, converted; add
#          code behind the imports; add import (11 times); rename LlamaModel; add base
#          OriginalCheckpoints of LlamaPreTrainedModel
# ----------------------------------------------------------------------------------------
# Copyright 2022 EleutherAI and the HuggingFace Inc. team. All rights reserved.
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
from torch import nn

from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_kernel_forward_from_hub, use_kernelized_func
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.models.llama.configuration_llama import LlamaConfig

# [ADDED IMPORTS]
from copy import deepcopy
from itertools import accumulate
from transformers.conversion_mapping import get_model_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

# [ADDED CODE]
# Why: the models here have names of their own, by which transformers finds their conversions
OWN_NAME = "QkvB1F4"
CONVERTED = ("FusedLlamaAttention",)


# ======================================================================
# [HELPERS]
# ======================================================================
class Refit(ConversionOps):
    """Converts original tensors by `forth`, and back by `back`: both take and return a list for each pattern."""

    is_back = False

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name="", model=None, **kwargs):
        inputs = [input_dict[name] for name in source_patterns if name in input_dict] or [*input_dict.values()]
        inputs = [tensors if isinstance(tensors, list) else [tensors] for tensors in inputs]
        name = full_layer_name.replace(target_patterns[0], source_patterns[0]) if self.is_back else full_layer_name
        outputs = (self.back if self.is_back else self.forth)(inputs, len(target_patterns), model, name)
        named = zip(target_patterns, outputs, strict=True)
        return {target.replace("*", str(n)): [tensor] for target, tensors in named for n, tensor in enumerate(tensors)}

    @property
    def reverse_op(self):
        reverse = deepcopy(self)
        reverse.is_back = not self.is_back
        return reverse


class JoinRows(Refit):
    """Concatenates the rows of several layers; the module of the joined layer has the numbers of rows."""

    def forth(self, inputs, *args):
        return [[torch.cat([rows for (rows,) in inputs])]]

    def back(self, inputs, count, model, name):
        owner, layer = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)
        sizes = getattr(model.get_submodule(owner), f"{layer}_sizes")
        return [[rows.clone()] for rows in inputs[0][0].split(sizes)]


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


logger = logging.get_logger(__name__)


@use_kernel_forward_from_hub("RMSNorm")
class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps: float = 1e-6) -> None:
        """
        LlamaRMSNorm is equivalent to T5LayerNorm
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


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, config: LlamaConfig):
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
    def compute_default_rope_parameters(config: LlamaConfig, **kwargs) -> tuple[torch.Tensor, float]:
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


class LlamaMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


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
class LlamaAttention(nn.Module):
    """Multi-headed attention from 'Attention Is All You Need' paper"""

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        self.q_proj = nn.Linear(
            config.hidden_size, config.num_attention_heads * self.head_dim, bias=config.attention_bias
        )
        self.k_proj = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias
        )
        self.v_proj = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias
        )
        self.o_proj = nn.Linear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.attention_bias
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
            **kwargs,
        )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


# ======================================================================
# [HELPERS]
# ======================================================================
@use_kernelized_func(apply_rotary_pos_emb)
class FusedLlamaAttention(LlamaAttention):
    """LlamaAttention with q_proj, k_proj and v_proj as one qkv_proj."""

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super(LlamaAttention, self).__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        self.qkv_proj_sizes = [
            config.num_attention_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
        ]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.qkv_proj_sizes), bias=config.attention_bias)
        self.o_proj = nn.Linear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.attention_bias
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        q_proj_output, k_proj_output, v_proj_output = self.qkv_proj(hidden_states).split(self.qkv_proj_sizes, dim=-1)
        query_states = q_proj_output.view(hidden_shape).transpose(1, 2)
        key_states = k_proj_output.view(hidden_shape).transpose(1, 2)
        value_states = v_proj_output.view(hidden_shape).transpose(1, 2)

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
            **kwargs,
        )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


# ======================================================================
# [MODIFIED CLASS] LlamaDecoderLayer
# Methods patched: __init__
# ======================================================================
class LlamaDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size

        self.self_attn = FusedLlamaAttention(config=config, layer_idx=layer_idx)

        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        # Self Attention
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states

        # Fully Connected
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


@auto_docstring
class LlamaPreTrainedModel(OriginalCheckpoints, PreTrainedModel):
    config: LlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlamaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": LlamaDecoderLayer,
        "attentions": LlamaAttention,
    }


@auto_docstring
class QkvB1F4LlamaModel(LlamaPreTrainedModel):
    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
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
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")

        if inputs_embeds is None:
            inputs_embeds: torch.Tensor = self.embed_tokens(input_ids)

        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        if position_ids is None:
            past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        causal_mask = create_causal_mask(
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
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )

        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values,
        )


LlamaModel = QkvB1F4LlamaModel


@auto_docstring
class LlamaForCausalLM(LlamaPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

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
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        Example:

        ```python
        >>> from transformers import AutoTokenizer, LlamaForCausalLM

        >>> model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
        >>> tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")

        >>> prompt = "Hey, are you conscious? Can you talk to me?"
        >>> inputs = tokenizer(prompt, return_tensors="pt")

        >>> # Generate
        >>> generate_ids = model.generate(inputs.input_ids, max_length=30)
        >>> tokenizer.batch_decode(generate_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]
        "Hey, are you conscious? Can you talk to me?\nI'm not conscious, but I can talk to you."
        ```"""
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

        hidden_states = outputs.last_hidden_state
        hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
        logits = self.lm_head(hidden_states)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# ======================================================================
# [MODIFIED CLASS] LlamaForSequenceClassification
# Methods patched: __init__
# ======================================================================
class LlamaForSequenceClassification(GenericForSequenceClassification, LlamaPreTrainedModel):
    def __init__(self, config):
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.get_text_config().hidden_size, self.num_labels, bias=False)

        # Initialize weights and apply final processing
        self.post_init()


# ======================================================================
# [MODIFIED CLASS] LlamaForQuestionAnswering
# Methods patched: __init__
# ======================================================================
class LlamaForQuestionAnswering(GenericForQuestionAnswering, LlamaPreTrainedModel):
    base_model_prefix = "transformer"  # For BC, where `transformer` was used instead of `model`

    def __init__(self, config):
        super(GenericForQuestionAnswering, self).__init__(config)
        self.transformer = LlamaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

        # Initialize weights and apply final processing
        self.post_init()


# ======================================================================
# [MODIFIED CLASS] LlamaForTokenClassification
# Methods patched: __init__
# ======================================================================
class LlamaForTokenClassification(GenericForTokenClassification, LlamaPreTrainedModel):
    def __init__(self, config):
        super(GenericForTokenClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = LlamaModel(config)
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


register_checkpoint_conversion_mapping(
    "QkvB1F4LlamaModel",
    [
        WeightConverter(
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.qkv_proj", [JoinRows()]
        ),
    ],
    overwrite=True,
)


__all__ = [
    "LlamaForCausalLM",
    "LlamaModel",
    "LlamaPreTrainedModel",
    "LlamaForSequenceClassification",
    "LlamaForQuestionAnswering",
    "LlamaForTokenClassification",
]
