"""Qwen3 with fused RMSNorm, SwiGLU and rotary embedding, in plain torch.

patcher codegen examples/codegen/qwen3/qwen3_patch_gen_config.py --diff
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from patcher.codegen import PatchConfig

config = PatchConfig(
    source_module="transformers.models.qwen3.modeling_qwen3",
    target_file="patched_modeling_qwen3.py",
    description="Qwen3 with fewer kernel launches and less memory for activations in training.",
)


@config.replace_class("Qwen3RMSNorm", description="one call of torch's own kernel in place of six operations")
class FusedRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # The original normalises in float32 and scales in the input's dtype. So does this: the kernel is given no
        # weight, because it would scale before it rounds.
        normed = nn.functional.rms_norm(hidden_states.float(), self.weight.shape, eps=self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


@config.add_helper(description="silu(gate) * up, which keeps only its two inputs for the backward pass")
class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` with the backward pass written out.

    Autograd would also keep `silu(gate)`, a third tensor of the intermediate size in every layer. Here it is
    computed again: d silu(x) / dx = s + x s (1 - s) with s = sigmoid(x).
    """

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


@config.replace_class("Qwen3MLP", description="one tensor less to keep in every layer, see SwiGLU")
class FusedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]
        self.is_swiglu = config.hidden_act == "silu"

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        # other activations are possible in a config, and have another derivative
        hidden = SwiGLU.apply(gate, up) if self.is_swiglu else self.act_fn(gate) * up
        return self.down_proj(hidden)


@config.replace_function("apply_rotary_pos_emb", description="queries and keys are turned in one go")
def fused_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Turn pairs of channels of the queries and the keys by the angles of their positions.

    Args:
        q: queries, `(batch, heads, length, head_dim)`.
        k: keys, `(batch, key_value_heads, length, head_dim)`.
        cos: cosines of the angles, `(batch, length, head_dim)`.
        sin: sines of the angles, `(batch, length, head_dim)`.
        unsqueeze_dim: the dimension of the heads.
    """
    heads = [q.shape[unsqueeze_dim], k.shape[unsqueeze_dim]]
    both = torch.cat((q, k), dim=unsqueeze_dim)
    first, second = both.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    both = torch.addcmul(both * cos.unsqueeze(unsqueeze_dim), turned, sin.unsqueeze(unsqueeze_dim))
    return both.split(heads, dim=unsqueeze_dim)
